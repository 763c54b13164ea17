"""One server over several processes: what the first one's devices run, the others' run too; and all end together."""

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import dispatches
import httpx
import jax
import numpy as np
import pytest
import tiny
from engines import (
    PATIENCE,
    Ask,
    Dice,
    Reference,
    compile_programs,
    greedy,
    make_engine,
    make_runner,
    run,
    submit,
    wait_until,
)
from served import write_folder
from several import Several
from spread import target_of

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.errors import ConfigError
from specserve.interop.head import save_head
from specserve.processes import ProcessError
from specserve.serve.fleet import messages, ranks
from specserve.serve.fleet.ranks import Follower, Leader, LeadingRunner
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun
from specserve.speculative.program import Kind, StepProgram
from specserve.speculative.tree import chain

TREE = chain(3)


class Tape:
    """Stands for the first process: it keeps the frames that the others would be sent. And for another, which reads
    them."""

    lost = None

    def __init__(self) -> None:
        self.sent = list[bytes]()

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        for frame in self.sent:
            begin = messages.LENGTHS.size
            length, _ = messages.LENGTHS.unpack(frame[:begin])
            yield frame[begin : begin + length], frame[begin + length :]


def test_what_follows_has_the_same_state(
    tiny_target: Target, tiny_head: Head, kept: Path | None, rng: np.random.Generator
) -> None:
    """Bit for bit, though it gets nothing but messages: after every kind of step in any order, options, token masks,
    prompts that are scored, requests that go away, and a cache that is flushed. It dispatches the same programs in the
    same order."""
    ways = "tree:3x3x8", "chain:3", "static:2x1", "head+suffix:3", "off"
    tape = Tape()
    lead = functools.partial(LeadingRunner, tape)
    runner = make_runner(tiny_target, tiny_head, *ways, folder=kept, is_mixing=True, make=lead)
    twin = make_runner(tiny_target, tiny_head, *ways, folder=kept, is_mixing=True)
    compile_programs(runner)
    assert not tape.sent, "each process makes its own empty state"
    engine = make_engine(runner, Dice(3))
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "logprobs": 2},
        {"presence_penalty": 0.4, "bad_words": ["a"]},
        {"logit_bias": {7: 3.0}, "min_tokens": 4},
        {"prompt_logprobs": 1, "speculation": 0},
    ]
    with dispatches.heard() as led, engine:
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
    with dispatches.heard() as followed:
        ranks.follow(twin, tape.frames())
    assert followed == led
    sent = [messages.read(*frame, runner.shapes.trees) for frame in tape.frames()]
    assert {word for word, _ in sent} == {"run", "forget_answers"}
    kinds = {values[0].kind for word, values in sent if word == "run"}
    assert kinds == {*get_args(Kind)} - {"empty state", "kept state", "reading"}  # the last is a CPU's
    _check_same(state, twin.state)


def _check_same(ours: Any, theirs: Any) -> None:
    for own, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.array_equal(own, np.asarray(other), equal_nan=True)


def test_what_follows_keeps_the_same_recurrent_states(kept: Path | None) -> None:
    tape = Tape()
    made: dict[str, Any] = {"kept_states": 2, "folder": kept, "has_constrained": False}
    runner = make_runner(target_of("delta nets"), None, "off", make=functools.partial(LeadingRunner, tape), **made)
    twin = make_runner(target_of("delta nets"), None, "off", **made)
    compile_programs(runner)
    prompt = tuple(range(3, 50))
    with make_engine(runner) as engine:
        for start, number in ((47, 0), (40, 9), (40, 4), (20, 9)):
            run(engine, [Ask((*prompt[:start], *prompt[:number]), greedy(5))])
        assert engine.stats().num_prefix_hits
    state = jax.tree.map(np.asarray, runner.state)
    ranks.follow(twin, tape.frames())
    sent = [messages.read(*frame, runner.shapes.trees) for frame in tape.frames()]
    assert "kept state" in {values[0].kind for word, values in sent if word == "run"}
    _check_same(state, twin.state)


@contextlib.contextmanager
def _group(count: int) -> Iterator[tuple[Leader, list[Follower], list[str]]]:
    """A first process and others, and what is said in any of them when one has ended."""
    lost: list[str] = []

    def hear(error: ProcessError) -> None:
        lost.append(str(error))

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    leaders: list[Leader] = []
    waiting = threading.Thread(target=lambda: leaders.append(Leader(listener, "secret", count, hear)))
    waiting.start()
    stranger = socket.create_connection(address)
    stranger.sendall(b"guess 1\n")
    hellos = [f"secret {number}\n".encode() for number in range(1, count + 1)]
    followers = [Follower(ranks._reach(["127.0.0.1"], address[1], hello), hear) for hello in hellos]
    waiting.join(PATIENCE)
    with stranger, listener:
        yield leaders[0], followers, lost
    wires = [*leaders[0]._wires.values(), *(follower._wire for follower in followers)]
    for wire in wires:
        wire.close()
    wait_until(lambda: not any(wire._thread.is_alive() for wire in wires))


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
    with _group(1) as (leader, [follower], lost):
        facts = {"--page-size": 32, "--mesh": "tensor=2"}
        assert _both(lambda: leader.agree(facts), lambda: follower.agree(facts)) == [None, None]
        assert _both(lambda: leader.least(7), lambda: follower.least(5)) == [5, 5]
        errors = _both(lambda: leader.agree(facts), lambda: follower.agree(facts | {"--page-size": 16}))
        for error in errors:
            assert isinstance(error, ConfigError)
            assert "--page-size is 16 in process 1 and 32 in the first" in str(error)
            assert "--mesh" not in str(error)
        with leader:
            leader.send(messages.write("x", (1, (2, 3), np.arange(3), True, StepProgram(2, 8, TREE)), (None, TREE)))
        [frame] = follower.frames()
        word, (*numbers, array, flag, program) = messages.read(*frame, (None, TREE))
        assert (word, numbers, array.tolist(), flag) == ("x", [1, (2, 3)], [0, 1, 2], True)
        assert program == StepProgram(2, 8, TREE)
        assert not lost, "the end was sent"


def test_flags_of_xla_must_be_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags, but for where it writes what it has compiled; its version, and the kind of device."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    first = ranks.facts_of(ServeRun())
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_dump_to=here")
    assert ranks.facts_of(ServeRun()) == first
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "--xla_a=2")
        assert ranks.facts_of(ServeRun()) != first
        monkeypatch.undo()
        monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    device = jax.devices()[0]
    for version, kind in ((device.client.platform_version, "another"), ("another", device.device_kind)):
        other = SimpleNamespace(client=SimpleNamespace(platform_version=version), device_kind=kind)
        monkeypatch.setattr(jax, "devices", lambda other=other: [other])
        assert ranks.facts_of(ServeRun()) != first


@pytest.mark.parametrize("is_first", [True, False])
def test_the_end_of_one_process_is_broadcast_to_the_others(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    monkeypatch.setattr(ranks, "_stop", stopped.set)
    with _group(1) as (leader, [follower], lost):
        follower.leave()
        assert stopped.wait(PATIENCE), "a process that is told to stop lets the first one drain"
        if is_first:
            leader._wires[1].close()
            with pytest.raises(ProcessError, match="the first process has ended"):
                next(follower.frames())
        else:
            follower._wire.close()
        wait_until(lambda: leader.lost is not None)
        with pytest.raises(ProcessError, match="process 1 has ended"):
            leader.send(messages.write("x"))
        assert "start all of its processes again" in str(leader.lost)
        wait_until(lambda: len(lost) == 2)


def test_all_hear_which_process_has_ended() -> None:
    """Of the others only the first process has a connection with it."""
    with _group(3) as (leader, followers, lost):
        followers[1]._wire.close()
        wait_until(lambda: len(lost) == 4)
        [own] = [text for text in lost if not text.startswith("process 2 has ended (")]
        assert own.startswith("the first process has ended"), "it is closed on this side"
        for rank in (leader, followers[0], followers[2]):
            assert rank.reason(ValueError("a collective failed")) is rank.lost


Outcome = tuple[str, float]  # how a client's last request ended, and when


class Clients:
    """Streams, one after another in each thread, until the server ends them."""

    def __init__(self, url: str, count: int) -> None:
        self.outcomes: list[Outcome] = []
        self.num_begun = 0
        self._url, self._body = (
            url,
            _body(Ask((5, 6, 7), SamplingParams(max_tokens=48, temperature=1.0)), is_stream=True),
        )
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> list[Outcome]:
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.outcomes

    def _ask(self) -> None:
        how = ""
        while not how:
            try:
                with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=PATIENCE) as reply:
                    self.num_begun += 1
                    lines = [line for line in reply.iter_lines() if line]
                if reply.status_code != 200:
                    how = f"status {reply.status_code}"
                elif lines[-1] != "data: [DONE]" or '"error"' in lines[-2]:
                    how = "error"
            except httpx.TransportError:
                how = "cut"
        self.outcomes.append((how, time.monotonic()))


def _body(ask: Ask, *, is_stream: bool = False) -> dict[str, Any]:
    body = {"prompt": list(ask.prompt), "max_tokens": ask.params.max_tokens, "temperature": ask.params.temperature}
    return body | {"seed": ask.params.seed, "ignore_eos": True, "return_token_ids": True, "stream": is_stream}


def _answer(url: str, ask: Ask, *, is_cut: bool = False) -> list[int]:
    if is_cut:  # gone after a few tokens
        body = _body(ask, is_stream=True)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as reply:
            next(reply.iter_lines())
        return []
    reply = httpx.post(f"{url}/v1/completions", json=_body(ask), timeout=PATIENCE)
    return reply.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def folder(shallow_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(shallow_target, tmp_path_factory.mktemp("served") / "target")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs that one server has compiled are there for the next one."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def plain(shallow_target: Target, kept: Path | None) -> Iterator[Reference]:
    reference = Reference(shallow_target, kept)
    with reference.engine:
        yield reference


def _storm(server: Several, plain: Reference, rng: np.random.Generator) -> None:
    """Requests at once, of which some go away: all others have the tokens of one process."""
    asks = [plain.any_ask(rng, length, i % 2 == 1) for i, length in enumerate((1, 16, 9, 12))]
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(_answer, server.url, ask, is_cut=i % 3 == 2) for i, ask in enumerate(asks * 6)]
    expected = [plain.answer(ask).token_ids for ask in asks] * 6
    assert [each.result() for each in running] == [[] if i % 3 == 2 else ids for i, ids in enumerate(expected)]


def _check_the_end(server: Several, left: Sequence[int], name: str, clients: Clients) -> None:
    """Clients see /ready at 503, and what they read ends with an error, which the docs promise within 10 seconds; then
    the processes that are left end with status 3 and one error."""
    begin, not_ready = time.monotonic(), 0.0
    while any(each.poll() is None for each in server.processes):
        if not not_ready and server.status("/ready") == 503:
            not_ready = time.monotonic()
        time.sleep(0.02)
    assert not_ready, "nobody could see that it was not ready"
    outcomes = clients.wait()
    assert {how for how, _ in outcomes} <= {"error", "status 503"}, outcomes
    assert any(how == "error" for how, _ in outcomes)
    for when in (not_ready, *(when for _, when in outcomes)):
        assert when - begin < 3 * 10, "thrice the promise, as this machine may be busy"
    for place, (code, said) in enumerate(server.end()):
        if place in left:
            assert (code, said.count("error: "), said.count(f"error: {name} has ended")) == (3, 1, 1), said
            assert "Traceback" not in said


@pytest.mark.slow
def test_two_processes_serve_as_one(folder: Path, cache: Path, plain: Reference, rng: np.random.Generator) -> None:
    """Tokens are those of one process, with clients that go away between them. A process that is asked to stop lets all
    end in order; one that is killed ends all, with one error; and one of other settings or flags of XLA is refused."""
    flags = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    with Several(folder, cache, changes=["--page-size", "16"], variables=flags) as other:
        for code, said in other.end():
            assert code == 2, said
            assert "--page-size is 16 in process 1 and 0 in the first" in said
            assert f"XLA_FLAGS is ['{flags['XLA_FLAGS']}'] in process 1 and [] in the first" in said
    with Several(folder, cache) as two:
        two.wait_until_ready()
        _storm(two, plain, rng)
        two.processes[1].send_signal(signal.SIGTERM)
        assert [code for code, _ in two.end()] == [0, 0]
    with Several(folder, cache) as two:
        two.wait_until_ready()
        two.processes[0].kill()
        [_, (code, said)] = two.end()
        assert (code, said.count("error: the first process has ended")) == (3, 1), said


@pytest.mark.slow
def test_two_processes_share_a_head(
    folder: Path, cache: Path, shallow_target: Target, plain: Reference, tmp_path: Path, rng: np.random.Generator
) -> None:
    """It is cut over both, and what it drafts is accepted now and then: tokens are those of plain decoding."""
    head = tmp_path / "head"
    save_head(head, tiny.random_head(shallow_target.config, seed=1), shallow_target, dtype="float32", notes={})
    with Several(folder, cache, more=["--draft", str(head), "--speculation", "chain:2"]) as two:
        two.wait_until_ready()
        _storm(two, plain, rng)
        metrics = httpx.get(two.url + "/metrics", timeout=PATIENCE).text
        drafted, accepted = (
            float(re.search(rf"^vllm:spec_decode_num_{name}_tokens_total\S* (\S+)$", metrics, re.M)[1])  # type: ignore[index]
            for name in ("draft", "accepted")
        )
        assert drafted > accepted > 0
        two.processes[0].send_signal(signal.SIGTERM)
        assert [code for code, _ in two.end()] == [0, 0]


@pytest.mark.slow
def test_four_processes_serve_as_one_until_one_is_killed(
    folder: Path, cache: Path, plain: Reference, rng: np.random.Generator
) -> None:
    with Several(folder, cache, mesh="data=2,tensor=2", count=4) as four:
        four.wait_until_ready()
        _storm(four, plain, rng)
        clients = Clients(four.url, 4)
        wait_until(lambda: clients.num_begun > 8)
        four.processes[2].kill()
        _check_the_end(four, [0, 1, 3], "process 2", clients)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [[0, 1, 1], [0, 2]])
def test_a_wrong_number_of_processes_is_one_error_in_each(folder: Path, cache: Path, ids: list[int]) -> None:
    """tests/train/test_processes.py has what the errors say."""
    seconds = 60 if ids == [0, 1, 1] else 15  # so long that all come, however busy the machine is
    with Several(folder, cache, mesh="tensor=3", count=3, ids=ids, more=["--join-seconds", str(seconds)]) as wrong:
        for code, said in wrong.end():
            assert (code, said.count("error: coordinator"), "Traceback" in said) == (2, 1, False), said


class Network:
    """Two machines: namespaces of their own, whose links meet in a bridge here."""

    def __init__(self) -> None:
        self.name = f"sp{os.getpid()}"
        self.addresses = [f"10.231.7.{number}" for number in (1, 2)]
        self._run("link", "add", self.name, "type", "bridge")
        self._run("addr", "add", "10.231.7.254/24", "dev", self.name)
        self._run("link", "set", self.name, "up")
        for number, address in enumerate(self.addresses):
            space = f"{self.name}n{number}"
            self._run("netns", "add", space)
            self._run("link", "add", f"{self.name}l{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            self._run("link", "set", f"{self.name}l{number}", "master", self.name, "up")
            for link in ("lo", "eth0"):
                self._run("-n", space, "link", "set", link, "up")
            self._run("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            hosts = Path("/etc/netns", space, "hosts")  # as `ip netns exec` puts it in place: Gloo asks for its name
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")

    def inside(self, number: int) -> list[str]:
        return ["ip", "netns", "exec", f"{self.name}n{number}"]

    def cut(self, number: int) -> None:
        """Nothing comes from there any more, and nobody hears of it."""
        self._run("link", "set", f"{self.name}l{number}", "down")

    def remove(self) -> None:
        for number in range(len(self.addresses)):
            subprocess.run(["ip", "netns", "del", f"{self.name}n{number}"], check=False)
            shutil.rmtree(f"/etc/netns/{self.name}n{number}", ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.name], check=False)

    def _run(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() or not shutil.which("ip") or subprocess.run(["ip", "netns"], check=False).returncode:
        pytest.skip("no network namespaces here: they need root and iproute2")
    network = Network()
    yield network
    network.remove()


@pytest.mark.slow
def test_a_dead_machine_ends_the_server(folder: Path, cache: Path, network: Network) -> None:
    """Nothing is heard from it any more, not even that its connections have ended."""
    with Several(folder, cache, host=network.addresses[0], inside=network.inside) as two:
        two.wait_until_ready()
        clients = Clients(two.url, 4)
        wait_until(lambda: clients.num_begun > 8)
        network.cut(1)
        _check_the_end(two, [0], "process 1", clients)
