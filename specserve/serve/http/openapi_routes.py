"""The server's description of itself: /openapi.json, and a page of it at /docs where the server was told to."""

import functools

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse

from specserve.serve.http.guard import error_response
from specserve.serve.http.openapi import openapi
from specserve.serve.http.openapi_page import page
from specserve.serve.http.replies import Json


def add_openapi_routes(app: FastAPI, *, has_key: bool, has_docs: bool) -> None:
    """Add them after all other routes. `has_key`: routes need an API key; `has_docs`: the page is wanted."""

    @functools.cache
    def description() -> Json:
        return openapi(app, has_key=has_key)

    @app.get("/openapi.json", response_model=None)
    async def openapi_json() -> Response:
        return JSONResponse(description())

    @app.get("/docs", response_model=None, include_in_schema=has_docs)
    async def docs() -> Response:
        if not has_docs:
            return error_response(404, "no page of the API is served: start with --docs, or read /openapi.json")
        return HTMLResponse(page(description()), headers={"Content-Security-Policy": "default-src 'unsafe-inline'"})
