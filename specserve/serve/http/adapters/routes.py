"""The routes of other APIs than OpenAI's chat and completions: /v1/responses and /v1/messages, each of which makes its
body into one of chat, and SGLang's /generate with the routes that its benchmark reads."""

import dataclasses

from fastapi import FastAPI

import specserve
from specserve.errors import RequestError
from specserve.serve.http.adapters.generate import GenerateBody, Generated, GenerateFormat
from specserve.serve.http.adapters.messages_bodies import CountTokensBody, MessagesBody
from specserve.serve.http.adapters.messages_replies import AnthropicEvent, AnthropicMessage, MessagesFormat
from specserve.serve.http.adapters.responses_bodies import ResponsesBody
from specserve.serve.http.adapters.responses_replies import Response as OpenAIResponse
from specserve.serve.http.adapters.responses_replies import ResponseEvent, ResponsesFormat
from specserve.serve.http.adapters.translation import TranslatedBody
from specserve.serve.http.admin.metrics import Metrics
from specserve.serve.http.openai.bodies import ChatBody, CompletionBody
from specserve.serve.http.openai.replies import ReplyFormat
from specserve.serve.http.openai.streaming import Work
from specserve.serve.http.service import Service
from specserve.serve.http.transport.errors import MESSAGES
from specserve.serve.http.transport.json_codec import ReplyObject


class TokenCount(ReplyObject):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class ModelInfo(ReplyObject):
    """GET /get_model_info, as SGLang's."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    has_image_understanding: bool
    has_audio_understanding: bool


class InternalState(ReplyObject):
    """The state of one engine."""

    avg_spec_accept_length: float
    num_running_reqs: int
    num_waiting_reqs: int


class ServerInfo(ReplyObject):
    """GET /get_server_info, as SGLang's."""

    version: str
    model_path: str
    served_model_name: str
    context_length: int
    speculative_algorithm: str
    speculative_draft_model_path: str | None
    internal_states: list[InternalState]


def add_translated_routes(app: FastAPI, service: Service) -> None:
    model_name = service.engine.model_name

    def chat_work(body: TranslatedBody, reply_format: ReplyFormat | None) -> Work:
        try:
            work = service.chat(service.check(ChatBody, body.chat_fields()), reply_format, thinks=body.thinks)
        except RequestError as error:
            raise body.reword(error) from None
        return dataclasses.replace(work, body=body)

    def responses(body: ResponsesBody) -> Work:
        return chat_work(body, ResponsesFormat(body.model or model_name, body, service.texts))

    def messages(body: MessagesBody) -> Work:
        return chat_work(body, MessagesFormat(body.model or model_name, body.request_id))

    def count_tokens(body: CountTokensBody) -> TokenCount:
        return {"input_tokens": len(chat_work(body, None).prompts[0])}

    service.generate(app, "/v1/responses", ResponsesBody, responses, reply=OpenAIResponse, event=ResponseEvent)
    service.generate(app, MESSAGES, MessagesBody, messages, reply=AnthropicMessage, event=AnthropicEvent)
    service.answer(app, MESSAGES + "/count_tokens", CountTokensBody, count_tokens, TokenCount)


def add_sglang_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    engine = service.engine

    def generate(body: GenerateBody) -> Work:
        try:
            completion = service.check(CompletionBody, body.completion_fields())
            work = service.completion(completion, GenerateFormat(body, service.texts))
        except RequestError as error:
            raise body.reword(error) from None
        return dataclasses.replace(work, body=body)

    service.generate(app, "/generate", GenerateBody, generate, reply=Generated | list[Generated], event=Generated)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> ModelInfo:
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
    async def server_info() -> ServerInfo:
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
