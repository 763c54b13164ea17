"""`specserve serve`: target and draft behind an OpenAI-compatible endpoint."""

import gc
from contextlib import nullcontext
from dataclasses import replace

from rich.markup import escape

from specserve.cli.progress import console, warmup_bar
from specserve.mesh import SERVING_AXES, parse_mesh
from specserve.serve.http.app import create_app
from specserve.serve.http.keys import read_api_keys
from specserve.serve.http.server import HttpServer, bind_listener, check_tls
from specserve.serve.http.tracing import Tracing
from specserve.serve.launch import load_models, make_engine
from specserve.serve.settings import ServeRun


def serve(run: ServeRun) -> None:
    """Load the models, compile their programs, and serve until SIGTERM or Ctrl-C."""
    if run.warmup_only:
        run = replace(run, early_ready=False)  # everything is to be compiled before the end
    api_keys = read_api_keys(run)
    check_tls(run.ssl_certfile, run.ssl_keyfile)
    tracing = Tracing(run.otlp_endpoint) if run.otlp_endpoint else None
    listener = bind_listener(run.host, run.port)  # a taken port is said before minutes of loading
    models = load_models(
        run.target,
        run.draft,
        quantization=run.quantization,
        is_checked=run.check_weights,
        mesh=parse_mesh(run.mesh, SERVING_AXES),
    )
    with warmup_bar() as on_warmup:
        engine = make_engine(models, run, on_warmup)
    del models  # the engine has packed what it needs of them
    if run.warmup_only:
        console.print(f"{engine.runner.num_programs} programs are compiled and cached")
        return

    gc.collect()
    gc.freeze()  # what is loaded stays, and no later collection walks it: that takes longer than many steps

    def drain(seconds: float) -> None:
        engine.drain(seconds)
        engine.stop()  # what has not ended by now is told so, before its connection is cut

    with engine, tracing or nullcontext():
        server = HttpServer(
            create_app(engine, api_keys=api_keys, run=run, tracing=tracing),
            listener=listener,
            drain_seconds=run.drain_seconds,
            on_drain=drain,
            max_connections=run.max_connections,
            ssl_certfile=run.ssl_certfile,
            ssl_keyfile=run.ssl_keyfile,
        )
        console.print(
            f"{escape(engine.model_name)} with speculation {engine.speculation} on [bold]{server.url}/v1[/], "
            f"{run.max_slots} slots of {engine.max_model_len} tokens; {server.url}/ shows it in a browser. Ctrl-C stops"
        )
        server.run()
