"""OpenAI's routes of generation: /v1/completions and /v1/chat/completions."""

from fastapi import FastAPI, Request, Response

from specserve.serve.http.openai.bodies import ChatBody, CompletionBody
from specserve.serve.http.service import Service, Work, off_loop
from specserve.serve.http.transport.guard import read_body


def add_openai_routes(app: FastAPI, service: Service) -> None:
    def completion_work(raw: bytes) -> Work:
        return service.completion(service.read(CompletionBody, raw))

    def chat_work(raw: bytes) -> Work:
        return service.chat(service.read(ChatBody, raw))

    @app.post("/v1/completions", response_model=None)
    async def completions(http: Request) -> Response:
        return await service.respond(http, await off_loop(completion_work, await read_body(http)))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(http: Request) -> Response:
        return await service.respond(http, await off_loop(chat_work, await read_body(http)))
