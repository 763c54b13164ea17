"""The routes by which RL code changes the weights of a server that goes on serving, lets it rest, and takes it off the
device meanwhile: under SGLang's names and vLLM's, so that their drivers work."""

import asyncio
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar, cast

from fastapi import FastAPI, Request
from pydantic import Field

from specserve.errors import CheckpointError, ConfigError, RequestError
from specserve.serve.engine.rest import PauseMode
from specserve.serve.engine.rounds import PARTS, Part
from specserve.serve.engine.swap import DraftWeights, TargetWeights, UpdateMode
from specserve.serve.http.admin.routes import Status
from specserve.serve.http.openai.fields import Body, UnsupportedFields
from specserve.serve.http.service import Service
from specserve.serve.http.transport.json_codec import ReplyObject

BodyT = TypeVar("BodyT", bound=Body)
_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "retract", "in_place": "keep"}  # SGLang's


class UpdatableEngine(Protocol):
    """The interface of an engine whose weights may change."""

    @property
    def weight_version(self) -> str: ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_sleeping(self) -> bool: ...

    def update_weights(
        self,
        target: TargetWeights | None = None,
        draft: DraftWeights | None = None,
        *,
        version: str = "",
        mode: UpdateMode = "continue",
    ) -> str: ...

    def pause(self, mode: PauseMode = "abort") -> None: ...

    def resume(self) -> None: ...

    def sleep(self, parts: tuple[Part, ...] = PARTS) -> None: ...

    def wake(self, parts: tuple[Part, ...] = PARTS) -> None: ...


class Done(ReplyObject):
    """The reply to what has been done, as SGLang has it."""

    success: Literal[True]
    message: str


class Updated(Done):
    """POST /update_weights_from_disk. `num_paused_requests`: those that went on with the new weights, or were ended."""

    weight_version: str
    num_paused_requests: int


class WeightVersion(ReplyObject):
    """GET /weight_version: the version of the weights that serve."""

    weight_version: str


class IsPaused(ReplyObject):
    """GET /is_paused."""

    is_paused: bool


class IsSleeping(ReplyObject):
    """GET /is_sleeping: whether something is off the device."""

    is_sleeping: bool


class UpdateBody(Body):
    """POST /update_weights_from_disk: a model folder on the server, as a checkpoint of the target that is served, and
    perhaps one of its head. One of them may be left out."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {
        "flush_cache": (True,),
        "load_format": ("auto", "safetensors"),
        "is_async": (False,),
        "torch_empty_cache": (False, True),
        "recapture_cuda_graph": (False,),
        "manifest": (),
    }

    model_path: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    draft_path: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    weight_version: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    """The name of the version; a number where it is not given."""
    mode: Literal["continue", "drain"] = "continue"
    """Of what has begun: it goes on with the new weights, or ends first."""
    abort_all_requests: bool = False
    keep_pause: bool = False
    """Rest afterwards, until /continue_generation."""
    token_step: int = 0


class PauseBody(Body):
    """POST /pause_generation: what becomes of the requests that run. They end, are computed anew later, or go on later
    as they are."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(Body):
    """POST /continue_generation."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"torch_empty_cache": (False, True)}


class MemoryBody(Body):
    """POST /release_memory_occupation and /resume_memory_occupation: what is to leave the device, or to come back."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


def add_weight_routes(app: FastAPI, service: Service) -> None:
    """Add the routes; the engine's weights may change (`UpdatableEngine`)."""
    engine = cast(UpdatableEngine, service.engine)

    def update(body: UpdateBody) -> Updated:
        running, was_paused = service.engine.stats().num_running, engine.is_paused
        if body.abort_all_requests:
            engine.pause("abort")
        try:
            version = engine.update_weights(
                body.model_path, body.draft_path, version=body.weight_version or "", mode=body.mode
            )
        finally:
            if body.abort_all_requests and not was_paused:
                engine.resume()
        if body.keep_pause:
            engine.pause("keep")
        message = f"the weights are version {version} now"
        return {"success": True, "message": message, "weight_version": version, "num_paused_requests": running}

    def done(what: str) -> Done:
        return {"success": True, "message": what}

    def pause(body: PauseBody) -> Done:
        engine.pause(_MODES[body.mode])
        return done("paused")

    def go_on(_body: ContinueBody) -> Done:
        engine.resume()
        return done("going on")

    def release(body: MemoryBody) -> Done:
        engine.sleep(tuple(body.tags or PARTS))
        return done("off the device")

    def bring_back(body: MemoryBody) -> Done:
        engine.wake(tuple(body.tags or PARTS))
        return done("on the device")

    add_change(app, service, "/update_weights_from_disk", UpdateBody, update, Updated)
    add_change(app, service, "/pause_generation", PauseBody, pause, Done)
    add_change(app, service, "/continue_generation", ContinueBody, go_on, Done)
    add_change(app, service, "/release_memory_occupation", MemoryBody, release, Done)
    add_change(app, service, "/resume_memory_occupation", MemoryBody, bring_back, Done)
    _add_rest_routes(app, engine)


def add_change(
    app: FastAPI, service: Service, path: str, body_type: type[BodyT], change: Callable[[BodyT], object], reply: object
) -> None:
    """Add a route that makes a change, which takes as long as loading does, and replies with what it returns."""

    async def route(http: Request) -> object:
        body = await service.read(body_type, http, lambda body: body)
        return await _changed(lambda: change(body))

    app.post(path, response_model=None, openapi_extra={"body": body_type, "reply": reply})(route)


async def _changed(change: Callable[[], object]) -> object:
    """Make a change in a thread of its own, as it takes as long as loading does, for which no other client may wait."""

    def make() -> object:
        try:
            return change()
        except (ConfigError, CheckpointError) as error:
            raise RequestError(str(error)) from error

    return await asyncio.to_thread(make)


def _add_rest_routes(app: FastAPI, engine: UpdatableEngine) -> None:
    """Add vLLM's routes, whose options are in the query."""

    @app.get("/weight_version")
    async def weight_version() -> WeightVersion:
        return {"weight_version": engine.weight_version}

    @app.get("/is_paused")
    async def is_paused() -> IsPaused:
        return {"is_paused": engine.is_paused}

    @app.get("/is_sleeping")
    async def is_sleeping() -> IsSleeping:
        return {"is_sleeping": engine.is_sleeping}

    def add(path: str, make: Callable[[Request], Callable[[], None]]) -> None:
        async def route(http: Request) -> object:
            await _changed(make(http))
            return {"status": "ok"}

        app.post(path, response_model=None, openapi_extra={"reply": Status})(route)

    def pause(http: Request) -> Callable[[], None]:
        asked = _options(http, mode=("abort", "wait", "keep"), clear_cache=("true", "false"))
        mode = asked["mode"]
        if mode == "keep" and asked["clear_cache"] == "true":
            mode = "retract"
        return lambda: engine.pause(cast(PauseMode, mode))

    def sleep(http: Request) -> Callable[[], None]:
        # level 2 drops the weights elsewhere, and here the host keeps them at either
        mode = _options(http, level=("1", "2"), mode=("abort", "wait", "keep"))["mode"]

        def lie_down() -> None:
            engine.pause("retract" if mode == "keep" else cast(PauseMode, mode))
            engine.sleep()

        return lie_down

    def wake_up(http: Request) -> Callable[[], None]:
        _options(http, tags=PARTS)
        tags = http.query_params.getlist("tags")
        return lambda: engine.wake(cast("tuple[Part, ...]", tuple(tags)) or PARTS)

    def resume(http: Request) -> Callable[[], None]:
        _options(http)
        return engine.resume

    for path, make in (("/pause", pause), ("/resume", resume), ("/sleep", sleep), ("/wake_up", wake_up)):
        add(path, make)


def _options(http: Request, **allowed: tuple[str, ...]) -> dict[str, str]:
    """Return the options in the query of a request, the first of their values where one is left out. Raises
    RequestError."""
    for name, value in http.query_params.multi_items():
        if name not in allowed:
            raise RequestError(f"unknown option; known are {', '.join(allowed) or 'none'}", param=name[:200])
        if value not in allowed[name]:
            raise RequestError(f"expected one of {', '.join(allowed[name])}, got {value[:200]!r}", param=name)
    return {name: http.query_params.get(name, values[0]) for name, values in allowed.items()}
