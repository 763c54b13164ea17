"""`specserve chat`: what is shown is what was said, its counts are the engine's, an interrupt ends one answer."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from engines import Ask, Dice, make_engine, run, serving
from fakes import STORY, FakeEngine, wait_for
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from specserve.cli import chat_view
from specserve.cli.chat import converse
from specserve.cli.chat_view import AnswerView
from specserve.cli.conversation import AnswerSoFar, ServerChat, Token
from specserve.cli.main import app
from specserve.errors import ConfigError
from specserve.eval.client import Client, RefusedError, UnreachableError
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun
from specserve.speculative.acceptance import Acceptance


@pytest.fixture(scope="module", autouse=True)
def _no_frames() -> Iterator[None]:
    """Nothing is drawn that is drawn over again: what is left is what stays on the terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_view, "SECONDS_PER_FRAME", math.inf)
        yield


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width, record=True)


@pytest.fixture
def talk(server: HttpServer) -> Iterator[ServerChat]:
    with Client(server.url) as client:
        yield ServerChat(client, max_tokens=64)


@pytest.fixture
def changeable(fake_engine: FakeEngine) -> Iterator[ServerChat]:
    """With a server that lets clients change how it speculates, and wants a key."""
    run = ServeRun(allow_load_draft=True)
    server = HttpServer(create_app(fake_engine, run=run, api_keys=["secret"]), port=0)
    server.start()
    with Client(f"{server.url}/v1/", "secret") as client:
        yield ServerChat(client)
    server.stop()
    fake_engine.speculation = "chain:3"


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6))
def test_steps_are_counted_as_they_were_made(steps: list[list[int]]) -> None:
    """Whatever pieces the depths of an answer come in: those of a step are 1, 2, ..., 0, after the first token's 0."""
    expected, so_far = Acceptance(), AnswerSoFar()
    so_far.take([0], 1)
    for chunk in steps:
        depths = []
        for n_accepted in chunk:
            expected = expected.after_step(n_accepted, depth=max(n_accepted, len(expected.accepted_per_depth)))
            depths += [*range(1, n_accepted + 1), 0]
        for cut in (depths[: len(depths) // 2], depths[len(depths) // 2 :]):
            so_far.take(cut, len(cut))
    so_far.end()
    assert so_far.acceptance == expected
    so_far.take([1, 2], 2)
    so_far.end()
    assert so_far.acceptance == expected + Acceptance(1, 0, (1, 1), num_cut=1)


@given(st.lists(st.tuples(st.text("ab c\n", max_size=5), st.integers(0, 7)), min_size=1, max_size=40))
def test_what_is_shown_is_what_was_said(pieces: Sequence[tuple[str, int]]) -> None:
    """In a narrow terminal too, where lines are wrapped at spaces; and to the byte where there is no terminal."""
    said = "".join(text for text, _ in pieces)
    narrow, no_terminal = terminal(12), Console(file=io.StringIO(), width=12, record=True)
    for console in (narrow, no_terminal):
        with AnswerView(console) as view:
            for text, depth in pieces:
                view.push(Token(text, depth), AnswerSoFar())
    assert "".join(narrow.export_text().split()) == "".join(said.split())
    assert no_terminal.export_text().rstrip("\n") == said.rstrip("\n")


def test_accepted_tokens_have_the_colour_of_their_depth() -> None:
    console, so_far = terminal(), AnswerSoFar()
    with AnswerView(console) as view:
        for depth in range(8):
            so_far.take([depth], 1)
            view.push(Token(f"<{depth}>", depth), so_far)
    shown = console.export_text(styles=True)
    colours = re.findall(r"48;2;(\d+;\d+;\d+)m[^m]*<(\d)>", shown)
    assert [depth for _, depth in colours] == ["1", "2", "3", "4", "5", "6", "7"]
    assert len({colour for colour, _ in colours}) == len({colour for colour, _ in colours[:5]}) == 5


def test_a_conversation_sends_what_was_said_before(talk: ServerChat, fake_engine: FakeEngine) -> None:
    assert "".join(token.text for token in talk.ask("one")) == STORY
    assert talk.answer.finish == "stop"
    assert [token.depth for token in talk.ask("two")][:2] == [1, 0]
    prompt = bytes(fake_engine.requests[-1].prompt_ids).decode()
    assert prompt.startswith(f"<user>one<assistant>{STORY}<user>two")
    list(talk.ask("again"))
    assert bytes(fake_engine.requests[-1].prompt_ids).startswith(prompt[: prompt.index("{")].encode())
    talk.reset()
    list(talk.ask("three"))
    assert bytes(fake_engine.requests[-1].prompt_ids).decode().startswith("<user>three")
    with pytest.raises(RefusedError, match="the template refuses"):
        list(talk.ask("forbidden"))
    assert talk.messages[-2]["content"] == "three"  # a refused question is not part of it


def test_an_interrupt_ends_an_answer_and_its_request_alone(
    talk: ServerChat, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what had come of it stays in the conversation. Ctrl-C at the prompt does nothing, the end of input leaves."""
    push, console = AnswerView.push, terminal()

    def interrupted(self: AnswerView, token: Token, so_far: AnswerSoFar) -> None:
        push(self, token, so_far)
        if so_far.num_pieces >= 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerView, "push", interrupted)
    lines: Iterator[Any] = iter(["slow", KeyboardInterrupt(), "/reset", "", "/nope", "slow", EOFError()])

    def read(_prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    converse(talk, console, read)
    assert console.export_text().count("stopped") == 2
    assert talk.messages == [{"role": "user", "content": "slow"}, {"role": "assistant", "content": "aaa"}]
    wait_for(lambda: not fake_engine.num_active)  # the server does not go on with what nobody reads


def test_speculation_is_changed_or_bounded(talk: ServerChat, changeable: ServerChat, fake_engine: FakeEngine) -> None:
    """Changed on a server that allows it; on another our own requests are bounded, which no token depends on."""
    changeable.speculate("off")
    assert changeable.speculation == fake_engine.speculation == "off"
    with pytest.raises(RefusedError, match="no programs"):
        changeable.speculate("chain:9")
    talk.speculate("chain:2")
    list(talk.ask("hi"))
    assert fake_engine.requests[-1].params.speculation == 2
    talk.speculate("off")
    answered = list(talk.ask("hi"))
    assert {token.depth for token in answered} == {0}
    assert talk.answer.acceptance.tau == 1
    with pytest.raises(RefusedError, match="operator"):
        talk.speculate("tree:3x3x8")
    with pytest.raises(ConfigError):
        talk.speculate("chain:x")


def test_a_filter_writes_the_answer_and_nothing_else(server: HttpServer, fake_engine: FakeEngine) -> None:
    done = CliRunner().invoke(app, ["chat", "--url", server.url, "--system", "be"], input="two\nlines\n")
    assert done.exit_code == 0, done.output
    assert done.stdout == STORY + "\n"
    assert bytes(fake_engine.requests[-1].prompt_ids).decode().startswith("<system>be<user>two\nlines{")


def test_what_is_no_server_is_said(server: HttpServer) -> None:
    with pytest.raises(UnreachableError, match="does not answer"), Client("127.0.0.1:1") as client:
        client.json("/v1/models")
    with pytest.raises(ConfigError, match="no address"):
        Client("ftp://host")
    for address in ("any:secret@host:8000", "http://secret@host:8000/v1"):
        with pytest.raises(ConfigError, match="address of host has a key") as found:
            Client(address)
        assert "secret" not in str(found.value)
    with pytest.raises(RefusedError) as refused, Client(server.url) as client:
        client.json("/nothing")
    assert refused.value.status == 404


def test_counts_are_those_of_the_engine(runner: Runner) -> None:
    """What a client counts from depths is what the engine counts, also where an answer ends within a step."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7, seed=3)
    with serving(make_engine(runner, Dice(1))) as engine:
        inboxes = run(engine, [Ask((5, 6, 7 + i), params) for i in range(6)])
    for inbox in inboxes:
        so_far, stats = AnswerSoFar(), inbox.wait().stats
        for delta in inbox.deltas:
            so_far.take(delta.draft_depths, len(delta.token_ids))
        so_far.end()
        assert stats is not None
        counted = Acceptance(stats.num_steps, 0, stats.accepted_per_depth, stats.num_cut)
        assert so_far.acceptance + Acceptance(accepted_per_depth=(0, 0, 0)) == counted
        assert so_far.acceptance.num_emitted == 40 - 1
