"""vLLM's routes of the tokenizer: /tokenize, /detokenize and /tokenizer_info."""

from typing import Annotated, ClassVar

from fastapi import FastAPI
from pydantic import ConfigDict, Field, with_config

from specserve.errors import RequestError
from specserve.serve.http.openai.bodies import ChatTemplateKwargs, Int64
from specserve.serve.http.openai.chat import Messages, Tools
from specserve.serve.http.openai.fields import Body, UnsupportedFields
from specserve.serve.http.openai.prompts import check_model, check_text_length, check_token_ids, decode, render_chat
from specserve.serve.http.service import Service
from specserve.serve.http.transport.json_codec import Json, ReplyObject


class TokenizeBody(Body):
    """POST /tokenize: either a prompt or messages."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"return_token_strs": (False,)}

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: ChatTemplateKwargs | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Int64], Field(fail_fast=True)]


class Tokens(ReplyObject):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(ReplyObject):
    """POST /detokenize."""

    prompt: str


@with_config(ConfigDict(extra="allow", strict=True))
class TokenizerInfo(ReplyObject):
    """GET /tokenizer_info; besides these, the tokenizer's special tokens by name."""

    vocab_size: int
    tokenizer_class: str


def add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    engine = service.engine

    def tokenize(body: TokenizeBody) -> Tokens:
        token_ids = _tokenize(service, body)
        return {"count": len(token_ids), "max_model_len": engine.max_model_len, "tokens": token_ids}

    service.answer(app, "/tokenize", TokenizeBody, tokenize, Tokens)

    @app.get("/tokenizer_info", openapi_extra={"reply": TokenizerInfo})
    async def tokenizer_info() -> Json:
        return {"vocab_size": engine.vocab_size} | dict(engine.tokenizer.info())

    def detokenize(body: DetokenizeBody) -> Detokenized:
        check_model(engine, body.model)
        check_token_ids(engine, body.tokens, "tokens")
        return {"prompt": decode(engine, body.tokens)}

    service.answer(app, "/detokenize", DetokenizeBody, detokenize, Detokenized)


def _tokenize(service: Service, body: TokenizeBody) -> list[int]:
    engine = service.engine
    check_model(engine, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.messages is None:
        check_text_length(engine, len(body.prompt or ""), "prompt")
        return engine.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    messages, tools = service.syntax.written(body.messages, body.tools)
    return render_chat(
        engine,
        messages,
        add_generation_prompt=body.add_generation_prompt,
        tools=tools,
        variables=body.chat_template_kwargs and body.chat_template_kwargs.model_dump(exclude_none=True),
    )
