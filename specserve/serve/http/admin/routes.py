"""The routes for operators: the model served and its state, metrics, the prefix cache, and the draft head and the way
to speculate of a server that goes on serving."""

import asyncio
import time
from typing import Annotated, Literal, NotRequired

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.exceptions import HTTPException

import specserve
from specserve.errors import CheckpointError, ConfigError, RequestError
from specserve.serve.engine.interface import EngineLike
from specserve.serve.http.admin.metrics import CONTENT_TYPE, Metrics
from specserve.serve.http.openai.fields import Body
from specserve.serve.http.openai.prompts import check_model
from specserve.serve.http.service import Service
from specserve.serve.http.transport.errors import RETRY_AFTER_SECONDS, ErrorResponse
from specserve.serve.http.transport.json_codec import ReplyObject


class ModelCard(ReplyObject):
    """The target, or its draft head or a LoRA adapter, whose parent is the target. `tau`: tokens per forward of the
    target; of the target and of adapters so far, of a head in its own evaluation."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]
    root: NotRequired[str]  # the name of an adapter's folder
    tau: float | None


class ModelList(ReplyObject):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class ServerLoad(ReplyObject):
    """GET /load: sequences that run or wait."""

    server_load: int


class Status(ReplyObject):
    """The reply of a server that is well."""

    status: Literal["ok"]


class Readiness(Status):
    """The reply of a server that answers requests at once."""

    programs_left: int  # still to be compiled, while plain decoding serves


class Version(ReplyObject):
    """GET /version."""

    version: str


class SpeculationNow(ReplyObject):
    """The way in which the server speculates: `off`, `auto`, or one way."""

    speculation: str


class DraftLoaded(ReplyObject):
    """A draft head by name, with tau of its own evaluation."""

    id: str
    tau: float | None


class LoadedDraft(ReplyObject):
    """POST /v1/load_draft."""

    status: Literal["ok"]
    draft: DraftLoaded


def add_status_routes(app: FastAPI, engine: EngineLike, metrics: Metrics) -> None:
    created = int(time.time())

    def cards() -> list[ModelCard]:
        return _cards(engine, metrics, created)

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return {"object": "list", "data": cards()}

    @app.get("/v1/models/{model:path}")  # ids of the Hub have a slash
    async def get_model(model: str) -> ModelCard:
        for card in cards():
            if card["id"] == model:
                return card
        check_model(engine, model)
        raise AssertionError("the target has a card")

    @app.get("/load")
    async def load() -> ServerLoad:
        stats = engine.stats()
        return {"server_load": stats.num_running + stats.num_waiting}

    @app.get("/health", response_model=None, openapi_extra={"reply": Status})
    async def health() -> Response:
        if engine.is_healthy:
            return JSONResponse({"status": "ok"})
        return ErrorResponse(503, "the engine is not healthy", code="unhealthy")

    @app.get("/ready", response_model=None, openapi_extra={"reply": Readiness})
    async def ready() -> Response:
        if engine.is_healthy and engine.is_ready:
            return JSONResponse({"status": "ok", "programs_left": engine.stats().num_programs_left})
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return ErrorResponse(503, "the server is starting, stopping or unhealthy", code="not_ready", headers=headers)

    @app.get("/version")
    async def version() -> Version:
        return {"version": specserve.__version__}

    @app.get("/metrics", response_model=None)
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.post("/flush_cache")  # no GET: it changes something, and any web page can send one
    async def flush_cache() -> Status:
        engine.flush_cache()
        return {"status": "ok"}


def _cards(engine: EngineLike, metrics: Metrics, created: int) -> list[ModelCard]:
    """Return the models: the target, with its tau so far, and its head, with the tau of its own evaluation."""

    def card(name: str, tau: float | None) -> ModelCard:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "specserve",
            "max_model_len": engine.max_model_len,
            "tau": tau,
        }

    cards = [card(engine.model_name, metrics.acceptance.tau)]
    if engine.draft is not None:
        cards.append({**card(engine.draft.name, engine.draft.tau), "parent": engine.model_name})
    for name, root in engine.loras.items():
        cards.append({**card(name, metrics.of_lora(name).tau), "parent": engine.model_name, "root": root})
    return cards


class LoadDraftBody(Body):
    """POST /v1/load_draft: a folder on the server, as `specserve train` writes it, or the other value of `--draft`, by
    which the target's own checkpoint brings the head."""

    draft: Annotated[str, Field(min_length=1, max_length=4096)]


class SpeculationBody(Body):
    """POST /v1/speculation: one of the ways that programs are compiled for, off, or auto."""

    speculation: str


def add_draft_routes(app: FastAPI, service: Service, *, is_allowed: bool) -> None:
    """Add the routes, which answer 403 unless the operator has allowed them, since they change the server for all."""

    def check_permission() -> None:
        if not is_allowed:
            raise HTTPException(403, "only the operator changes how it speculates; --allow-load-draft lets clients")

    def load(body: LoadDraftBody) -> LoadedDraft:
        try:
            draft = service.engine.load_draft(body.draft)
        except (ConfigError, CheckpointError) as error:
            raise RequestError(str(error), param="draft") from error
        return {"status": "ok", "draft": {"id": draft.name, "tau": draft.tau}}

    @app.post("/v1/load_draft", openapi_extra={"body": LoadDraftBody}, responses={403: {}})
    async def load_draft(http: Request) -> LoadedDraft:
        check_permission()
        body = await service.read(LoadDraftBody, http, lambda body: body)
        # a thread of its own: where programs are compiled it takes minutes, for which no other client may wait
        return await asyncio.to_thread(load, body)

    def choose(body: SpeculationBody) -> SpeculationNow:
        try:
            service.engine.set_speculation(body.speculation)
        except ConfigError as error:
            raise RequestError(str(error), param="speculation") from error
        return {"speculation": service.engine.speculation}

    @app.get("/v1/speculation")
    async def get_speculation() -> SpeculationNow:
        return {"speculation": service.engine.speculation}

    @app.post("/v1/speculation", openapi_extra={"body": SpeculationBody}, responses={403: {}})
    async def set_speculation(http: Request) -> SpeculationNow:
        check_permission()
        return await service.read(SpeculationBody, http, choose)
