"""`specserve serve`: target and draft behind an OpenAI-compatible endpoint."""

import gc
import os
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import jax
from rich.markup import escape

from specserve import processes
from specserve.cli.options import report_error
from specserve.cli.progress import console, warmup_bar
from specserve.errors import CheckpointError, ConfigError
from specserve.host import hold
from specserve.mesh import SERVING_AXES, parse_mesh
from specserve.processes import ProcessError
from specserve.serve.fleet import ranks, replicas
from specserve.serve.fleet.kv_events import Publisher, open_publisher
from specserve.serve.fleet.ranks import Follower, Leader
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.keys import read_api_keys
from specserve.serve.http.transport.server import HttpServer, bind_listener, check_tls
from specserve.serve.http.transport.tracing import Tracing
from specserve.serve.launch import Models, load_models, make_engine, make_follower
from specserve.serve.programs.program_list import list_programs
from specserve.serve.settings import ServeRun, check_unset

LOST_SECONDS = 2.0  # in which clients read that the engine has ended, and probes that it is not ready
_ending = threading.Lock()


def serve(run: ServeRun) -> None:
    """Load the models, compile their programs, and serve until SIGTERM or Ctrl-C; in this process, or as one of several
    that run this command, of which the first one serves and the others follow it; or as replicas on Ray Serve."""
    _check_learning(run)
    if run.ray:
        if run.allow_update_weights:
            raise ConfigError("--allow-update-weights: not with --ray, whose replicas would have to change as one")
        if run.lora or run.max_loras or run.allow_load_lora:
            raise ConfigError("--lora and --max-loras: not with --ray yet; merge the adapter into the target")
        _serve_replicas(run)
        return
    replicas.check_none(run)
    if run.update_folder and (run.coordinator or not run.allow_update_weights):
        raise ConfigError("--update-folder: with --allow-update-weights alone, in one process; give both or neither")
    processes.join(run.coordinator, run.num_processes, run.process_id, run.join_seconds)
    if not run.coordinator:
        _serve(run, None)
        return
    rank = None
    try:
        rank = ranks.connect(run.coordinator, _leave)
        if rank is not None:
            rank.agree(ranks.facts_of(run))
            run = replace(run, early_ready=False)  # a program that one process lacks would keep all waiting
        if isinstance(rank, Follower):
            _follow(run, rank)
        else:
            _serve(run, rank)
    except Exception as error:
        _end(error if rank is None else rank.reason(error))


def _check_learning(run: ServeRun) -> None:
    """Raises ConfigError where the settings do not go with a head that learns, or with one that does not."""
    if not run.learn:
        own = [name for name in asdict(run) if name.startswith("learn_")]
        check_unset(run, own, "is of a head that learns: give --learn too")
        return
    from specserve.learn.learning import check_settings  # no other server needs it

    check_settings(run)


def config(run: ServeRun) -> None:
    """Print what Ray Serve needs to know of this deployment."""
    print(replicas.to_yaml(run), end="")


def _serve_replicas(run: ServeRun) -> None:
    """Deploy replicas and serve until SIGTERM or Ctrl-C."""
    with replicas.Deployment(run, console.print) as served:
        if not served.is_stopped.is_set():
            number = f"{run.min_replicas or 1} to {run.max_replicas}" if run.max_replicas else run.replicas
            scheme = "https" if run.ssl_certfile else "http"
            console.print(f"{number} replicas on [bold]{scheme}://{run.host}:{run.port}/v1[/]. Ctrl-C stops")
        served.is_stopped.wait()
        console.print(f"stopping: running replies may end for {run.drain_seconds:g} s")


def _leave(error: ProcessError) -> None:
    """End this process, because another one has ended, whatever its threads wait for. Only the first process has
    clients and keeps JAX's service, without which the others would be aborted. So it ends last."""
    if processes.is_first():
        time.sleep(LOST_SECONDS)
    _end(error)


def _end(error: Exception) -> None:
    """End this process with one error, of whichever thread reports first. An orderly end would wait for the other
    processes, and they for this one."""
    with _ending:
        report_error(error)
        os._exit(processes.exit_status(error))


def _load(run: ServeRun, *, has_tokenizer: bool) -> Models:
    mesh = parse_mesh(run.mesh, SERVING_AXES)
    ranks.check_mesh(mesh)
    return load_models(
        run.target,
        run.draft,
        has_tokenizer=has_tokenizer,
        quantization=run.quantization,
        draft_quantization=run.draft_quantization,
        is_checked=run.check_weights,
        mesh=mesh,
    )


def _as_kept(models: Models, folder: str) -> Models:
    """The models with the last whole version of their weights, if one is kept there."""
    from specserve.serve.launch import with_version
    from specserve.serve.update_folder import VERSION_FILE, UpdateFolder  # no other server needs it

    kept = UpdateFolder(Path(folder).expanduser()).read()
    if kept is None:
        return models
    remedy = f"remove {folder}/{VERSION_FILE} to begin with those of the command"
    try:
        models = with_version(models, kept.name, kept.target, kept.draft)
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(f"the weights of version {kept.name} cannot be read: {error}; {remedy}") from error
    of_what = " and ".join(filter(None, (kept.target, kept.draft)))
    console.print(escape(f"the weights are version {kept.name}, of {of_what}; {remedy}"))
    return models


def _follow(run: ServeRun, follower: Follower) -> None:
    """Run what the first process broadcasts, until it ends. A signal to this process asks the first one to end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: follower.leave())
    runner = make_follower(_load(run, has_tokenizer=False), run, follower)
    console.print(f"process {jax.process_index()} of {jax.process_count()} does what the first one says")
    ranks.follow(runner, follower.frames())


def _own_folder(run: ServeRun) -> AbstractContextManager[object]:
    """Hold the folder that this server alone may change, where there is one, until the context ends. Raises ConfigError
    where another server has it."""
    option, name = "--update-folder", run.update_folder
    if run.learn and not run.warmup_only:  # a warm-up learns nothing
        option, name = "--learn", run.learn
    if not name:
        return nullcontext()
    folder = Path(os.path.realpath(Path(name).expanduser()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return hold(folder)
    except BlockingIOError:
        raise ConfigError(f"{option} {name}: another server has this folder; end that one, or give another") from None
    except OSError as error:
        raise ConfigError(f"{option} {name}: {error}") from error


def _serve(run: ServeRun, leader: Leader | None) -> None:
    """Hold what this server alone may have, before minutes of loading, and serve."""
    with _own_folder(run), leader or nullcontext(), open_publisher(run) or nullcontext() as kv_events:
        _serve_requests(run, leader, kv_events)


def _serve_requests(run: ServeRun, leader: Leader | None, kv_events: Publisher | None) -> None:
    if run.warmup_only:
        run = replace(run, early_ready=False)  # everything is to be compiled before the end
    api_keys = read_api_keys(run)
    check_tls(run.ssl_certfile, run.ssl_keyfile)
    tracing = Tracing(run.otlp_endpoint) if run.otlp_endpoint else None
    listener = bind_listener(run.host, run.port)  # a taken port is reported before minutes of loading
    models = _load(run, has_tokenizer=True)
    if run.update_folder:
        models = _as_kept(models, run.update_folder)
    learning = None
    if run.learn and not run.warmup_only:
        from specserve.learn.learning import LearningHead

        learning = LearningHead(run, models)
        models = learning.take_models()
    with warmup_bar() as on_warmup:
        engine = make_engine(models, run, on_warmup, leader=leader, watcher=kv_events)
    del models  # the engine has packed what it needs of them
    if run.warmup_only:
        console.print(f"{len(list_programs(engine.runner))} programs are compiled and cached")
        return

    jax.clear_caches()  # of what loading has run: what serves is compiled, and jax.jit calls none of it
    gc.collect()
    gc.freeze()  # all that is loaded stays, and no later collection walks it: that takes many steps' time

    def drain(seconds: float) -> None:
        engine.drain(seconds)
        engine.stop()  # a request that has not ended gets an error before its connection is cut

    app = create_app(engine, api_keys=api_keys, run=run, tracing=tracing, listen=learning and learning.listen)
    if learning:
        app.state.metrics.registry.register(learning)
    with engine, tracing or nullcontext(), learning.beside(engine) if learning else nullcontext():
        server = HttpServer(
            app,
            run,
            listener=listener,
            on_drain=drain,
        )
        number = engine.num_slots
        slots = "1 slot" if number == 1 else f"{number} slots"
        console.print(
            f"{escape(engine.model_name)} with speculation {engine.speculation} on [bold]{server.url}/v1[/], "
            f"{slots} of {engine.max_model_len} tokens; {server.url}/ shows it in a browser. Ctrl-C stops"
        )
        server.run()
