"""The routes by which RL code changes the weights of a server that goes on serving, lets it rest, and takes it off the
device meanwhile: under SGLang's names and vLLM's, so that their drivers work."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, cast

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.exceptions import HTTPException

from specserve.checkpoints.tensors import TensorFolder, head_beside
from specserve.errors import CheckpointError, ConfigError, RequestError
from specserve.serve.engine.interface import EngineLike
from specserve.serve.engine.rest import PauseMode, SleepMode
from specserve.serve.engine.rounds import PARTS, Part
from specserve.serve.engine.swap import DraftWeights, TargetWeights, UpdateMode
from specserve.serve.http.admin.routes import Status
from specserve.serve.http.openai.fields import Body, UnsupportedFields
from specserve.serve.http.openai.streaming import is_of
from specserve.serve.http.service import Service
from specserve.serve.http.transport.errors import EngineFailureError
from specserve.serve.http.transport.guard import MAX_ID_CHARS
from specserve.serve.http.transport.json_codec import ReplyObject
from specserve.serve.requests.request import Request as EngineRequest
from specserve.serve.update_folder import UpdateFolder

BodyT = TypeVar("BodyT", bound=Body)
_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "retract", "in_place": "keep"}  # SGLang's


class UpdatableEngine(EngineLike, Protocol):
    """The interface of an engine whose weights may change."""

    @property
    def weight_version(self) -> str: ...

    @property
    def target_folder(self) -> str: ...

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

    def abort(self, is_meant: Callable[[EngineRequest], bool] = ...) -> None: ...

    def pause(self, mode: PauseMode = "abort") -> None: ...

    def resume(self) -> None: ...

    def sleep(self, parts: tuple[Part, ...] = PARTS, mode: SleepMode = "retract") -> None: ...

    def wake(self, parts: tuple[Part, ...] = PARTS) -> None: ...


class Done(ReplyObject):
    """The reply to what has been done, as SGLang has it."""

    success: Literal[True]
    message: str


class Updated(Done):
    """POST /update_weights_from_disk. `num_paused_requests`: those that had not ended; they
    went on with the new weights, or were ended."""

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
    perhaps one of its head. One of them may be left out. Each may be a file of safetensors, in which the names of a
    head's tensors begin with `draft.`; one of both needs no draft_path."""

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


class AbortBody(Body):
    """POST /abort_request: the id that a request was sent with (`rid`, or `request_id`), or all."""

    rid: Annotated[str, Field(max_length=MAX_ID_CHARS)] = ""
    abort_all: bool = False


class ContinueBody(Body):
    """POST /continue_generation."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"torch_empty_cache": (False, True)}


class MemoryBody(Body):
    """POST /release_memory_occupation and /resume_memory_occupation: what is to leave the device, or to come back."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


class ReloadOptions(Body):
    """The options of `reload_weights`: a model folder on the server, as a checkpoint of the target that is served.
    Where it is left out the last one that was given is read again, or else the one that the server began with."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"weights_iterator": (), "is_checkpoint_format": (True,)}

    weights_path: Annotated[str | None, Field(min_length=1, max_length=4096)] = None


class CollectiveRpcBody(Body):
    """POST /collective_rpc: the one method of vLLM's workers that there is here. It waits until the weights serve."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"args": ([],), "timeout": ()}

    method: Literal["reload_weights"]
    kwargs: ReloadOptions | None = None


class RpcResults(ReplyObject):
    """POST /collective_rpc: what the method has returned, which is nothing."""

    results: list[None]


class WeightUpdates:
    """The updates of the weights that clients ask for, one at a time. The last one is kept where there is a folder for
    it."""

    def __init__(self, service: Service, folder: UpdateFolder | None) -> None:
        self._service, self._folder = service, folder
        self._engine = cast(UpdatableEngine, service.engine)
        self._one = threading.Lock()
        kept = folder.read() if folder else None
        self._last = kept.target if kept else ""  # target that was given; empty: none

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raises HTTPException where another update is under way."""
        if not self._one.acquire(blocking=False):
            raise HTTPException(409, "another update of the weights is under way; send this one when it has ended")
        try:
            yield
        finally:
            self._one.release()

    def use_named(self, body: UpdateBody) -> Updated:
        """Serve the weights in the folders that a body names."""
        with self.alone():
            num_open = self._num_open()  # before they are ended
            if body.abort_all_requests:
                self._engine.abort()
            beside = head_beside(body.model_path)
            draft = body.draft_path or (beside and str(beside))
            updated = self._use(body.model_path, draft, body.weight_version or "", body.mode, num_open)
            if body.keep_pause:
                self._engine.pause("keep")
        return updated

    def reload(self, target: str | None) -> None:
        """Serve the weights in a folder, or those of the target that was given last, as its files are now. The head
        stays, but where a file is named that has it too."""
        with self.alone():
            beside = head_beside(target)
            draft = None if beside is None else str(beside)
            self._use(target or self._last or self._engine.target_folder, draft, "", "continue", 0)

    def use_sent(self, path: Path, *, version: str, mode: str) -> Updated:
        """Serve the weights in a file that a client has sent, of the target, of its head or of both. It goes where they
        do not serve."""
        try:
            of_target, of_head = TensorFolder.of_version(path)
        except CheckpointError:
            path.unlink()
            raise
        target = str(path) if of_target.names() or not of_head.names() else None
        draft = str(path) if of_head.names() else None
        return self._use(target, draft, version, cast(UpdateMode, mode), self._num_open(), on_refused=path.unlink)

    def _num_open(self) -> int:
        stats = self._service.engine.stats()
        return stats.num_running + stats.num_waiting  # a pause may have sent them back to the queue

    def _use(
        self,
        target: str | None,
        draft: str | None,
        version: str,
        mode: UpdateMode,
        num_open: int,
        on_refused: Callable[[], None] = lambda: None,
    ) -> Updated:
        try:
            name = self._engine.update_weights(target, draft, version=version, mode=mode)
        except BaseException:
            on_refused()
            raise
        self._last = target or self._last
        if self._folder is not None:
            try:
                self._folder.keep(name, target, draft)
            except (OSError, CheckpointError) as error:
                raise EngineFailureError(f"version {name} serves, but cannot be kept: {error}") from error
        message = f"the weights are version {name} now"
        return {"success": True, "message": message, "weight_version": name, "num_paused_requests": num_open}


def add_weight_routes(app: FastAPI, service: Service, updates: WeightUpdates) -> None:
    """Add the routes; the engine's weights may change (`UpdatableEngine`)."""
    engine = cast(UpdatableEngine, service.engine)

    def done(what: str) -> Done:
        return {"success": True, "message": what}

    def call(body: CollectiveRpcBody) -> RpcResults:
        updates.reload(body.kwargs.weights_path if body.kwargs else None)
        return {"results": [None]}

    def abort(body: AbortBody) -> Done:
        if not body.rid and not body.abort_all:
            raise RequestError("name a request, or give abort_all as true for all", param="rid")
        engine.abort(lambda request: body.abort_all or is_of(request, body.rid))
        return done("ended")

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

    add_change(app, service, "/update_weights_from_disk", UpdateBody, updates.use_named, Updated, 409)
    add_change(app, service, "/collective_rpc", CollectiveRpcBody, call, RpcResults, 409)
    add_change(app, service, "/abort_request", AbortBody, abort, Done)
    add_change(app, service, "/pause_generation", PauseBody, pause, Done)
    add_change(app, service, "/continue_generation", ContinueBody, go_on, Done)
    add_change(app, service, "/release_memory_occupation", MemoryBody, release, Done)
    add_change(app, service, "/resume_memory_occupation", MemoryBody, bring_back, Done)
    _add_rest_routes(app, engine)


def add_change(
    app: FastAPI,
    service: Service,
    path: str,
    body_type: type[BodyT],
    change: Callable[[BodyT], object],
    reply: object,
    *statuses: int,
) -> None:
    """Add a route that makes a change, which takes as long as loading does, and replies with what it returns.
    `statuses`: of the errors that it alone may reply."""

    async def route(http: Request) -> object:
        body = await service.read(body_type, http, lambda body: body)
        return await changed(lambda: change(body))

    own: dict[int | str, dict[str, Any]] = {status: {} for status in statuses}
    app.post(path, response_model=None, openapi_extra={"body": body_type, "reply": reply}, responses=own)(route)


async def changed(change: Callable[[], object]) -> object:
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
            await changed(make(http))
            return {"status": "ok"}

        app.post(path, response_model=None, openapi_extra={"reply": Status})(route)

    def pause(http: Request) -> Callable[[], None]:
        asked = options_of(http, mode=("abort", "wait", "keep"), clear_cache=("true", "false"))
        mode, is_cleared = asked["mode"], asked["clear_cache"] == "true"

        def act() -> None:
            engine.pause(cast(PauseMode, "retract" if mode == "keep" and is_cleared else mode))
            if is_cleared:
                engine.flush_cache()

        return act

    def sleep(http: Request) -> Callable[[], None]:
        # level 2 drops the weights elsewhere, and here the host keeps them at either
        mode = options_of(http, level=("1", "2"), mode=("abort", "wait", "keep"))["mode"]
        return lambda: engine.sleep(mode=cast(SleepMode, "retract" if mode == "keep" else mode))

    def wake_up(http: Request) -> Callable[[], None]:
        options_of(http, tags=PARTS)
        tags = http.query_params.getlist("tags")
        return lambda: engine.wake(cast("tuple[Part, ...]", tuple(tags)) or PARTS)

    def resume(http: Request) -> Callable[[], None]:
        options_of(http)
        return engine.resume

    def reset_prefix_cache(http: Request) -> Callable[[], None]:
        # no page that a request holds is shared after a flush, so none is preempted; and there is no cache elsewhere
        options_of(http, reset_running_requests=("false", "true"), reset_external=("false", "true"))
        return engine.flush_cache

    for make in (pause, resume, sleep, wake_up, reset_prefix_cache):
        add(f"/{make.__name__}", make)


def options_of(http: Request, **allowed: tuple[str, ...] | None) -> dict[str, str]:
    """Return the options in the query of a request, the first of their values where one is left out; None: any text,
    which may be empty. Raises RequestError."""
    for name, value in http.query_params.multi_items():
        if name not in allowed:
            raise RequestError(f"unknown option; known are {', '.join(allowed) or 'none'}", param=name[:200])
        known = allowed[name]
        if known is not None and value not in known:
            raise RequestError(f"expected one of {', '.join(known)}, got {value[:200]!r}", param=name)
    return {name: http.query_params.get(name, values[0] if values else "") for name, values in allowed.items()}
