"""The server's description of itself: /openapi.json, and a page of it at /docs where the server was told to."""

import functools

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse

from specserve.serve.http.admin.openapi import openapi
from specserve.serve.http.admin.openapi_page import page
from specserve.serve.http.transport.guard import error_response
from specserve.serve.http.transport.patient_json import write_json
from specserve.serve.http.transport.threads import in_thread


def add_openapi_routes(app: FastAPI, *, has_key: bool, has_docs: bool) -> None:
    """Add them after all other routes. `has_key`: routes need an API key; `has_docs`: the page is wanted."""

    @functools.cache
    def description() -> tuple[str, str]:
        """Return the description as JSON and as a page. It takes a while, so it is made once, on a thread."""
        told = openapi(app, has_key=has_key)
        return write_json(told), page(told)

    @app.get("/openapi.json", response_model=None)
    async def openapi_json() -> Response:
        told, _ = await in_thread(description, size=0)
        return Response(told, media_type="application/json")

    @app.get("/docs", response_model=None, include_in_schema=has_docs)
    async def docs() -> Response:
        if not has_docs:
            return error_response(404, "no page of the API is served: start with --docs, or read /openapi.json")
        _, told = await in_thread(description, size=0)
        return HTMLResponse(told, headers={"Content-Security-Policy": "default-src 'unsafe-inline'"})
