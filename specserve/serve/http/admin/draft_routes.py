"""/v1/load_draft and /v1/speculation: another draft head, and another way to speculate, for a server that goes on
serving."""

import asyncio
from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.exceptions import HTTPException

from specserve.errors import CheckpointError, ConfigError, RequestError
from specserve.serve.http.openai.fields import Body
from specserve.serve.http.openai.replies import Json
from specserve.serve.http.service import Service, off_loop
from specserve.serve.http.transport.guard import read_body


class LoadDraftBody(Body):
    """POST /v1/load_draft: a folder on the server, as `specserve train` writes it, or the other value of `--draft`, by
    which the target's own checkpoint brings the head."""

    draft: Annotated[str, Field(min_length=1, max_length=4096)]


class SpeculationBody(Body):
    """POST /v1/speculation: one of the ways that programs are compiled for, off, or auto."""

    speculation: str


def add_draft_routes(app: FastAPI, service: Service, *, is_allowed: bool) -> None:
    """Add the routes, which answer 403 unless the operator has allowed them: they are for who runs the server."""

    def check_permission() -> None:
        if not is_allowed:
            raise HTTPException(403, "only the operator changes how it speculates; --allow-load-draft lets clients")

    def read_load(raw: bytes) -> LoadDraftBody:
        return service.read(LoadDraftBody, raw)

    def load(body: LoadDraftBody) -> Json:
        try:
            draft = service.engine.load_draft(body.draft)
        except (ConfigError, CheckpointError) as error:
            raise RequestError(str(error), param="draft") from error
        return {"status": "ok", "draft": {"id": draft.name, "tau": draft.tau}}

    @app.post("/v1/load_draft")
    async def load_draft(http: Request) -> Json:
        check_permission()
        body = await off_loop(read_load, await read_body(http))
        # a thread of its own: where programs are compiled it takes minutes, and nobody else may wait for them
        return await asyncio.to_thread(load, body)

    def choose(raw: bytes) -> Json:
        body = service.read(SpeculationBody, raw)
        try:
            service.engine.set_speculation(body.speculation)
        except ConfigError as error:
            raise RequestError(str(error), param="speculation") from error
        return {"speculation": service.engine.speculation}

    @app.get("/v1/speculation")
    async def get_speculation() -> Json:
        return {"speculation": service.engine.speculation}

    @app.post("/v1/speculation")
    async def set_speculation(http: Request) -> Json:
        check_permission()
        return await off_loop(choose, await read_body(http))
