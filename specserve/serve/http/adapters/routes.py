"""The routes of other APIs than OpenAI's chat and completions: /v1/responses and /v1/messages. Each makes its body into
one of chat."""

import dataclasses

from fastapi import FastAPI, Request, Response

from specserve.errors import RequestError
from specserve.serve.http.adapters.dialects import DialectBody
from specserve.serve.http.adapters.messages_bodies import CountTokensBody, MessagesBody
from specserve.serve.http.adapters.messages_replies import PATH as MESSAGES
from specserve.serve.http.adapters.messages_replies import MessagesFormat
from specserve.serve.http.adapters.responses_bodies import ResponsesBody
from specserve.serve.http.adapters.responses_replies import ResponsesFormat
from specserve.serve.http.openai.bodies import ChatBody
from specserve.serve.http.openai.logprobs import ChatLogprobs
from specserve.serve.http.openai.replies import Json, ReplyFormat
from specserve.serve.http.service import Service, Work, off_loop
from specserve.serve.http.transport.guard import read_body


def add_dialect_routes(app: FastAPI, service: Service) -> None:
    model_name = service.engine.model_name

    def chat_work(body: DialectBody, reply_format: ReplyFormat | None) -> Work:
        try:
            work = service.chat(service.check(ChatBody, body.chat_fields()), reply_format, thinks=body.thinks)
        except RequestError as error:
            raise body.reword(error) from None
        return dataclasses.replace(work, body=body)

    def responses_work(raw: bytes) -> Work:
        body = service.read(ResponsesBody, raw)
        return chat_work(body, ResponsesFormat(model_name, body, ChatLogprobs(service.texts)))

    def messages_work(raw: bytes) -> Work:
        body = service.read(MessagesBody, raw)
        return chat_work(body, MessagesFormat(model_name, body.request_id))

    def count_work(raw: bytes) -> Work:
        return chat_work(service.read(CountTokensBody, raw), None)

    @app.post("/v1/responses", response_model=None)
    async def responses(http: Request) -> Response:
        return await service.respond(http, await off_loop(responses_work, await read_body(http)))

    @app.post(MESSAGES, response_model=None)
    async def messages(http: Request) -> Response:
        return await service.respond(http, await off_loop(messages_work, await read_body(http)))

    @app.post(MESSAGES + "/count_tokens")
    async def count_tokens(http: Request) -> Json:
        work = await off_loop(count_work, await read_body(http))
        return {"input_tokens": len(work.prompts[0])}
