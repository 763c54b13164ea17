"""Replicas of one server on Ray Serve. A replica is an engine in a process of its own; in front of all of them one
process has the HTTP layer, and sends each request to the replica that `routing` chooses.

Nothing here schedules or restarts: Ray does.
"""

import asyncio
import functools
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import yaml

from specserve import config, log
from specserve.checkpoints.source import resolve_target
from specserve.cluster import connect, load
from specserve.drafters.registry import CARRIED
from specserve.errors import ConfigError, SpecServeError
from specserve.serve import engines
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.fleet.fleet import Fleet
from specserve.serve.fleet.group import Refused, ReplicaState, Taken
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.keys import read_api_keys
from specserve.serve.http.transport.server import bind_listener, check_tls
from specserve.serve.http.transport.threads import CallQueue
from specserve.serve.http.transport.tracing import Tracing
from specserve.serve.launch import find_names, make_engine, read_tokenizer
from specserve.serve.requests.request import Delta, SamplingParams
from specserve.serve.settings import CLUSTER, FLEET, LISTENER, PROCESS, ServeRun, check_unset, names_of
from specserve.serve.sizes import FEW_SLOTS, most_slots

logger = logging.getLogger(__name__)

NAME = "specserve"  # of the application, by which Ray finds it again
REPORTED_PAGES = 4096  # digests in a replica's report to the router, at most
REPORT_SECONDS = 1.0  # between two reports
HEALTH_SECONDS = 2.0  # between two questions whether a replica's engine is well
PATIENCE_SECONDS = 10.0  # after which a deployment that is not ready says what it waits for, again and again
END_SECONDS = 15.0  # for processes to end, once they have drained


class EngineReplica:
    """A replica with one engine, as Ray Serve runs it. Every method is Ray's or the fleet's to call; `to`, `floor` and
    `pages` are for the router alone."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        """Load and compile, which takes as long as for a server. Raises what `specserve serve` would."""
        self._ending = ExitStack()  # of as much as there is, wherever this fails
        log.setup("info")
        self._run = run = settings_of(args)
        _, folder = find_names(run.target, run.draft)
        self._first_folder = str(folder) if folder and run.draft != CARRIED else ""
        self._folder, self._version, self._is_beyond_help = "", 0, False
        models = engines.load(run, run.draft, is_checked=run.check_weights)
        self._engine = self._ending.enter_context(make_engine(models, run, lambda *_: None))
        self._mailbox: CallQueue | None = None
        self._id = load("ray.serve").get_replica_context().replica_tag

    def check_health(self) -> None:
        """Raise where Ray is to put another replica in this one's place."""
        if not self._engine.is_healthy or self._is_beyond_help:
            raise RuntimeError("the engine is not healthy")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the facts about this replica that the router uses."""
        return {"version": self._version, "pages": self._engine.rounds.scheduler.pool.newest_digests(REPORTED_PAGES)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the facts about this replica that `routing.scale` uses."""
        stats = self._engine.stats()
        slots = (stats.num_running + stats.num_waiting) / self._engine.num_slots
        return {"use": max(slots, stats.num_pages_held / stats.num_pages)}

    def state(self) -> ReplicaState:
        engine = self._engine
        return ReplicaState(
            replica=self._id,
            version=self._version,
            folder=self._folder,
            draft=engine.draft,
            speculation=engine.speculation,
            is_ready=engine.is_ready,
            stats=engine.stats(),
            model_name=engine.model_name,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
        )

    async def answer(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        options: Mapping[str, Any],
        *,
        floor: int = 0,  # noqa: ARG002 (the router's)
        pages: tuple[bytes, ...] = (),  # noqa: ARG002 (the router's)
    ) -> AsyncIterator[Taken | Refused | list[Delta]]:
        """Yield first whether the engine takes the request, and if so its deltas, as lists of those that came
        together. A caller that cancels this cancels the sequence."""
        if self._mailbox is None:
            self._mailbox = CallQueue(asyncio.get_running_loop())
        post, arrivals = self._mailbox.post, asyncio.Queue[Delta]()
        version = self._version
        submit = functools.partial(self._engine.submit, **options)
        submitted = asyncio.ensure_future(  # a new grammar takes a second
            asyncio.to_thread(submit, prompt_ids, params, lambda delta: post(lambda: arrivals.put_nowait(delta)))
        )
        try:
            request = await asyncio.shield(submitted)
        except SpecServeError as error:
            yield Refused.of(error)
            return
        except asyncio.CancelledError:
            submitted.add_done_callback(lambda done: done.exception() or done.result().cancel())
            raise
        try:
            yield Taken(version, request.max_new_tokens, request.seed)
            has_ended = False
            while not has_ended:
                deltas = [await arrivals.get()]
                while not arrivals.empty():
                    deltas.append(arrivals.get_nowait())
                has_ended = deltas[-1].finish_reason is not None
                yield deltas
        finally:
            request.cancel()

    async def load_draft(self, folder: str, version: int, *, to: str) -> DraftInfo | Refused | None:  # noqa: ARG002
        """Take the head in this folder (empty: the one that it began with). From now on the replica reports this
        version, because it cannot be said from which request on the new head answers."""
        self._version = version
        try:
            if folder != self._folder:
                if not (source := folder or self._first_folder):
                    self._is_beyond_help = True  # a layer of the target's cannot be read again: begin anew
                    return None
                await asyncio.to_thread(self._engine.load_draft, source)
                self._folder = folder
        except SpecServeError as error:
            return Refused.of(error)
        return self._engine.draft

    def set_speculation(self, speculation: str, *, to: str = "") -> Refused | None:  # noqa: ARG002
        try:
            self._engine.set_speculation(speculation)
        except SpecServeError as error:
            return Refused.of(error)
        return None

    def flush_cache(self) -> None:
        self._engine.flush_cache()

    def __del__(self) -> None:
        """Called by Ray once no request is open, or the time to drain is over."""
        self._ending.close()


class Front:
    """The HTTP layer over all replicas, the same app as that of one server."""

    async def __init__(self, replicas: Any, args: Mapping[str, Any]) -> None:
        self._ending = ExitStack()
        log.setup("info")
        run = settings_of(args)
        tokenizer = await asyncio.to_thread(read_tokenizer, run.target, run.draft)
        fleet = await Fleet.connect(replicas, tokenizer)
        tracing = self._ending.enter_context(Tracing(run.otlp_endpoint)) if run.otlp_endpoint else None
        self._app = create_app(fleet, api_keys=read_api_keys(run), run=run, tracing=tracing)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    def __del__(self) -> None:
        self._ending.close()


def application(args: dict[str, Any]) -> Any:
    """Make the application that Ray Serve runs, from the settings of `specserve serve` that differ from their
    defaults. It is the `import_path` of Ray's YAML. Raises ConfigError."""
    serve, run = load("ray.serve"), settings_of(args)
    check(run)
    room = most_slots(run) + run.max_queue + 16  # more than the engine takes, so that it says no, and how
    replicas = serve.deployment(
        EngineReplica,
        name="Engine",
        max_ongoing_requests=room,
        ray_actor_options=actor_options(run.replica_resources),
        graceful_shutdown_timeout_s=run.drain_seconds + END_SECONDS / 3,
        health_check_period_s=HEALTH_SECONDS,
        logging_config={"enable_access_log": False},  # the fleet looks at each replica every second
        request_router_config={
            "request_router_class": "specserve.serve.fleet.routing.PrefixRouter",
            "request_router_kwargs": {"slack": max(1, (run.max_slots or FEW_SLOTS) // 2)},
            "request_routing_stats_period_s": REPORT_SECONDS,
        },
        **_number(run),
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name="Front",
        num_replicas=1,
        max_ongoing_requests=run.max_connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=run.drain_seconds + END_SECONDS / 3,
    )
    return front.bind(replicas.bind(args), args)


def _number(run: ServeRun) -> dict[str, Any]:
    if not run.max_replicas:
        return {"num_replicas": run.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": run.min_replicas or 1,
            "max_replicas": run.max_replicas,
            "policy": {"policy_function": "specserve.serve.fleet.routing:scale"},
        }
    }


def check(run: ServeRun) -> None:
    """Check that these settings are possible for replicas. Raises ConfigError."""
    check_unset(run, names_of(PROCESS), "does not go with --ray, which starts processes of its own")
    check_unset(
        run,
        ("kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic"),
        "does not go with --ray, which routes by its replicas' own reports; it is for servers behind another router",
    )
    if not run.port:
        raise ConfigError("--port 0 does not go with --ray: every machine of the cluster listens there; give a number")
    if run.min_replicas and not run.max_replicas:
        raise ConfigError(f"--min-replicas {run.min_replicas} needs --max-replicas; without it --replicas is fixed")
    if run.max_replicas and run.replicas != 1:
        raise ConfigError("--replicas is a fixed number, --max-replicas lets it change: give one of them")
    if run.max_replicas and run.min_replicas > run.max_replicas:
        raise ConfigError(f"--min-replicas {run.min_replicas} is more than --max-replicas {run.max_replicas}")
    actor_options(run.replica_resources)


def check_none(run: ServeRun) -> None:
    """Check that no setting for replicas is given without `--ray`. Raises ConfigError."""
    check_unset(run, names_of(CLUSTER, FLEET), "needs --ray, which starts replicas")


def actor_options(resources: str) -> dict[str, Any]:
    """Read Ray's options from a text such as `cpu=2,gpu=1,TPU=4`. Raises ConfigError."""
    amounts: dict[str, float] = {}
    for part in resources.split(","):
        name, equals, amount = part.strip().partition("=")
        try:
            amounts[name] = float(amount)
        except ValueError:
            equals = ""
        if not (name and equals and amounts[name] >= 0):
            raise ConfigError(
                f"--replica-resources {resources!r}: expected name=amount parts, such as cpu=4,gpu=1 or cpu=1,TPU=4"
            )
    own = {f"num_{name}s": amounts.pop(name) for name in ("cpu", "gpu") if name in amounts}
    options: dict[str, Any] = {"num_cpus": 0, **own}
    if amounts:
        options["resources"] = amounts
    return options


def settings_of(args: Mapping[str, Any]) -> ServeRun:
    """Read the settings from a deployment's arguments. Raises ConfigError."""
    return replace(config.resolve(ServeRun, arguments=args), ray=True)


def deployment_of(run: ServeRun) -> dict[str, Any]:
    """Return this deployment as Ray Serve's YAML has it, for `serve deploy` and a RayService. Raises ConfigError."""
    check(run)
    plain, of_ray = asdict(ServeRun()), {*names_of(CLUSTER, LISTENER)}
    args = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(run).items()
        if value != plain[name] and name not in of_ray
    }
    options = {name: getattr(run, name) for name in names_of(LISTENER) if getattr(run, name)}
    return {
        "proxy_location": "EveryNode",
        "http_options": options,
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": f"{application.__module__}:{application.__name__}",
                "args": args,
            }
        ],
    }


def to_yaml(run: ServeRun) -> str:
    """Return `deployment_of` as YAML text. Raises ConfigError."""
    return yaml.safe_dump(deployment_of(run), sort_keys=False)


class Deployment:
    """A deployment that this process has made, and takes away again. It is a context manager: inside, it serves."""

    def __init__(self, run: ServeRun, say: Callable[[str], None]) -> None:
        """Make the deployment's handle. `say` is called with what is waited for."""
        self._run, self._say, self._is_there = run, say, False
        self.is_stopped = threading.Event()  # by SIGTERM or SIGINT

    def __enter__(self) -> "Deployment":
        """Deploy, and wait until it serves. Raises ConfigError where it cannot."""
        run = self._run
        deployment = deployment_of(run)
        check_tls(run.ssl_certfile, run.ssl_keyfile)
        if not run.ray_address:
            bind_listener(run.host, run.port).close()  # an impossible setting is reported before minutes of loading
            resolve_target(find_names(run.target, run.draft)[0], needs_weights=False)
        self._ray, self._serve = connect(run.ray_address), load("ray.serve")
        for number in (signal.SIGTERM, signal.SIGINT):  # now, since Ray has put its own handlers there
            signal.signal(number, lambda *_: self.is_stopped.set())
        try:
            self._check_room()
            [app] = deployment["applications"]
            self._serve.start(proxy_location=deployment["proxy_location"], http_options=deployment["http_options"])
            self._is_there = True
            target = self._serve.RunTarget(application(app["args"]), name=NAME, route_prefix=app["route_prefix"])
            self._serve.run_many(
                [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
            )
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Let running requests end, and take the deployment away; with it the cluster, where it is this process's."""
        if self._is_there:
            self._serve.delete(NAME, _blocking=False)  # else it waits for a minute at most
            end = time.monotonic() + self._run.drain_seconds + END_SECONDS
            while NAME in self._serve.status().applications and time.monotonic() < end:
                time.sleep(0.2)
            if not self._run.ray_address:
                self._serve.shutdown()
        self._ray.shutdown()

    def _check_room(self) -> None:
        """Check that the cluster has room. A cluster of this machine alone does not grow; more machines may join
        another one, so there it is a wait."""
        run = self._run
        number = run.replicas
        if run.max_replicas:
            number = max(1, run.min_replicas)
        options = actor_options(run.replica_resources)
        there = self._ray.cluster_resources()
        needed = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        for name, amount in needed.items():
            if amount * number > there.get(name, 0):
                text = f"{number} replicas of {amount:g} {name} need {amount * number:g}, the cluster has "
                text += f"{there.get(name, 0):g}; lower --replicas or --replica-resources {run.replica_resources}"
                if not run.ray_address:
                    raise ConfigError(text)
                self._say(f"{text}, or wait for more machines")

    def _wait(self) -> None:
        said, when = "", time.monotonic()
        while not self.is_stopped.wait(0.2):
            app = self._serve.status().applications.get(NAME)
            if app is None:
                continue
            if app.status.value == "RUNNING":
                return
            if app.status.value == "DEPLOY_FAILED":
                raise ConfigError(f"the deployment failed: {_cause(app.message)}")
            if time.monotonic() - when >= PATIENCE_SECONDS:
                when = time.monotonic()
                parts = [f"{name} {each.status.value.lower()} {each.message}" for name, each in app.deployments.items()]
                text = "; ".join(parts).strip()
                if text != said:
                    said = text
                    self._say(f"waiting for replicas: {text}")


def _cause(message: str) -> str:
    """Return the error of the replica itself, out of all that Ray says around it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("specserve.errors.")]
    if own:
        return own[-1].partition(": ")[2]
    return (lines or ["Ray gives no reason"])[-1]
