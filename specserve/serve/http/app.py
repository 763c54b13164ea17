"""The app of the HTTP server: all routes over one engine, behind the guard."""

from collections.abc import Sequence

from fastapi import FastAPI

from specserve.serve.engine.interface import EngineLike
from specserve.serve.http.adapters.routes import add_sglang_routes, add_translated_routes
from specserve.serve.http.admin.metrics import Metrics
from specserve.serve.http.admin.openapi import add_openapi_routes
from specserve.serve.http.admin.routes import add_draft_routes, add_status_routes
from specserve.serve.http.openai.bodies import ChatBody, CompletionBody
from specserve.serve.http.openai.completions import ChatChunk, ChatCompletion, Completion, CompletionChunk
from specserve.serve.http.openai.hidden_states import add_states_route
from specserve.serve.http.openai.streaming import Listen
from specserve.serve.http.openai.tokenizer import add_tokenizer_routes
from specserve.serve.http.page.routes import add_page_routes
from specserve.serve.http.service import Service
from specserve.serve.http.transport.errors import install_error_handlers
from specserve.serve.http.transport.guard import Guard
from specserve.serve.http.transport.tracing import Tracing
from specserve.serve.settings import ServeRun


def create_app(
    engine: EngineLike,
    *,
    api_keys: Sequence[str] = (),
    run: ServeRun | None = None,
    tracing: Tracing | None = None,
    listen: Listen | None = None,
) -> FastAPI:
    """Make the app with all routes over one engine. With `api_keys`, all but the page at /, /health, /ready and
    /version need one of them.

    `run` has the server's settings, of which `keys` has read those about keys. `listen` is asked for a listener of each
    sequence. The app keeps its Prometheus series in
    `app.state.metrics`.
    """
    run = run or ServeRun()
    app = FastAPI(title="specserve", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.metrics = metrics = Metrics(engine.model_name, engine.stats)
    install_error_handlers(app)
    app.add_middleware(Guard, api_keys=api_keys, allowed_hosts=run.allowed_hosts, cors_origins=run.cors_origins)
    service = Service(engine, metrics, run, tracing, listen)
    service.generate(
        app, "/v1/completions", CompletionBody, service.completion, reply=Completion, event=CompletionChunk
    )
    service.generate(app, "/v1/chat/completions", ChatBody, service.chat, reply=ChatCompletion, event=ChatChunk)
    add_translated_routes(app, service)
    add_sglang_routes(app, service, metrics)
    add_tokenizer_routes(app, service)
    add_states_route(app, service, run.hidden_states)
    add_draft_routes(app, service, is_allowed=run.allow_load_draft)
    if run.allow_update_weights:
        from specserve.serve.http.admin.sent_weights import add_update_routes  # no other server needs it

        add_update_routes(app, service, run)
    if run.allow_load_lora:
        from specserve.serve.http.admin.loras import add_lora_routes

        add_lora_routes(app, service)
    add_status_routes(app, engine, metrics)
    add_page_routes(app, engine, needs_key=bool(api_keys))
    add_openapi_routes(app, has_key=bool(api_keys), has_docs=run.docs)
    return app
