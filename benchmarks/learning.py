"""A head that learns from traffic that drifts, beside the same head that stays; and what keeping the traffic costs.

    python benchmarks/learning.py drift --minutes 60 --styles chat,code
    python benchmarks/learning.py drift --target FOLDER --draft HEAD --bench mt-bench:FILE
    python benchmarks/learning.py cost

`drift` asks two servers in turns, one of which has --learn: the same conversations, whose texts it compares. The styles
follow each other, each for an equal part of the time. While one server is asked the other one is stopped, and its
learner with it; then nobody asks for --pause seconds, so that a round gets on. It prints by style the tau and the
tokens/s of both, and apart the turns beside which a round was being made. The styles of the bundled target are `chat`,
the questions that its heads were trained on, and `code`, files of Python's library to be continued, without a chat; of
a --bench they are its categories.

`cost` asks two servers in turns, one of which keeps its traffic and never trains: tokens/s of both, and their ratio."""

import argparse
import dataclasses
import hashlib
import itertools
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from environments import say
from in_turns import spread
from over_http import processor
from server_process import ServerProcess, value

from specserve.data import pydoc
from specserve.eval.prompts import load_questions

CHARS = 300  # of a file, as a prompt
BUNDLED_STYLES = ("chat", "code")
LEARNER = "specserve.learn.learner"
OF_ROUNDS = ("learn_version", "learn_held_out_tau", "learn_drift", "learn_rounds_total", "learn_returns_total")


@dataclass(frozen=True)
class Conversation:
    """What one client asks: the user's turns of a chat, or one text to be continued."""

    turns: tuple[str, ...]
    is_chat: bool
    seed: int


@dataclass(frozen=True)
class Turn:
    """What one server made of some conversations."""

    style: str
    server: str  # static or learning
    is_beside_round: bool
    num_tokens: int
    seconds: float
    num_drafts: float  # steps that verified draft tokens
    num_accepted: float
    digest: str  # of all texts

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def main() -> int:
    options = _parse()
    {"drift": drift, "cost": cost}[options.what](options)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=("drift", "cost"))
    add("--target", default="pydoc", help="folder, preset or hub id (%(default)s)")
    add("--draft", default="", help="the static head; else the one that is bundled for the target")
    add("--speculation", default="chain:3", help="of both servers (%(default)s)")
    add("--bench", help="questions as of `specserve eval`, whose categories are the styles")
    add("--styles", type=lambda text: text.split(","), metavar="A,B", help="one after the other (each of them once)")
    add("--minutes", type=float, default=60.0, help="of drift (%(default)s)")
    add("--pause", type=float, default=15.0, help="seconds without a question between two turns of both (%(default)s)")
    add("--conversations", type=int, default=16, help="of a turn (%(default)s)")
    add("--answers", type=int, default=256, help="new ones that begin a round (%(default)s)")
    add("--steps", type=int, default=100, help="of training, of a round (%(default)s)")
    add("--max-tokens", type=int, default=96, help="of an answer (%(default)s)")
    add("--clients", type=int, default=4, help="that ask at once (%(default)s)")
    add("--rounds", type=int, default=6, help="of cost (%(default)s)")
    add("--serve", type=str.split, default=[], metavar="FLAGS", help="further flags of specserve serve")
    add("--learn", type=str.split, default=[], metavar="FLAGS", help="of the server that learns alone")
    add("--output", type=Path, help="add each turn to this file of JSON lines")
    options = parser.parse_args()
    options.common = ["--target", options.target, "--speculation", options.speculation, *options.serve]
    options.common += ["--draft", options.draft] if options.draft else []
    there: Sequence[str] = BUNDLED_STYLES
    if options.bench:
        there = list(dict.fromkeys(each.category for each in load_questions(options.bench, 0)))
    options.styles = options.styles or there
    if unknown := [style for style in options.styles if style not in there]:
        parser.error(f"--styles {unknown[0]}: expected some of {', '.join(there)}")
    return options


def conversations(style: str, bench: str | None) -> Iterator[Conversation]:
    """Yield endless conversations of a style, the same ones in every run."""
    rng = random.Random(0)
    if bench or style == "chat":
        found = [each.turns for each in load_questions(bench, 0) if each.category == style] if bench else []
        found = found or [(each.messages[0].content,) for each in pydoc.build("held-out")]
        while True:
            yield Conversation(rng.choice(found), True, rng.randrange(2**31))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    while True:
        text = rng.choice(files).read_text(errors="replace")
        begin = rng.randrange(max(1, len(text) - CHARS))
        yield Conversation((text[begin : begin + CHARS],), False, rng.randrange(2**31))


def converse(server: ServerProcess, asked: Conversation, max_tokens: int) -> tuple[int, str]:
    """Ask turn by turn, each with the answers so far, and return the number of tokens of the answers, and the last."""
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.7, "seed": asked.seed}
    if not asked.is_chat:
        reply = server.client.json("/v1/completions", {"prompt": asked.turns[0], **body})
        return reply["usage"]["completion_tokens"], reply["choices"][0]["text"]
    number, messages = 0, []
    for turn in asked.turns:
        messages.append({"role": "user", "content": turn})
        reply = server.client.json("/v1/chat/completions", {"messages": messages, **body})
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        number += reply["usage"]["completion_tokens"]
    return number, messages[-1]["content"]


def ask(server: ServerProcess, asked: Sequence[Conversation], options: argparse.Namespace) -> tuple[int, float, str]:
    """Have all conversations, and return the answers' tokens, the seconds, and a digest of the last answers."""
    with ThreadPoolExecutor(options.clients) as pool:
        begin = time.monotonic()
        numbers, texts = zip(*pool.map(lambda each: converse(server, each, options.max_tokens), asked), strict=True)
    seconds = time.monotonic() - begin
    return sum(numbers), seconds, hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def drift(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        learn = ["--learn", folder, "--learn-answers", str(options.answers), "--learn-steps", str(options.steps)]
        with ServerProcess([*options.common, *learn, *options.learn]) as learning:
            learning.wait_until_complete()  # each measures its steps alone
            with ServerProcess(options.common) as static:
                static.wait_until_complete()
                say(processor())
                _play_all({"static": static, "learning": learning}, options)


def _play_all(servers: dict[str, ServerProcess], options: argparse.Namespace) -> None:
    """Ask both servers in one style after the other, and print what they made of each."""
    turns: list[Turn] = []
    for style in options.styles:
        end = time.monotonic() + 60 * options.minutes / len(options.styles)
        for turn in _play(style, conversations(style, options.bench), servers, options, end):
            turns.append(turn)
            if options.output:
                with options.output.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(turn)) + "\n")
        _show(style, [turn for turn in turns if turn.style == style], servers["learning"])
    _show("all", turns, servers["learning"])


def _play(
    style: str,
    stream: Iterator[Conversation],
    servers: dict[str, ServerProcess],
    options: argparse.Namespace,
    end: float,
) -> Iterator[Turn]:
    """Ask both servers in turns until `end`."""
    for number in itertools.count():
        asked = [*itertools.islice(stream, options.conversations)]
        for name, other in [*permutations(servers)][:: 1 if number % 2 else -1]:
            with servers[other].stopped():
                turn = _turn(style, name, servers[name], asked, options)
            yield turn
        time.sleep(options.pause)
        if time.monotonic() > end:
            return


def _turn(
    style: str, name: str, server: ServerProcess, asked: Sequence[Conversation], options: argparse.Namespace
) -> Turn:
    server.check()
    before, is_beside_round = server.client.text("/metrics"), server.has_child(LEARNER)
    number, seconds, digest = ask(server, asked, options)
    is_beside_round |= server.has_child(LEARNER)
    after = server.client.text("/metrics")
    num_drafts, num_accepted = [
        (value(after, counter) or 0) - (value(before, counter) or 0)
        for counter in ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    ]
    return Turn(style, name, is_beside_round, number, seconds, num_drafts, num_accepted, digest)


def _show(style: str, turns: Sequence[Turn], learning: ServerProcess) -> None:
    """Print what both servers made of a style."""
    static, own = ([turn for turn in turns if turn.server == name] for name in ("static", "learning"))
    parts = []
    for name, part in (("static", static), ("learning", own)):
        drafts, accepted = sum(turn.num_drafts for turn in part), sum(turn.num_accepted for turn in part)
        rate = sum(turn.num_tokens for turn in part) / sum(turn.seconds for turn in part)
        parts.append(f"{name} tau {1 + accepted / max(1, drafts):.3f}, {rate:.0f} tokens/s")
    num_equal = sum(a.digest == b.digest for a, b in zip(static, own, strict=True))
    say(f"{style}: {'; '.join(parts)}; equal texts in {num_equal} of {len(own)} turns")
    kinds: dict[str, Callable[[Turn], bool]] = {
        "all": lambda _: True,
        "beside a round": lambda turn: turn.is_beside_round,
        "between rounds": lambda turn: not turn.is_beside_round,
    }
    for name, belongs in kinds.items():
        pairs = zip(static, own, strict=True)
        if ratios := [after.rate / before.rate for before, after in pairs if belongs(after)]:
            say(f"  tokens/s, learning to static, {name}: {spread(ratios)}, {len(ratios)} turns")
    for line in learning.client.text("/metrics").splitlines():
        if any(line.startswith(f"specserve:{name}") for name in OF_ROUNDS):
            say(f"  {line.removeprefix('specserve:')}")


def cost(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keeping = ServerProcess([*options.common, "--learn", folder, "--learn-answers", str(10**9), *options.learn])
        with keeping, ServerProcess(options.common) as plain:
            for server in (keeping, plain):
                server.wait_until_complete()
            say(processor())
            stream, ratios = conversations(options.styles[0], options.bench), []
            first = [*itertools.islice(stream, options.clients * 2)]
            for server in (keeping, plain):
                ask(server, first, options)
            for number in range(options.rounds):
                asked, rates = [*itertools.islice(stream, options.clients * 8)], {}
                for server in (keeping, plain) if number % 2 else (plain, keeping):
                    tokens, seconds, _ = ask(server, asked, options)
                    rates[server] = tokens / seconds
                ratios.append(rates[keeping] / rates[plain])
                say(f"{rates[keeping]:.0f} tokens/s while keeping, {rates[plain]:.0f} without: {ratios[-1]:.3f}")
            say(f"median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    sys.exit(main())
