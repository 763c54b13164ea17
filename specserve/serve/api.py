"""The OpenAI-compatible HTTP server: routes, and the socket they stand behind.

A route reads a body, turns it into prompts and SamplingParams, submits them and hands the deltas to the reply. Knows
nothing of tokens per step, pages or devices.
"""

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

import specserve
from specserve.errors import ConfigError, RequestError
from specserve.serve.api_logprobs import ChatLogprobs, CompletionLogprobs, TokenTexts
from specserve.serve.api_replies import ChatFormat, CompletionFormat, Json, ReplyFormat
from specserve.serve.api_schema import (
    ChatBody,
    ChatMessage,
    ChatTemplateKwargs,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
    parse_body,
)
from specserve.serve.http_guard import (
    RETRY_AFTER_SECONDS,
    ApiKeyGate,
    error_response,
    install_error_handlers,
    read_body,
)
from specserve.serve.interface import EngineLike
from specserve.serve.metrics import CONTENT_TYPE, Metrics
from specserve.serve.request import MAX_CHOICES, SamplingParams
from specserve.serve.streaming import ClientGoneError, Generation

logger = logging.getLogger(__name__)

# No tokenizer in use has longer tokens than this, so a longer text is over the context: told before tokenizing it.
MAX_CHARS_PER_TOKEN = 1024
START_TIMEOUT_SECONDS = 10.0
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold events back
_T = TypeVar("_T")


class ModelNotFoundError(RequestError):
    """A request for another model than the one served (HTTP 404)."""


def create_app(engine: EngineLike, *, api_key: str | None = None) -> FastAPI:
    """Make the app with all routes over one engine. With `api_key`, all but /health, /ready and /version need that key.

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

    _add_generation_routes(app, engine, metrics)
    _add_tokenizer_routes(app, engine)
    _add_status_routes(app, engine, metrics)
    _add_cache_routes(app, engine)
    return app


def _add_generation_routes(app: FastAPI, engine: EngineLike, metrics: Metrics) -> None:
    texts = TokenTexts(engine.tokenizer)

    async def respond(
        http: Request, body: SamplingBody, params: SamplingParams, prompts: list[list[int]], reply_format: ReplyFormat
    ) -> Response:
        options = {"priority": body.priority, "cache_salt": body.cache_salt}
        try:
            generation = Generation(engine, metrics, http, prompts, params, **options)
        except RequestError as error:
            raise body.reword(error) from None
        if body.stream:
            return EventSourceResponse(generation.stream(reply_format), headers=_SSE_HEADERS)
        try:
            return JSONResponse(await generation.reply(reply_format))
        except ClientGoneError:
            return Response(status_code=499)  # nobody reads it

    @app.post("/v1/completions", response_model=None)
    async def completions(http: Request) -> Response:
        body, params, prompts, echoes = await _off_loop(_prepare_completion, engine, await read_body(http))
        logprobs = CompletionLogprobs(texts, as_token_ids=body.return_tokens_as_token_ids)
        reply_format = CompletionFormat(engine.model_name, logprobs, include_usage=body.include_usage, echoes=echoes)
        return await respond(http, body, params, prompts, reply_format)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(http: Request) -> Response:
        body, params, token_ids = await _off_loop(_prepare_chat, engine, await read_body(http))
        logprobs = ChatLogprobs(texts, as_token_ids=body.return_tokens_as_token_ids)
        reply_format = ChatFormat(engine.model_name, logprobs, include_usage=body.include_usage)
        return await respond(http, body, params, [token_ids], reply_format)


async def _off_loop(prepare: Callable[[EngineLike, bytes], _T], engine: EngineLike, raw: bytes) -> _T:
    """Parsing and tokenizing a large body takes seconds; other requests' streams go on meanwhile."""
    return await run_in_threadpool(prepare, engine, raw)


def _prepare_completion(
    engine: EngineLike, raw: bytes
) -> tuple[CompletionBody, SamplingParams, list[list[int]], list[str]]:
    """The body, its options, its prompts as token ids, and the text to put before each answer (none without echo)."""
    body = parse_body(CompletionBody, raw)
    _check_model(engine, body.model)
    params = body.sampling_params()
    if len(body.prompt) * params.n > MAX_CHOICES:
        raise RequestError(
            f"one request makes at most {MAX_CHOICES} sequences, got {len(body.prompt)} prompts times n={body.n}",
            param="prompt",
        )
    prompts, echoes = [], []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            prompts.append(_encode(engine, prompt, add_special_tokens=body.add_special_tokens))
        else:
            _check_token_ids(engine, prompt, "prompt")
            prompts.append(prompt)
        if body.echo:
            text = prompt if isinstance(prompt, str) else _decode(engine, prompt)
            echoes += [text] * params.n
    return body, params, prompts, echoes


def _prepare_chat(engine: EngineLike, raw: bytes) -> tuple[ChatBody, SamplingParams, list[int]]:
    """The body, its options, and the token ids of its messages under the chat template."""
    body = parse_body(ChatBody, raw)
    _check_model(engine, body.model)
    params = body.sampling_params()
    return body, params, _render_chat(engine, body.messages, True, body.chat_template_kwargs)


def _encode(engine: EngineLike, text: str, *, add_special_tokens: bool) -> list[int]:
    _check_text_length(engine, len(text), "prompt")
    token_ids = engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise RequestError("prompt is empty: it has no tokens", param="prompt")
    return token_ids


def _decode(engine: EngineLike, token_ids: list[int]) -> str:
    return engine.tokenizer.decode(token_ids, skip_special_tokens=False)  # as it was sent, nothing hidden


def _render_chat(
    engine: EngineLike, messages: list[ChatMessage], add_generation_prompt: bool, kwargs: ChatTemplateKwargs | None
) -> list[int]:
    if not engine.tokenizer.has_chat_template:
        raise RequestError(f"{engine.model_name} has no chat template; use /v1/completions", param="messages")
    rendered = [message.for_template() for message in messages]
    _check_text_length(engine, sum(len(message["content"]) for message in rendered), "messages")
    template_kwargs = {} if kwargs is None else kwargs.model_dump(exclude_none=True)
    return engine.tokenizer.render_chat(
        rendered, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs or None
    )


def _check_text_length(engine: EngineLike, num_chars: int, param: str) -> None:
    if num_chars > MAX_CHARS_PER_TOKEN * engine.max_model_len:
        raise RequestError(
            f"{param} has {num_chars} characters, far over the model's context of {engine.max_model_len} tokens",
            param=param,
        )


def _check_token_ids(engine: EngineLike, token_ids: list[int], param: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < engine.vocab_size:
            raise RequestError(f"{param} token ids must be in [0, {engine.vocab_size}), got {token_id}", param=param)


def _check_model(engine: EngineLike, model: str | None) -> None:
    if model is not None and model != engine.model_name:
        raise ModelNotFoundError(
            f"the model {model[:200]!r} does not exist; {engine.model_name!r} is served", param="model"
        )


def _add_tokenizer_routes(app: FastAPI, engine: EngineLike) -> None:
    @app.post("/tokenize")
    async def tokenize(http: Request) -> Json:
        token_ids = await _off_loop(_tokenize, engine, await read_body(http))
        return {"count": len(token_ids), "max_model_len": engine.max_model_len, "tokens": token_ids}

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Json:
        return {"prompt": await _off_loop(_detokenize, engine, await read_body(http))}


def _tokenize(engine: EngineLike, raw: bytes) -> list[int]:
    body = parse_body(TokenizeBody, raw)
    _check_model(engine, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.messages is None:
        _check_text_length(engine, len(body.prompt or ""), "prompt")
        return engine.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    return _render_chat(engine, body.messages, body.add_generation_prompt, body.chat_template_kwargs)


def _detokenize(engine: EngineLike, raw: bytes) -> str:
    body = parse_body(DetokenizeBody, raw)
    _check_model(engine, body.model)
    _check_token_ids(engine, body.tokens, "tokens")
    return _decode(engine, body.tokens)


def _add_status_routes(app: FastAPI, engine: EngineLike, metrics: Metrics) -> None:
    card = {
        "id": engine.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "specserve",
        "max_model_len": engine.max_model_len,
    }

    @app.get("/v1/models")
    async def list_models() -> Json:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")  # ids of the Hub have a slash
    async def get_model(model: str) -> Json:
        _check_model(engine, model)
        return card

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


def _add_cache_routes(app: FastAPI, engine: EngineLike) -> None:
    @app.api_route("/flush_cache", methods=["GET", "POST"])  # SGLang's clients use either
    async def flush_cache() -> Json:
        engine.flush_cache()
        return {"status": "ok"}


def bind_listener(host: str, port: int) -> socket.socket:
    """Take a port (0: any free one), so that a taken one is told before minutes of loading. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None
    return listener


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves the meaning of a signal to us. It would stop accepting at once, and die of the signal."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 (uvicorn's signature)
        self._on_signal(sig)


class HttpServer:
    """An app on a real socket: `run` in the foreground until a signal, or `start` and `stop` in the background.

    SIGTERM or a first SIGINT drains: `on_drain(drain_seconds)` runs in a thread while connections are still accepted,
    so that clients get an honest 503; then open replies have a few seconds to be read. One more SIGINT stops at once.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        listener: socket.socket | None = None,
        drain_seconds: float = 0.0,
        on_drain: Callable[[float], None] | None = None,
    ) -> None:
        """Takes the port at once, or a socket from `bind_listener`. Raises ConfigError."""
        self._listener = bind_listener(host, port) if listener is None else listener
        self._drain_seconds = drain_seconds
        self._on_drain = on_drain
        address = self._listener.getsockname()
        bound_host, self.port = str(address[0]), int(address[1])
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound_host, bound_host)
        self.url = f"http://[{reachable}]:{self.port}" if ":" in reachable else f"http://{reachable}:{self.port}"
        self._config = uvicorn.Config(
            app,
            http="h11",  # bounds the header section, and is always installed
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
        )
        self._server = _Uvicorn(self._config, self._on_signal)
        self._thread: threading.Thread | None = None
        self._is_draining = False
        self._is_forced = False

    def start(self) -> None:
        """Serve from a background thread; returns when connections are accepted."""
        self._thread = threading.Thread(target=self.run, name="specserve-http", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise ConfigError(f"the HTTP server on {self.url} did not start; the log has the details")
            time.sleep(0.005)
        logger.info("serving on %s", self.url)

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM (or `stop`). Raises KeyboardInterrupt when it was told to stop at once."""
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._listener.close()
        if self._is_forced:
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Stop accepting, give open replies a few seconds, and wait for the thread."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._listener.close()

    def _on_signal(self, number: int) -> None:
        """Between two bytecodes of the event loop: no logging here, and nothing that waits."""
        if not self._is_draining:
            self._is_draining = True
            threading.Thread(target=self._drain, name="specserve-drain", daemon=True).start()
        elif number == signal.SIGINT:
            self._is_forced = True
            logging.getLogger("uvicorn.error").disabled = True  # it would write a traceback for every reply that is cut
            self._config.timeout_graceful_shutdown = 0
            self._server.force_exit = self._server.should_exit = True

    def _drain(self) -> None:
        try:
            if self._on_drain is not None:
                logger.info("stopping: running replies may end for %g s. Ctrl-C stops at once", self._drain_seconds)
                self._on_drain(self._drain_seconds)
        except Exception:
            logger.exception("draining failed")
        finally:
            self._server.should_exit = True
