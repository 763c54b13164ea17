"""`specserve chat`: a conversation in the terminal, in which one sees what the draft proposed.

The command is a client of a server, its own where no `--url` is given. Where standard input is no terminal it is a
filter: all of it is one message, and nothing but the answer goes to standard output.
"""

import contextlib
import importlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer
from rich.console import Console

from specserve.cli.chat_view import AnswerView
from specserve.cli.conversation import ServerChat
from specserve.cli.options import show_error, start
from specserve.errors import ConfigError, SpecServeError
from specserve.eval.client import Client

SPECULATION = "chain:3"
SPECULATION_HELP = f"As of `serve`: chain:3, tree:4x2x7, auto, off, ... (default: {SPECULATION})"
HELP = """\
/speculation [WAY]  show how it speculates, or change it: off, chain:3, auto, ...
/reset              forget the conversation
/help               this
Ctrl-C stops an answer, Ctrl-D leaves. Tokens on green were proposed by the
draft: the brighter, the deeper in its tree."""


def chat(
    url: Annotated[str, typer.Option(help="A running server; left out: one of its own, in this process.")] = "",
    target: Annotated[str, typer.Option(help="As of `serve`; left out: the one the draft was trained for.")] = "",
    draft: Annotated[str, typer.Option(help="Folder of a draft head, as of `serve`.")] = "",
    speculation: Annotated[str, typer.Option(help=SPECULATION_HELP)] = "",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Of an answer, at most.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    api_key: Annotated[str, typer.Option(help="Of the server.", envvar="SPECSERVE_API_KEY")] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Talk until the input ends. An error of the server ends a filter, and only the answer of a conversation."""
    start(log_level)
    if url and (target or draft or speculation):
        raise ConfigError(
            "--url asks a server that has its own models and its own way to speculate: leave out --target, --draft and "
            "--speculation, or --url"
        )
    with ExitStack() as stack:
        client = stack.enter_context(
            Client(url, api_key) if url else _own_server(target, draft, speculation or SPECULATION)
        )
        talk = ServerChat(client, system=system, max_tokens=max_tokens, temperature=temperature)
        if sys.stdin.isatty():
            converse(talk, Console(), input)
        else:
            _filter(talk, sys.stdin.read())


def converse(talk: ServerChat, console: Console, read: Callable[[str], str]) -> None:
    """Ask for messages and answer them, until `read` raises EOFError. An interrupt ends an answer and nothing else."""
    with contextlib.suppress(ImportError):  # line editing and history for `input`, where Python has it
        importlib.import_module("readline")
    console.print(
        f"[bold]{talk.model}[/], speculation {talk.speculation or 'unknown'}; /help shows more",
        style="dim",
        highlight=False,
    )
    while True:
        try:
            line = read("> ").strip()
        except KeyboardInterrupt:
            console.print()
            continue
        except EOFError:
            console.print()
            return
        try:
            if line.startswith("/"):
                console.print(_obey(talk, line), style="dim", markup=False, highlight=False)
            elif line:
                answer(talk, console, line)
        except SpecServeError as error:
            show_error(error)


def answer(talk: ServerChat, console: Console, message: str) -> None:
    """Show one answer as it comes."""
    with AnswerView(console) as view:
        try:
            for token in talk.ask(message):
                view.push(token, talk.answer)
        except KeyboardInterrupt:
            view.note = "stopped"
        view.finish(talk.answer)


def _obey(talk: ServerChat, line: str) -> str:
    """Run the command of a line with a slash, and return the text to answer."""
    name, _, rest = line.partition(" ")
    if name == "/reset":
        talk.reset()
        return "the conversation is forgotten"
    if name == "/speculation":
        if rest.strip():
            talk.speculate(rest.strip())
        return f"speculation is {talk.speculation or 'the choice of a server that does not report it'}"
    if name == "/help":
        return HELP
    raise ConfigError(f"{name}: no such command; /help lists them")


def _filter(talk: ServerChat, message: str) -> None:
    if not message.strip():
        raise ConfigError("there is no message: standard input is empty")
    for token in talk.ask(message.rstrip("\n")):
        sys.stdout.write(token.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


@contextmanager
def _own_server(target: str, draft: str, speculation: str) -> Iterator[Client]:
    """A server in this process, on a port and with a key that nobody else knows."""
    from specserve.serve.http.app import create_app
    from specserve.serve.http.transport.server import HttpServer
    from specserve.serve.launch import load_models, make_engine
    from specserve.serve.progress import warmup_bar
    from specserve.serve.settings import ServeRun

    run = ServeRun(speculation=speculation, max_slots=1, constrained=False, allow_load_draft=True)
    models = load_models(target, draft)
    with warmup_bar() as on_warmup:  # on stderr: a filter's output is the answer alone
        engine = make_engine(models, run, on_warmup)
    del models  # the engine has packed what it needs of them
    if not engine.tokenizer.has_chat_template:
        raise ConfigError(f"{engine.model_name} has no chat template; `specserve serve` can still complete texts")
    key = secrets.token_urlsafe()
    with engine:
        with Console(stderr=True).status("compiling how to speculate"):  # the first answer shows what for
            while speculation != "auto" and engine.stats().num_programs_left and engine.is_healthy:
                time.sleep(0.05)
        server = HttpServer(create_app(engine, api_keys=[key], run=run), port=0)
        server.start()
        try:
            with Client(server.url, key) as client:
                yield client
        finally:
            server.stop()
