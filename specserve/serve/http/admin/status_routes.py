"""The routes that say what is served and how it fares, and the one that empties the prefix cache."""

import time

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

import specserve
from specserve.serve.engine.interface import EngineLike
from specserve.serve.http.admin.metrics import CONTENT_TYPE, Metrics
from specserve.serve.http.openai.prompts import check_model
from specserve.serve.http.openai.replies import Json
from specserve.serve.http.transport.guard import RETRY_AFTER_SECONDS, error_response


def add_status_routes(app: FastAPI, engine: EngineLike, metrics: Metrics) -> None:
    created = int(time.time())

    def cards() -> list[Json]:
        """Return the models: the target, with its tau so far, and its head, with the tau of its own evaluation."""
        same = {"object": "model", "created": created, "owned_by": "specserve", "max_model_len": engine.max_model_len}
        found = [{"id": engine.model_name} | same | {"tau": metrics.acceptance.tau}]
        if engine.draft is not None:
            head = {"parent": engine.model_name, "tau": engine.draft.tau}
            found.append({"id": engine.draft.name} | same | head)
        return found

    @app.get("/v1/models")
    async def list_models() -> Json:
        return {"object": "list", "data": cards()}

    @app.get("/v1/models/{model:path}")  # ids of the Hub have a slash
    async def get_model(model: str) -> Json:
        for card in cards():
            if card["id"] == model:
                return card
        check_model(engine, model)
        raise AssertionError("the target has a card")

    @app.get("/load")
    async def load() -> Json:
        stats = engine.stats()
        return {"server_load": stats.num_running + stats.num_waiting}

    @app.get("/health", response_model=None)
    async def health() -> Response:
        if engine.is_healthy:
            return JSONResponse({"status": "ok"})
        return error_response(503, "the engine is not healthy", code="unhealthy")

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        if engine.is_healthy and engine.is_ready:
            return JSONResponse({"status": "ok"})
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return error_response(503, "the server is starting, stopping or unhealthy", code="not_ready", headers=headers)

    @app.get("/version")
    async def version() -> Json:
        return {"version": specserve.__version__}

    @app.get("/metrics", response_model=None)
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.post("/flush_cache")  # no GET: it changes something, and any web page can send one
    async def flush_cache() -> Json:
        engine.flush_cache()
        return {"status": "ok"}
