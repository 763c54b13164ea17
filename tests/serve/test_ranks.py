"""One server over several processes: what the first one's devices run, the others' run too; and all end together."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from engines import EOS, PATIENCE, Ask, Dice, Letters, Reference, make_engine, make_runner, submit, wait_until

from specserve.checkpoints.load import Target
from specserve.drafters.door import Head
from specserve.errors import ConfigError
from specserve.processes import ProcessError
from specserve.serve import plans, ranks
from specserve.serve.plans import Plan
from specserve.serve.ranks import Follower, Leader
from specserve.serve.request import SamplingParams
from specserve.serve.runner import Runner
from specserve.speculative.tree import Proposal, Tree


class Tape:
    """Stands for the first process: it writes down what the others would be sent. And for another, which reads it."""

    lost = None

    def __init__(self, trees: Sequence[Tree | None]) -> None:
        self.trees, self.frames = trees, list[bytes]()

    def send(self, plan: Plan) -> None:
        self.frames.append(plans.write(plan, self.trees))

    def plans(self, trees: Sequence[Tree | None], proposal: Callable[[], Proposal | None]) -> Iterator[Plan]:
        for frame in self.frames:
            begin = plans.LENGTHS.size
            length, _ = plans.LENGTHS.unpack(frame[:begin])
            yield plans.read(frame[begin : begin + length], frame[begin + length :], trees, proposal())


def test_what_follows_the_plans_has_the_same_state(
    runner: Runner, tiny_target: Target, tiny_head: Head, kept: Path | None, rng: np.random.Generator
) -> None:
    """Bit for bit, though it is told nothing but plans: after every kind of step in any order, options, token masks,
    prompts that are scored, requests that go away, and a cache that is flushed."""
    ways = "tree:3x3x8", "chain:3", "static:2x1", "head+suffix:3", "off"
    twin = make_runner(tiny_target, tiny_head, *ways, folder=kept)
    engine, tape = make_engine(runner, Dice(3)), Tape(runner.shapes.trees)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "logprobs": 2},
        {"presence_penalty": 0.4, "bad_words": ["a"]},
        {"logit_bias": {7: 3.0}, "min_tokens": 4},
        {"prompt_logprobs": 1, "speculation": 0},
    ]
    runner.leader = tape  # type: ignore[assignment]
    try:
        with engine:
            for turn in range(2):
                asked = []
                for i in range(12):
                    prompt = tuple(rng.integers(3, 64, int(rng.integers(1, 40))).tolist())
                    params = SamplingParams(seed=i, max_tokens=20, **options[i % len(options)])
                    asked.append(submit(engine, Ask(prompt, params, is_constrained=i % 5 == turn)))
                for request, _ in asked[::4]:
                    request.cancel()
                for _, inbox in asked:
                    inbox.wait()
                engine.flush_cache()
        state = jax.tree.map(np.asarray, runner.state)
    finally:
        runner.leader = None
    twin.follow(tape)  # type: ignore[arg-type]
    told = {json.loads(frame[plans.LENGTHS.size :].split(b"]", 1)[0].split(b",")[0][1:]) for frame in tape.frames}
    assert told == {*plans.MAKERS, "forget_answers"}
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(twin.state), strict=True):
        assert np.array_equal(ours, np.asarray(theirs), equal_nan=True)


@contextlib.contextmanager
def _pair() -> Iterator[tuple[Leader, Follower, list[ProcessError]]]:
    """Two ends of one connection, and what is said when one of them has ended."""
    lost: list[ProcessError] = []
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    leaders: list[Leader] = []
    waiting = threading.Thread(target=lambda: leaders.append(Leader(listener, "secret", 1, lost.append)))
    waiting.start()
    stranger = socket.create_connection(address)
    stranger.sendall(b"guess 1\n")
    follower = Follower(ranks._reach(["127.0.0.1"], address[1], b"secret 1\n"), lost.append)
    waiting.join(PATIENCE)
    with stranger, listener:
        yield leaders[0], follower, lost
    leaders[0]._wires[1].close()
    follower._wire.close()
    wait_until(lambda: not any(each._thread.is_alive() for each in (leaders[0]._wires[1], follower._wire)))


def _both(leader: Callable[[], Any], follower: Callable[[], Any]) -> list[Any]:
    """What both return or raise, side by side."""
    found: list[Any] = [None, None]

    def run(place: int, call: Callable[[], Any]) -> None:
        try:
            found[place] = call()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((leader, follower))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


def test_processes_that_differ_are_refused_by_name() -> None:
    with _pair() as (leader, follower, lost):
        facts = {"--page-size": 32, "--mesh": "tensor=2"}
        assert _both(lambda: leader.agree(facts), lambda: follower.agree(facts)) == [None, None]
        assert _both(lambda: leader.least(7), lambda: follower.least(5)) == [5, 5]
        errors = _both(lambda: leader.agree(facts), lambda: follower.agree(facts | {"--page-size": 16}))
        for error in errors:
            assert isinstance(error, ConfigError)
            assert "--page-size is 16 in process 1 and 32 in the first" in str(error)
            assert "--mesh" not in str(error)
        with leader:
            leader.send(Plan("x", (1, (2, 3), np.arange(3)), {"y": True}))
        [plan] = follower.plans((), lambda: None)
        assert (plan.name, plan.arguments[:2], plan.arguments[2].tolist(), plan.options) == (
            *("x", (1, (2, 3)), [0, 1, 2]),
            {"y": True},
        )
        assert not lost, "the end was told"


@pytest.mark.parametrize("is_first", [True, False])
def test_the_end_of_one_process_is_told_to_the_others(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    monkeypatch.setattr(ranks, "_stop", stopped.set)
    with _pair() as (leader, follower, lost):
        follower.leave()
        assert stopped.wait(PATIENCE), "a process that is told to stop lets the first one drain"
        if is_first:
            leader._wires[1].close()
            with pytest.raises(ProcessError, match="the first process has ended"):
                next(follower.plans((), lambda: None))
        else:
            follower._wire.close()
        wait_until(lambda: leader.lost is not None)
        with pytest.raises(ProcessError, match="process 1 has ended"):
            leader.send(Plan("x"))
        assert "start all of its processes again" in str(leader.lost)
        wait_until(lambda: len(lost) == 2)


SCRIPT = (
    "from quick_compile import compile_without_emitters as quick; quick(); from specserve.cli.main import main; main()"
)


class _Two:
    """`specserve serve` as two processes with Gloo between them."""

    def __init__(self, target: Path, cache: Path, *changes: str) -> None:
        """`changes` are further flags of the second."""
        ports = []
        for _ in range(2):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ports.append(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{ports[0]}"
        flags = ["--target", str(target), "--speculation", "ngram:3", "--max-slots", "2", "--mesh", "tensor=2"]
        flags += ["--max-model-len", "64", "--no-constrained", "--port", str(ports[0])]
        flags += ["--coordinator", f"127.0.0.1:{ports[1]}", "--num-processes", "2"]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "COLUMNS": "200",
            "XDG_CACHE_HOME": str(cache),
            "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, "serve", *flags, "--process-id", str(i), *(changes if i else ())],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(2)
        ]

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.status("/ready") == 200 or any(each.poll() is not None for each in self.processes))

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=PATIENCE).status_code
        except httpx.TransportError:
            return 0

    def end(self, seconds: float = PATIENCE) -> list[tuple[int, str]]:
        try:
            return [
                (each.returncode, said) for each in self.processes for said in [each.communicate(timeout=seconds)[0]]
            ]
        finally:
            for each in self.processes:
                each.kill()


def _answer(url: str, ask: Ask, *, is_cut: bool = False) -> list[int]:
    body = {"prompt": list(ask.prompt), "max_tokens": ask.params.max_tokens, "temperature": ask.params.temperature}
    body |= {"seed": ask.params.seed, "ignore_eos": True, "return_token_ids": True, "stream": is_cut}
    if is_cut:  # gone after a few tokens
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as reply:
            next(reply.iter_lines())
        return []
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"][0]["token_ids"]


@pytest.mark.slow
def test_two_processes_serve_as_one(
    shallow_target: Target, kept: Path | None, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Tokens are those of one process, with clients that go away between them. A process that is told to stop lets all
    end in order; one that is killed ends all, with one error; and one of other settings is refused."""
    folder, cache = tmp_path / "target", tmp_path / "cache"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(shallow_target.folder / name)
    (folder / "tokenizer.json").write_text(Letters().as_json())
    alphabet = Letters.alphabet
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": alphabet[EOS]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    other = _Two(folder, cache, "--page-size", "16")
    for code, said in other.end():
        assert (code, "--page-size is 16 in process 1 and 32 in the first" in said) == (2, True), said

    two = _Two(folder, cache)
    two.wait_until_ready()
    reference = Reference(shallow_target, kept)
    with reference.engine:
        asks = [reference.any_ask(rng, length, i % 2 == 1) for i, length in enumerate((1, 16, 9, 12))]
    cut = threading.Thread(target=lambda: [_answer(two.url, ask, is_cut=True) for ask in asks])
    cut.start()
    answers = [_answer(two.url, ask) for ask in asks]
    cut.join(PATIENCE)
    assert answers == [reference.answer(ask).token_ids for ask in asks]
    two.processes[1].send_signal(signal.SIGTERM)
    ends = two.end()
    assert [code for code, _ in ends] == [0, 0], ends

    for killed, name in ((1, "process 1"), (0, "the first process")):
        two = _Two(folder, cache)
        two.wait_until_ready()
        two.processes[killed].kill()
        begin = time.monotonic()
        wait_until(lambda two=two: two.status("/ready") != 200)
        ends = two.end()
        code, said = ends[1 - killed]
        assert (code, said.count(f"error: {name} has ended")) == (2, 1), ends
        assert time.monotonic() - begin < 30
