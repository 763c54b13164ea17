"""OpenAI's routes of generation, /v1/completions and /v1/chat/completions; and vLLM's /tokenize and /detokenize."""

from fastapi import FastAPI, Request, Response
from pydantic import ConfigDict, with_config

from specserve.errors import RequestError
from specserve.serve.http.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from specserve.serve.http.openai.prompts import check_model, check_text_length, check_token_ids, decode, render_chat
from specserve.serve.http.openai.streaming import Work
from specserve.serve.http.service import Service, reply_off_loop
from specserve.serve.http.transport.json_codec import Json, ReplyObject


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


def add_openai_routes(app: FastAPI, service: Service) -> None:
    @service.post(app, "/v1/completions")
    def completions(raw: bytes) -> Work:
        return service.completion(service.read(CompletionBody, raw))

    @service.post(app, "/v1/chat/completions")
    def chat_completions(raw: bytes) -> Work:
        return service.chat(service.read(ChatBody, raw))


def add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    def tokens(raw: bytes) -> Tokens:
        token_ids = _tokenize(service, raw)
        return {"count": len(token_ids), "max_model_len": service.engine.max_model_len, "tokens": token_ids}

    def text(raw: bytes) -> Detokenized:
        body, engine = service.read(DetokenizeBody, raw), service.engine
        check_model(engine, body.model)
        check_token_ids(engine, body.tokens, "tokens")
        return {"prompt": decode(engine, body.tokens)}

    @app.post("/tokenize", response_model=None)
    async def tokenize(http: Request) -> Response:
        return await reply_off_loop(tokens, http)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Json:
        return {"vocab_size": service.engine.vocab_size} | dict(service.engine.tokenizer.info())

    @app.post("/detokenize", response_model=None)
    async def detokenize(http: Request) -> Response:
        return await reply_off_loop(text, http)


def _tokenize(service: Service, raw: bytes) -> list[int]:
    body, engine = service.read(TokenizeBody, raw), service.engine
    check_model(engine, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.messages is None:
        check_text_length(engine, len(body.prompt or ""), "prompt")
        return engine.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    return render_chat(
        engine,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        tools=[tool.for_template() for tool in body.tools],
        variables=body.chat_template_kwargs and body.chat_template_kwargs.model_dump(exclude_none=True),
    )
