"""The service between the routes and the engine: a checked body becomes work, and work becomes a reply.

Every route that generates makes its body into one of OpenAI's, and has its own format spell the reply.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse

from specserve.errors import ConfigError, RequestError
from specserve.serve.engine.interface import EngineLike, TokenizerLike
from specserve.serve.http.admin.metrics import Metrics
from specserve.serve.http.formats.reasoning import AnswerSyntax
from specserve.serve.http.openai.bodies import ChatBody, CompletionBody, SamplingBody
from specserve.serve.http.openai.completions import ChatFormat, CompletionFormat
from specserve.serve.http.openai.fields import Body, UnknownFields, check_body, parse_body
from specserve.serve.http.openai.logprobs import TokenTexts
from specserve.serve.http.openai.prompts import (
    check_model,
    check_num_tokens,
    check_token_ids,
    decode,
    encode,
    infill_ids,
    render_chat,
    truncated,
)
from specserve.serve.http.openai.replies import ReplyFormat, RequestMetrics
from specserve.serve.http.openai.streaming import ClientGoneError, Generation, Listen, Work
from specserve.serve.http.transport.guard import read_body
from specserve.serve.http.transport.json_codec import write_json
from specserve.serve.http.transport.threads import CallQueue, in_thread
from specserve.serve.http.transport.tracing import Tracing
from specserve.serve.requests.request import MAX_CHOICES, SamplingParams
from specserve.serve.settings import ServeRun

logger = logging.getLogger(__name__)

_JSON = "application/json"
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold events back
_T = TypeVar("_T")
_BodyT = TypeVar("_BodyT", bound=Body)


def sampling_defaults(tokenizer: TokenizerLike) -> Mapping[str, Any]:
    """Return what requests have where they leave options of sampling out, by the model's generation_config.json. Raises
    ConfigError where an option's value can be none."""
    defaults: Mapping[str, Any] = tokenizer.sampling_defaults
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(
            f"generation_config.json of the target: {error}; mend it, or start with --sampling-defaults openai"
        ) from None
    if defaults:
        named = ", ".join(f"{name} {value}" for name, value in defaults.items())
        logger.info("requests have %s where they say nothing else, by the target's generation_config.json", named)
    return defaults


class Service:
    """The engine as the routes of one app see it."""

    def __init__(
        self,
        engine: EngineLike,
        metrics: Metrics,
        run: ServeRun,
        tracing: Tracing | None = None,
        listen: Listen | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.syntax = AnswerSyntax(engine.tokenizer, run.tool_parser, run.reasoning_parser)
        self.texts = TokenTexts(engine.tokenizer)
        self._defaults = sampling_defaults(engine.tokenizer) if run.sampling_defaults == "model" else {}
        self._unknown_fields = UnknownFields(metrics.unknown_fields.inc) if run.allow_unknown_fields else None
        self._tracing, self._listen, self._allows_priority = tracing, listen, run.allow_priority
        self._names_version = run.allow_update_weights
        self._call_queue: CallQueue | None = None  # of the event loop, which is not there yet
        self._request_metrics = RequestMetrics(run.enable_per_request_metrics, run.per_request_spec_decode_metrics)

    def check(self, body_type: type[_BodyT], value: Mapping[str, Any]) -> _BodyT:
        """Read a checked body from this object. Raises RequestError."""
        return self._filled(check_body(body_type, value, self._unknown_fields))

    def _filled(self, body: _BodyT) -> _BodyT:
        """Return the body with the model's options of sampling in place of those that the client has left out."""
        if not isinstance(body, SamplingBody):
            return body
        left_out = self._defaults.keys() - body.model_fields_set
        return body.model_copy(update={name: self._defaults[name] for name in left_out}) if left_out else body

    def completion(self, body: CompletionBody, reply_format: ReplyFormat | None = None) -> Work:
        """Make the work of a body of /v1/completions; another route's `reply_format` may spell it. Raises
        RequestError."""
        engine = self.engine
        lora = check_model(engine, body.model)
        params = body.sampling_params()
        if len(body.prompt) * params.n > MAX_CHOICES:
            raise RequestError(
                f"one request makes at most {MAX_CHOICES} sequences, got {len(body.prompt)} prompts times n={body.n}",
                param="prompt",
            )
        prompts, echoes = [], []
        for prompt in body.prompt:
            if isinstance(prompt, str) and body.suffix:
                token_ids = infill_ids(engine, prompt, body.suffix, add_special_tokens=body.add_special_tokens)
            elif isinstance(prompt, str):
                token_ids = encode(engine, prompt, add_special_tokens=body.add_special_tokens)
            elif body.suffix:
                raise RequestError("suffix is only allowed with a prompt of text", param="suffix")
            else:
                rest = truncated(engine, body, prompt)
                check_num_tokens(engine, len(rest), "prompt")
                check_token_ids(engine, rest, "prompt")
                token_ids = prompt
            prompts.append(truncated(engine, body, token_ids))
            if body.echo:
                is_whole = len(prompts[-1]) == len(token_ids)
                text = prompt if isinstance(prompt, str) and is_whole else decode(engine, prompts[-1])
                echoes += [text] * params.n
        spelled = reply_format or CompletionFormat(lora or engine.model_name, body, self.texts, echoes)
        return Work(
            *(body, params, prompts, spelled),
            has_origins=body.return_draft_depths,
            lora=lora,
            request_id=body.request_id,
        )

    def chat(self, body: ChatBody, reply_format: ReplyFormat | None = None, *, thinks: bool | None = None) -> Work:
        """Make the work of a body of /v1/chat/completions; another route's `reply_format` may spell it. `thinks`:
        whether the model is to reason; None leaves it to the body. Raises RequestError."""
        engine = self.engine
        lora = check_model(engine, body.model)
        params = body.sampling_params()
        question = self.syntax.question(body, thinks)
        token_ids = render_chat(
            engine,
            question.messages,
            add_generation_prompt=body.has_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=question.tools,
            variables=question.variables,
        )
        token_ids = truncated(engine, body, token_ids)
        try:
            params, make_parser = self.syntax.reading(body, question, token_ids, params)
        except RequestError as error:
            raise body.reword(error) from None
        spelled = reply_format or ChatFormat(lora or engine.model_name, body, self.texts)
        return Work(
            *(body, params, [token_ids], spelled, make_parser),
            has_origins=body.return_draft_depths,
            lora=lora,
            request_id=body.request_id,
        )

    def _calls(self) -> CallQueue:
        loop = asyncio.get_running_loop()
        if self._call_queue is None or self._call_queue.loop is not loop:
            self._call_queue = CallQueue(loop)
        return self._call_queue

    async def respond(self, http: Request, work: Work) -> Response:
        """Submit the work and reply to it, whole or as a stream. Raises RequestError and CapacityError."""
        body = work.body
        if body.priority and not self._allows_priority:
            raise RequestError(
                f"priority must be 0, got {body.priority}: this server was started without --allow-priority",
                param="priority",
            )
        try:
            generation = Generation(
                self.engine,
                self.metrics,
                http,
                work,
                calls=self._calls(),
                request_metrics=self._request_metrics,
                names_version=self._names_version,
                tracing=self._tracing,
                listen=self._listen,
            )
            await generation.submit()
            if body.stream:
                http.state.probe = KEEPALIVE_COMMENT
                return EventSourceResponse(generation.stream(), headers=_SSE_HEADERS)
            return Response(await generation.reply(), media_type=work.reply_format.media_type)
        except RequestError as error:
            raise body.reword(error) from None
        except ClientGoneError:
            return Response(status_code=499)  # there is no reader

    async def read(self, body_type: type[_BodyT], http: Request, use: Callable[[_BodyT], _T]) -> _T:
        """Return what `use` makes of a request's checked body, off the event loop: parsing and tokenizing a large body
        takes seconds, in which other requests' streams go on. Raises RequestError."""
        raw = await read_body(http)
        return await in_thread(
            lambda: use(self._filled(parse_body(body_type, raw, self._unknown_fields))), size=len(raw)
        )

    def generate(
        self, app: FastAPI, path: str, body_type: type[_BodyT], make_work: Callable[[_BodyT], Work], **types: Any
    ) -> None:
        """Add the route of a path to the app, which replies to the work that is made of a checked body. `types`: of the
        whole `reply`, and of each `event` of a stream."""

        async def reply(http: Request) -> Response:
            return await self.respond(http, await self.read(body_type, http, make_work))

        app.post(path, response_model=None, openapi_extra={"body": body_type, **types})(reply)

    def answer(
        self, app: FastAPI, path: str, body_type: type[_BodyT], make: Callable[[_BodyT], Mapping[str, Any]], reply: Any
    ) -> None:
        """Add the route of a path to the app, which replies with the object, of type `reply`, that is made of a checked
        body."""

        async def answer(http: Request) -> Response:
            text = await self.read(body_type, http, lambda body: write_json(make(body)).encode())
            return Response(text, media_type=_JSON)

        app.post(path, response_model=None, openapi_extra={"body": body_type, "reply": reply})(answer)
