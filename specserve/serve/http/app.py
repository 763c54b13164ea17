"""The app of the HTTP server: all routes over one engine, behind the guard."""

from fastapi import FastAPI, Request, Response

from specserve.serve.http.guard import ApiKeyGate, error_response, install_error_handlers
from specserve.serve.http.metrics import Metrics
from specserve.serve.http.openai_routes import add_openai_routes
from specserve.serve.http.page_routes import add_page_routes
from specserve.serve.http.prompts import ModelNotFoundError
from specserve.serve.http.service import Service
from specserve.serve.http.status_routes import add_status_routes
from specserve.serve.http.tokenizer_routes import add_tokenizer_routes
from specserve.serve.interface import EngineLike


def create_app(engine: EngineLike, *, api_key: str | None = None) -> FastAPI:
    """Make the app with all routes over one engine. With `api_key`, all but the page at /, /health, /ready and /version
    need that key.

    The app keeps its Prometheus series in `app.state.metrics`.
    """
    app = FastAPI(title="specserve", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.metrics = metrics = Metrics(engine.model_name, engine.stats)
    if api_key is not None:
        ApiKeyGate(app, api_key=api_key)  # an unusable key is refused here, not at the first request
        app.add_middleware(ApiKeyGate, api_key=api_key)
    install_error_handlers(app)

    @app.exception_handler(ModelNotFoundError)
    async def on_model_not_found(_: Request, error: ModelNotFoundError) -> Response:
        return error_response(404, str(error), param=error.param, code="model_not_found")

    add_openai_routes(app, Service(engine, metrics))
    add_tokenizer_routes(app, engine)
    add_status_routes(app, engine, metrics)
    add_page_routes(app, engine, needs_key=api_key is not None)
    return app
