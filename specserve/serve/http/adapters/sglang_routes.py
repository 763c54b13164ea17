"""SGLang's own routes: /generate, and what its benchmark asks of a server."""

import dataclasses

from fastapi import FastAPI, Request, Response

import specserve
from specserve.errors import RequestError
from specserve.serve.http.adapters.generate_bodies import GenerateBody
from specserve.serve.http.adapters.generate_replies import GenerateFormat
from specserve.serve.http.admin.metrics import Metrics
from specserve.serve.http.openai.bodies import CompletionBody
from specserve.serve.http.openai.replies import Json
from specserve.serve.http.service import Service, Work, off_loop
from specserve.serve.http.transport.guard import read_body


def add_sglang_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    engine = service.engine

    def generate_work(raw: bytes) -> Work:
        body = service.read(GenerateBody, raw)
        try:
            completion = service.check(CompletionBody, body.completion_fields())
            work = service.completion(completion, GenerateFormat(body, service.texts))
        except RequestError as error:
            raise body.reword(error) from None
        return dataclasses.replace(work, body=body)

    @app.post("/generate", response_model=None)
    async def generate(http: Request) -> Response:
        return await service.respond(http, await off_loop(generate_work, await read_body(http)))

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Json:
        return {
            "model_path": engine.model_name,
            "tokenizer_path": engine.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Json:
        stats = engine.stats()
        return {
            "version": specserve.__version__,
            "model_path": engine.model_name,
            "served_model_name": engine.model_name,
            "context_length": engine.max_model_len,
            "speculative_algorithm": engine.speculation,
            "speculative_draft_model_path": engine.draft and engine.draft.name,
            "internal_states": [
                {
                    "avg_spec_accept_length": metrics.acceptance.tau,
                    "num_running_reqs": stats.num_running,
                    "num_waiting_reqs": stats.num_waiting,
                }
            ],
        }
