"""/tokenize and /detokenize, as vLLM's."""

from functools import partial

from fastapi import FastAPI, Request

from specserve.errors import RequestError
from specserve.serve.http.bodies import parse_body
from specserve.serve.http.guard import read_body
from specserve.serve.http.openai_bodies import DetokenizeBody, TokenizeBody
from specserve.serve.http.prompts import check_model, check_text_length, check_token_ids, decode, render_chat
from specserve.serve.http.replies import Json
from specserve.serve.http.service import off_loop
from specserve.serve.interface import EngineLike


def add_tokenizer_routes(app: FastAPI, engine: EngineLike) -> None:
    @app.post("/tokenize")
    async def tokenize(http: Request) -> Json:
        token_ids = await off_loop(partial(_tokenize, engine), await read_body(http))
        return {"count": len(token_ids), "max_model_len": engine.max_model_len, "tokens": token_ids}

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Json:
        return {"prompt": await off_loop(partial(_detokenize, engine), await read_body(http))}


def _tokenize(engine: EngineLike, raw: bytes) -> list[int]:
    body = parse_body(TokenizeBody, raw)
    check_model(engine, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.messages is None:
        check_text_length(engine, len(body.prompt or ""), "prompt")
        return engine.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    return render_chat(engine, body.messages, body.add_generation_prompt, body.chat_template_kwargs)


def _detokenize(engine: EngineLike, raw: bytes) -> str:
    body = parse_body(DetokenizeBody, raw)
    check_model(engine, body.model)
    check_token_ids(engine, body.tokens, "tokens")
    return decode(engine, body.tokens)
