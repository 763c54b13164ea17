"""Weights that a client sends, and the version that a server which was killed begins with again: a version is whole, or
nothing has changed."""

import dataclasses
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import served
import tiny
from engines import PATIENCE, Fixed, Letters, make_engine, serving
from fakes import assert_refused, wait_for

from specserve.checkpoints.load import Target, to_numpy
from specserve.checkpoints.tensors import TensorFolder, write_tensors
from specserve.checkpoints.update import other_target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import CheckpointError, ConfigError
from specserve.host import hold
from specserve.interop.head import head_files, sent_params
from specserve.interop.published import vocab_to_tensors
from specserve.models.target import target_spec
from specserve.serve import launch
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engine.swap import HeadForm, ServedWeights
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.launch import Models
from specserve.serve.programs.runner import Runner
from specserve.serve.settings import ServeRun
from specserve.serve.update_folder import VERSION_FILE, KeptVersion, UpdateFolder

ROUTE = "/update_weights_from_safetensors"
ASK: dict[str, Any] = {"input_ids": list(range(3, 23)), "sampling_params": {"temperature": 0.0, "max_new_tokens": 20}}
HEADERS = {"content-type": "application/octet-stream"}


def _moved(target: Target, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    moved = jax.tree.map(lambda leaf: rng.permutation(np.asarray(leaf).ravel()).reshape(leaf.shape), target.params)
    return to_numpy(moved, target_spec(target.config), "float32")


@pytest.fixture(scope="module")
def sent(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A version of the target as one file."""
    path = tmp_path_factory.mktemp("sent") / "x.safetensors"
    write_tensors(path, _moved(tiny_target, 1))
    return path.read_bytes()


def _engine(runner: Runner, models: Models) -> Engine:
    engine = make_engine(runner.with_weights(models.target.params, models.head), Fixed(parse_speculation("chain:3")))
    engine._tokenizer = type("ServedLetters", (Letters,), {"token_id": lambda _self, _token: None})()
    engine._swaps.weights = ServedWeights(models.version, read=launch._weights_reader(models))
    engine._swaps._form = models.head_form
    return engine


def _client(runner: Runner, models: Models, folder: Path) -> AbstractContextManager[httpx.Client]:
    return _served(_engine(runner, models), folder)


@contextmanager
def _served(engine: Engine, folder: Path) -> Iterator[httpx.Client]:
    run = ServeRun(allow_update_weights=True, update_folder=str(folder), update_max_gb=0.001)
    server = HttpServer(create_app(engine, run=run), port=0)
    with serving(engine):
        server.start()
        try:
            with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
                yield http
        finally:
            server.stop()


def _answer(http: httpx.Client) -> list[int]:
    return http.post("/generate", json=ASK).json()["output_ids"]


def test_what_is_sent_serves_and_is_what_a_server_begins_with_again(
    runner: Runner, tiny_target: Target, sent: bytes, tmp_path: Path
) -> None:
    models, folder = Models("tiny", tiny_target, None, None), tmp_path / "kept"
    with _client(runner, models, folder) as http:
        old = _answer(http)
        query = {"weight_version": "step-1", "sha256": hashlib.sha256(sent).hexdigest(), "mode": "drain"}
        reply = http.post(ROUTE, params=query, content=sent, headers=HEADERS)
        assert (reply.status_code, reply.json()["weight_version"]) == (200, "step-1"), reply.text
        new = _answer(http)
        assert new != old
        assert http.post(ROUTE, content=sent, headers=HEADERS).json()["weight_version"] == "2"
        assert _answer(http) == new
        assert len(list(folder.glob("*.safetensors"))) == 1, "the version before needs none"
    kept = UpdateFolder(folder).read()
    assert kept is not None
    assert (kept.name, Path(kept.target).read_bytes()) == ("2", sent)
    with _client(runner, launch.with_version(models, kept.name, kept.target, kept.draft), folder) as http:
        assert _answer(http) == new
        reply = http.post("/update_weights_from_disk", json={"model_path": str(tiny_target.folder)})
        assert reply.status_code == 200
        assert _answer(http) == old
        assert not list(folder.glob("*.safetensors"))


def _with_head(target: Target, head: Head, seed: int, path: Path, *parts: str) -> tuple[bytes, Head]:
    """A file of a version's `parts`, and its head, whose numbers are those of another in another order."""
    rng = np.random.default_rng(seed)

    def move(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(rng.permutation(np.asarray(leaf).ravel()).reshape(leaf.shape))

    other = dataclasses.replace(head, params=jax.tree.map(move, head.params))
    tensors, _ = head_files(other, target, dtype="float32")
    arrays = _moved(target, seed) if "target" in parts else {}
    write_tensors(path, arrays | {f"draft.{name}": each for name, each in tensors.items()})
    return path.read_bytes(), other


def test_a_head_is_sent_beside_its_target_or_alone(
    runner: Runner, tiny_target: Target, tiny_head: Head, sent: bytes, tmp_path: Path
) -> None:
    """As one version, and a server that begins again has both, from wherever they lie by then. Another head than the
    one that is served changes nothing."""
    draft = DraftInfo("mine", 2.5)
    models, folder = Models("tiny", tiny_target, tiny_head, None, draft=draft), tmp_path / "kept"
    engine = _engine(runner, models)

    def check(serving: Runner, seed: int, head: Head) -> None:
        target = other_target(tiny_target, _moved(tiny_target, seed), quantization="none", mesh=None)
        expected = runner.with_weights(target.params, head).inputs.layouts.many
        jax.tree.map(np.testing.assert_array_equal, serving.inputs.layouts.many, expected)

    with _served(engine, folder) as http:
        for number, parts in enumerate([("target", "draft"), ("draft",)], start=1):
            body, head = _with_head(tiny_target, tiny_head, number, tmp_path / "x.safetensors", *parts)
            reply = http.post(ROUTE, content=body, headers=HEADERS)
            assert (reply.status_code, reply.json()["weight_version"]) == (200, str(number)), reply.text
            assert _answer(http)
            check(engine.runner, 1, head)  # the target is that of the first
            assert len(list(folder.glob("*.safetensors"))) == number
        tensors = TensorFolder.of_file(tmp_path / "x.safetensors")
        whole = {name: tensors.read(name) for name in tensors.names()}
        wrong: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
            "shape": ({"draft.fc.weight": np.zeros((3, 3), np.float32)}, "fc.weight"),
            "missing": ({"draft.norm.weight": None}, "norm.weight"),
            "no number": ({"draft.norm.weight": np.full(32, np.nan, np.float32)}, "norm.weight"),
            "unknown": ({"draft.of.nobody": np.zeros(3, np.float32)}, "of.nobody"),
            "other vocabulary": (_vocabulary(tiny_head), "another draft vocabulary"),
        }
        for case, (change, words) in wrong.items():
            arrays = {name: each for name, each in (whole | change).items() if each is not None}
            write_tensors(tmp_path / "wrong.safetensors", arrays)
            reply = http.post(ROUTE, content=(tmp_path / "wrong.safetensors").read_bytes(), headers=HEADERS)
            assert words in assert_refused(reply)["message"], case
            check(engine.runner, 1, head)
        loaded = dataclasses.replace(tiny_head, params=None, target_ids=_other_ids(tiny_head))
        form, engine._swaps._form = engine._swaps._form, HeadForm(loaded, "none")  # as load_draft leaves it
        assert "load_draft has loaded" in assert_refused(http.post(ROUTE, content=body, headers=HEADERS))["message"]
        engine._swaps._form = form
        check(engine.runner, 1, head)
        assert len(list(folder.glob("*.safetensors"))) == 2
    folder.rename(tmp_path / "moved")
    kept = UpdateFolder(tmp_path / "moved").read()
    assert kept is not None
    again = launch.with_version(models, kept.name, kept.target, kept.draft)
    check(_engine(runner, again).runner, 1, head)
    assert again.draft == DraftInfo("mine", None), "what the head promised was of another one"
    with _served(_engine(runner, again), tmp_path / "moved") as http:
        assert http.post(ROUTE, content=sent, headers=HEADERS).status_code == 200
        assert len(list((tmp_path / "moved").glob("*.safetensors"))) == 2, "the new target's, and the head's"
    without = Models("tiny", tiny_target, None, None)
    with _served(_engine(runner, without), tmp_path / "alone") as http:
        reply = http.post(ROUTE, content=body, headers=HEADERS)
        assert "speculates without a head" in assert_refused(reply)["message"]
        assert not list((tmp_path / "alone").glob("*.safetensors"))


def _vocabulary(head: Head) -> dict[str, np.ndarray | None]:
    """As many tokens as a head has, and one of them another."""
    tensors = vocab_to_tensors(_other_ids(head), head.drafter.vocab_size)
    return {f"draft.{name}": each for name, each in tensors.items()}


def _other_ids(head: Head) -> np.ndarray:
    ids = np.array(head.target_ids)
    free = np.setdiff1d(np.arange(head.drafter.vocab_size), ids)
    return np.sort(np.append(ids[:-1], free[0])).astype(np.int32)


@pytest.mark.parametrize("route", ["/update_weights_from_disk", "/collective_rpc"])
def test_a_file_of_both_that_lies_on_the_server_is_a_version_of_both(
    route: str, runner: Runner, tiny_target: Target, tiny_head: Head, tmp_path: Path
) -> None:
    models, path = Models("tiny", tiny_target, tiny_head, None), tmp_path / "x.safetensors"
    _, head = _with_head(tiny_target, tiny_head, 1, path, "target", "draft")
    engine = _engine(runner, models)
    with _served(engine, tmp_path / "kept") as http:
        ours, vllms = {"model_path": str(path)}, {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        reply = http.post(route, json=vllms if route == "/collective_rpc" else ours)
        assert reply.status_code == 200, reply.text
    expected = runner.with_weights(None, head).inputs.layouts.many.draft
    jax.tree.map(np.testing.assert_array_equal, engine.runner.inputs.layouts.many.draft, expected)


KINDS: dict[str, Callable[[Any], Head]] = {
    "eagle3": lambda target: tiny.random_head(target, seed=1),
    "p-eagle": lambda target: tiny.random_masked_head(target, seed=1, num_layers=2),
    "mtp": lambda target: tiny.random_carried_layer(target, seed=1),
    "dflash": lambda target: tiny.random_block_head(target, seed=1, block_size=4, num_layers=1, aux_layers=(0, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_any_kind_is_read_from_a_file(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    head = KINDS[kind](tiny_target.config)
    tensors, _ = head_files(head, tiny_target, dtype="float32")
    write_tensors(tmp_path / "x.safetensors", {f"draft.{name}": each for name, each in tensors.items()})
    form = dataclasses.replace(head, params=None)
    found = sent_params(form, tmp_path / "x.safetensors", mesh=None)
    jax.tree.map(np.testing.assert_array_equal, found, head.params)


def test_a_language_model_needs_its_folder(tiny_target: Target, tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", {"draft.model.norm.weight": np.ones(3, np.float32)})
    with pytest.raises(ConfigError, match="comes with its tokenizer; give its folder"):
        sent_params(tiny.random_language_model(tiny_target.config, seed=3), tmp_path / "x.safetensors", mesh=None)


def test_a_version_that_cannot_be_kept_serves_and_one_that_does_not_fit_leaves_nothing(
    runner: Runner, tiny_target: Target, sent: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is said to serve, and its file is not taken from under it."""
    models, folder = Models("tiny", tiny_target, None, None), tmp_path / "kept"
    with _client(runner, models, folder) as http:
        old = _answer(http)
        (folder / VERSION_FILE).write_text("{")
        reply = http.post(ROUTE, params={"weight_version": "new"}, content=sent, headers=HEADERS)
        assert reply.status_code == 500
        assert "version new serves, but cannot be kept" in reply.text
        assert http.get("/weight_version").json() == {"weight_version": "new"}
        assert _answer(http) != old
        assert len(list(folder.glob("*.safetensors"))) == 1

    def full(*_given: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(launch, "_weights_reader", lambda _models: full)
    with _client(runner, models, tmp_path / "full") as http:
        assert "RESOURCE_EXHAUSTED" in assert_refused(http.post(ROUTE, content=sent, headers=HEADERS))["message"]
        assert not list((tmp_path / "full").glob("*.safetensors"))


def test_what_is_kept_is_found_however_its_folder_is_named(tmp_path: Path) -> None:
    """By a way up and down, by a link, and where it has been moved. A link to a version is that version for ever."""
    (tmp_path / "a").mkdir()
    folder = UpdateFolder(tmp_path / "a" / ".." / "kept")
    file = folder.new_file()
    file.write_text("weights")
    folder.keep("sent", str(file), None)
    (tmp_path / "link").symlink_to(tmp_path / "kept")

    def kept(name: str) -> KeptVersion:
        found = UpdateFolder(tmp_path / name).read()
        assert found is not None
        return found

    assert [Path(kept(name).target).read_text() for name in ("kept", "link")] == ["weights"] * 2
    (tmp_path / "kept").rename(tmp_path / "moved")
    assert Path(kept("moved").target).read_text() == "weights"
    for number in (1, 2):
        (tmp_path / f"step-{number}").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "step-1")
    UpdateFolder(tmp_path / "moved").keep("step-1", str(tmp_path / "latest"), None)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(tmp_path / "step-2")
    assert kept("moved").target == str(tmp_path / "step-1")


def _header(sent: bytes, **change: Any) -> bytes:
    length = int.from_bytes(sent[:8], "little")
    header = json.loads(sent[8 : 8 + length])
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + sent[8 + length :]


WRONG: dict[str, tuple[Any, dict[str, str], int, str]] = {  # body of the right one, options, status, words
    "empty": (lambda _: b"", {}, 400, "not a whole safetensors file"),
    "cut": (lambda sent: sent[:-1], {}, 400, "not a whole safetensors file"),
    "longer": (lambda sent: sent + b"x", {}, 400, "the file holds"),
    "lying shape": (lambda sent: _header(sent, shape=[33]), {}, 400, "its data_offsets span"),
    "lying offsets": (lambda sent: _header(sent, data_offsets=[0, 128]), {}, 400, "overlaps"),
    "absurd header": (lambda sent: (2**62).to_bytes(8, "little") + sent[8:], {}, 400, "its header claims"),
    "a pickle": (lambda _: b"\x80\x04\x95" + bytes(100), {}, 400, "not a whole safetensors file"),
    "other model": (lambda sent: _header(sent, dtype="U32"), {}, 400, "model.norm.weight is uint32"),
    "another's digest": (lambda sent: sent, {"sha256": "0" * 64}, 400, "the body's sha256 is"),
    "no digest": (lambda sent: sent, {"sha256": "xyz"}, 400, "expected 64 hexadecimal digits"),
    "unknown option": (lambda sent: sent, {"colour": "red"}, 400, "unknown option; known are mode, weight_version"),
    "no mode": (lambda sent: sent, {"mode": "abort"}, 400, "expected one of continue, drain"),
    "long name": (lambda sent: sent, {"weight_version": "x" * 201}, 400, "at most 200 characters"),
    "too large": (lambda _: bytes(1_000_001), {}, 413, "--update-max-gb allows 1,000,000"),
}


def test_what_is_wrong_with_what_is_sent_is_named_and_changes_nothing(
    runner: Runner, tiny_target: Target, sent: bytes, tmp_path: Path
) -> None:
    """Also a client that leaves in the middle, one that does not say how much it sends, and a second one."""
    models, folder = Models("tiny", tiny_target, None, None), tmp_path / "kept"
    with _client(runner, models, folder) as http:
        before = _answer(http)
        for case, (make, options, status, words) in WRONG.items():
            reply = http.post(ROUTE, params=options, content=make(sent), headers=HEADERS)
            assert words in assert_refused(reply, status)["message"], case
        assert_refused(http.post(ROUTE, content=iter([sent]), headers=HEADERS), 411)
        assert_refused(http.post(ROUTE, content=sent, headers={"content-type": "application/json"}), 415)
        address = http.base_url.host, http.base_url.port
        with socket.create_connection(address) as torn:  # type: ignore[arg-type]
            head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
            torn.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent[:5000])
            wait_for(lambda: bool(list(folder.glob("*.safetensors"))))
            for second in (
                lambda: http.post(ROUTE, content=sent, headers=HEADERS),
                lambda: http.post("/update_weights_from_disk", json={"model_path": str(tiny_target.folder)}),
            ):
                assert "another update of the weights is under way" in assert_refused(second(), 409)["message"]
        wait_for(lambda: not list(folder.glob("*.safetensors")))
        assert http.get("/weight_version").json() == {"weight_version": "0"}
        assert _answer(http) == before
        assert http.post(ROUTE, content=sent, headers=HEADERS).status_code == 200


def test_a_kept_version_is_the_old_one_or_the_new_one_wherever_a_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call that changes the disk, before it and after it; its file is there, and no other is after a start."""

    class Killed(BaseException):
        pass

    calls = ("replace", "fsync", "unlink", "open")
    for number in range(40):
        folder = UpdateFolder(tmp_path / str(number))
        files = [folder.new_file() for _ in range(2)]
        files[0].write_text("old")
        folder.keep("old", str(files[0]), "/drafts/old")
        files[1].write_text("new")
        left = [number]

        def killing(call: Any, left: list[int] = left) -> Any:
            def stop() -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed

            def either(*args: Any, **named: Any) -> Any:
                stop()
                found = call(*args, **named)
                stop()
                return found

            return either

        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, killing(getattr(os, name)))
            try:
                folder.keep("new", str(files[1]), None)
                ended = True
            except Killed:
                ended = False
        again = UpdateFolder(folder.folder)
        kept = again.read()
        assert kept in (
            KeptVersion("old", str(files[0]), "/drafts/old"),
            KeptVersion("new", str(files[1]), "/drafts/old"),
        )
        assert Path(kept.target).read_text() == kept.name  # type: ignore[union-attr]
        assert [path.name for path in again.folder.glob("*.safetensors")] == [Path(kept.target).name]  # type: ignore[union-attr]
        if ended:
            assert number > 4, "few calls were seen"
            return
    raise AssertionError("it never ended")


def test_a_version_that_could_not_be_written_is_in_what_is_written_next(tmp_path: Path) -> None:
    """Else a restart would serve a mixture that never served, and the file of what serves would be gone."""
    folder = UpdateFolder(tmp_path)
    files = [folder.new_file() for _ in range(2)]
    files[0].write_text("first")
    folder.keep("first", str(files[0]), None)
    files[1].write_text("second")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "dump", _disk_is_full)
        with pytest.raises(OSError, match="full"):
            folder.keep("second", str(files[1]), None)
    folder.keep("third", None, "/drafts/new")
    assert folder.read() == KeptVersion("third", str(files[1]), "/drafts/new")
    assert files[1].exists()


def _disk_is_full(*_given: object) -> None:
    raise OSError(28, "the disk is full")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"name": "", "target": "", "draft": ""}', '{"name": 1}'])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "version.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"version\.json"):
        UpdateFolder(tmp_path).read()


def _process(
    target: Path, folder: Path, cache: Path
) -> AbstractContextManager[tuple[subprocess.Popen[str], httpx.Client]]:
    flags = ["--target", str(target), "--speculation", "off", "--max-model-len", "64", "--max-slots", "1"]
    flags += ["--port", "0", "--allow-update-weights", "--api-key", "k", "--update-folder", str(folder)]
    command, key = [served.SCRIPT, "serve", *flags], {"authorization": "Bearer k"}
    return served.started(command, served.environment(cache), seconds=PATIENCE, timeout=PATIENCE, headers=key)


@pytest.mark.slow
def test_a_server_that_is_killed_in_an_update_begins_with_a_whole_version(tiny_target: Target, tmp_path: Path) -> None:
    """The one before or the one after, as it names them, by folders and by what is sent."""
    target, folder = served.write_folder(tiny_target, tmp_path / "model"), tmp_path / "kept"
    bodies: list[bytes] = []
    for i in range(2):
        version = tmp_path / f"v{i}"
        version.mkdir()
        (version / "config.json").symlink_to(target / "config.json")
        write_tensors(version / "model.safetensors", _moved(tiny_target, i))
        bodies.append((version / "model.safetensors").read_bytes())
    rng, expected = random.Random(0), {}

    def update(http: httpx.Client, i: int) -> str:
        try:
            if rng.random() < 0.5:
                body = {"model_path": str(tmp_path / f"v{i}"), "weight_version": f"v{i}"}
                reply = http.post("/update_weights_from_disk", json=body)
            else:
                options = {"weight_version": f"v{i}"}
                reply = http.post(ROUTE, params=options, content=bodies[i], headers=HEADERS)
        except httpx.HTTPError:
            return ""  # it was killed
        assert reply.status_code == 200, reply.text
        return f"v{i}"

    version = "0"
    with _process(target, folder, tmp_path / "cache") as (_, http):
        with pytest.raises(BlockingIOError):
            hold(folder)
        expected[version] = _answer(http)
        for i in range(2):
            version = update(http, i)
            expected[version] = _answer(http)
    assert len({tuple(answer) for answer in expected.values()}) == 3
    possible = {version}
    for delay in (None, 0.05, 0.1, 0.2, 0.3, None):
        with _process(target, folder, tmp_path / "cache") as (process, http):
            version = http.get("/weight_version").json()["weight_version"]
            assert version in possible
            assert _answer(http) == expected[version]
            other = int(version == "v0")
            timer = threading.Timer(delay or rng.random(), process.send_signal, [signal.SIGKILL])
            timer.start()
            done = update(http, other)
            timer.join()
            possible = {done} if done else {version, f"v{other}"}
