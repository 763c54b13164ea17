"""POST /v1/hidden_states: the target's hidden states of a prompt, from which other programs train draft heads."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import PlainValidator
from safetensors.numpy import save
from starlette.exceptions import HTTPException

from specserve.errors import RequestError
from specserve.serve.http.openai.bodies import CompletionBody, Int64, as_prompts
from specserve.serve.http.openai.fields import Body
from specserve.serve.http.openai.prompts import check_model
from specserve.serve.http.openai.replies import Answer, ReplyFormat, Usage
from specserve.serve.http.openai.streaming import Work
from specserve.serve.http.service import Service


class HiddenStatesBody(Body):
    """POST /v1/hidden_states: one prompt. The reply is a safetensors file of `token_ids` [token], `hidden_states`
    [token, layer, d_model], the residual stream behind each layer that the server keeps, and `last_hidden_state`
    [token, d_model], of which the logits are made."""

    model: str | None = None
    prompt: Annotated[
        list[str | list[int]], PlainValidator(as_prompts, json_schema_input_type=str | list[str] | list[int])
    ]
    """A string or token ids, such as /tokenize returns of a chat."""
    add_special_tokens: bool = True
    priority: Int64 = 0
    stream: ClassVar[bool] = False
    cache_salt: ClassVar[str] = ""
    may_learn: ClassVar[bool] = False

    def reword(self, error: RequestError) -> RequestError:
        """Return an error of the engine as it is: the fields have its names."""
        return error


class StatesFormat(ReplyFormat):
    """Spells the states of one prompt."""

    media_type = "application/octet-stream"

    def __init__(self, model: str, layers: Sequence[int]) -> None:
        self._model, self._layers = model, layers

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        del usage
        [answer] = answers
        assert answer.hidden_states is not None
        *kept, last = np.split(answer.hidden_states, len(self._layers) + 1, axis=-1)
        arrays = {
            "token_ids": np.array(answer.prompt_ids, np.int64),
            "hidden_states": np.stack(kept, axis=1),
            "last_hidden_state": np.ascontiguousarray(last),
        }
        return save(arrays, metadata={"model": self._model, "layers": json.dumps(list(self._layers))})


def add_states_route(app: FastAPI, service: Service, layers: Sequence[int]) -> None:
    """Add the route, which answers 403 unless the server keeps the states of some layers: the program that returns
    them is compiled at the start."""

    def make_work(body: HiddenStatesBody) -> Work:
        if len(body.prompt) != 1:
            raise RequestError(f"send one prompt a request, got {len(body.prompt)}", param="prompt")
        fields: dict[str, Any] = {"prompt": body.prompt, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        fields |= {"add_special_tokens": body.add_special_tokens}
        completion = service.check(CompletionBody, fields | ({"model": body.model} if body.model else {}))
        model = check_model(service.engine, body.model) or service.engine.model_name
        work = service.completion(completion, StatesFormat(model, layers))
        return dataclasses.replace(work, body=body, params=dataclasses.replace(work.params, hidden_states=True))

    @app.post("/v1/hidden_states", response_model=None, openapi_extra={"body": HiddenStatesBody}, responses={403: {}})
    async def hidden_states(http: Request) -> Response:
        if not layers:
            raise HTTPException(403, "this server returns no hidden states; --hidden-states names the layers to keep")
        return await service.respond(http, await service.read(HiddenStatesBody, http, make_work))
