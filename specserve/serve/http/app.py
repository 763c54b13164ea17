"""The app of the HTTP server: all routes over one engine, behind the guard."""

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from specserve.serve.engine.interface import EngineLike
from specserve.serve.http.adapters.messages_replies import MessagesDoor
from specserve.serve.http.adapters.routes import add_dialect_routes
from specserve.serve.http.adapters.sglang_routes import add_sglang_routes
from specserve.serve.http.admin.draft_routes import add_draft_routes
from specserve.serve.http.admin.metrics import Metrics
from specserve.serve.http.admin.openapi_routes import add_openapi_routes
from specserve.serve.http.admin.status_routes import add_status_routes
from specserve.serve.http.admin.tokenizer_routes import add_tokenizer_routes
from specserve.serve.http.openai.prompts import ModelNotFoundError
from specserve.serve.http.openai.routes import add_openai_routes
from specserve.serve.http.page.routes import add_page_routes
from specserve.serve.http.service import Service
from specserve.serve.http.transport.edge import HeadAsGet, HostGate
from specserve.serve.http.transport.guard import ApiKeyGate, BugGate, error_response, install_error_handlers
from specserve.serve.http.transport.request_ids import HEADER, RequestIds
from specserve.serve.http.transport.tracing import Tracing
from specserve.serve.settings import ServeRun


def create_app(
    engine: EngineLike, *, api_keys: Sequence[str] = (), run: ServeRun | None = None, tracing: Tracing | None = None
) -> FastAPI:
    """Make the app with all routes over one engine. With `api_keys`, all but the page at /, /health, /ready and
    /version need one of them.

    `run` has the server's settings, of which `keys` has read those about keys. The app keeps its Prometheus series in
    `app.state.metrics`.
    """
    run = run or ServeRun()
    layers = [Middleware(RequestIds), Middleware(BugGate)]  # the outermost first
    if run.cors_origins:
        origins = {"allow_origins": run.cors_origins, "expose_headers": [HEADER, "Retry-After"]}
        layers.insert(1, Middleware(CORSMiddleware, **origins, allow_methods=["GET", "POST"], allow_headers=["*"]))
    if run.allowed_hosts:
        layers.append(Middleware(HostGate, allowed=run.allowed_hosts))
    layers.append(Middleware(HeadAsGet))
    if api_keys:
        layers.append(Middleware(ApiKeyGate, api_keys=api_keys))
    app = FastAPI(
        title="specserve", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, middleware=layers
    )
    app.state.metrics = metrics = Metrics(engine.model_name, engine.stats)
    install_error_handlers(app)
    app.add_middleware(MessagesDoor)  # outermost: also a missing key is told in Anthropic's words

    @app.exception_handler(ModelNotFoundError)
    async def on_model_not_found(_: Request, error: ModelNotFoundError) -> Response:
        return error_response(404, str(error), param=error.param, code="model_not_found")

    service = Service(engine, metrics, run, tracing)
    add_openai_routes(app, service)
    add_dialect_routes(app, service)
    add_sglang_routes(app, service, metrics)
    add_tokenizer_routes(app, service)
    add_draft_routes(app, service, is_allowed=run.allow_load_draft)
    add_status_routes(app, engine, metrics)
    add_page_routes(app, engine, needs_key=bool(api_keys))
    add_openapi_routes(app, has_key=bool(api_keys), has_docs=run.docs)
    return app
