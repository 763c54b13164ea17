"""The routes by which LoRA adapters are loaded and unloaded while the server goes on: vLLM's and SGLang's."""

from typing import Annotated, ClassVar, Literal, Protocol, cast

from fastapi import FastAPI
from pydantic import Field

from specserve.errors import ConfigError
from specserve.serve.engine.interface import EngineLike
from specserve.serve.http.admin.weights import Done, add_change
from specserve.serve.http.openai.fields import Body, UnsupportedFields
from specserve.serve.http.service import Service
from specserve.serve.http.transport.errors import ModelNotFoundError
from specserve.serve.http.transport.json_codec import ReplyObject

_Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^,\s]+$")]  # metrics list names with commas


class LoadingEngine(EngineLike, Protocol):
    """The interface of an engine whose adapters may change."""

    def load_lora(self, name: str, folder: str) -> None: ...

    def unload_lora(self, name: str) -> None: ...


class LoadLoraBody(Body):
    """POST /v1/load_lora_adapter (vLLM) and /load_lora_adapter (SGLang): the PEFT folder of an adapter on the server,
    and the name by which requests choose it as their `model`."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {
        "base_model_name": (),
        "load_inplace": (False,),
        "is_3d_lora_weight": (False,),
        "pinned": (False, True),
        "added_tokens_config": (),
    }

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadLoraBody(Body):
    """POST /v1/unload_lora_adapter (vLLM) and /unload_lora_adapter (SGLang). Requests that were taken go on with the
    adapter."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"lora_int_id": ()}

    lora_name: _Name


class LorasLoaded(ReplyObject):
    """The adapters that are loaded after a change, as SGLang has them: their folders by name."""

    success: Literal[True]
    loaded_adapters: dict[str, str]


def add_lora_routes(app: FastAPI, service: Service) -> None:
    """Add the routes; the engine's adapters may change (`LoadingEngine`)."""
    engine = cast(LoadingEngine, service.engine)

    def load(body: LoadLoraBody) -> None:
        engine.load_lora(body.lora_name, body.lora_path)

    def unload(body: UnloadLoraBody) -> None:
        try:
            engine.unload_lora(body.lora_name)
        except ConfigError as error:
            raise ModelNotFoundError(str(error), param="lora_name") from None

    def loaded(body: LoadLoraBody) -> Done:
        load(body)
        return {"success": True, "message": f"Success: LoRA adapter '{body.lora_name}' added successfully."}

    def unloaded(body: UnloadLoraBody) -> Done:
        unload(body)
        return {"success": True, "message": f"Success: LoRA adapter '{body.lora_name}' removed successfully."}

    def all_loaded(body: LoadLoraBody) -> LorasLoaded:
        load(body)
        return {"success": True, "loaded_adapters": dict(engine.loras)}

    def rest_loaded(body: UnloadLoraBody) -> LorasLoaded:
        unload(body)
        return {"success": True, "loaded_adapters": dict(engine.loras)}

    add_change(app, service, "/v1/load_lora_adapter", LoadLoraBody, loaded, Done)
    add_change(app, service, "/v1/unload_lora_adapter", UnloadLoraBody, unloaded, Done)
    add_change(app, service, "/load_lora_adapter", LoadLoraBody, all_loaded, LorasLoaded)
    add_change(app, service, "/unload_lora_adapter", UnloadLoraBody, rest_loaded, LorasLoaded)
