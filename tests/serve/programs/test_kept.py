"""Compiled programs are kept: a later process neither traces nor compiles, and computes the same bits. Whatever decides
which program it is, is in a file's name, and a file that cannot be used is survived."""

import ast
import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import carried
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import make_runner
from jax.experimental.compilation_cache import compilation_cache
from kept_start import answers
from spread import MODELS, OF_ONE_CASE, mesh_of, spread_head, spread_target

from specserve import host
from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.kernels import native
from specserve.pytree import pytree, static
from specserve.serve.programs import program_cache
from specserve.serve.programs.calls import Call
from specserve.serve.programs.compile_queue import CompiledPrograms
from specserve.serve.programs.program_cache import ProgramCache
from specserve.serve.programs.runner import EMPTY_STATE, Runner
from specserve.speculative.drafter import Weights
from specserve.speculative.program import StepProgram


@pytest.fixture(autouse=True)
def _without_jax_cache() -> Iterator[None]:
    """What a compilation cache of JAX's has is not kept once more, and that of the tests has much."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytree
class _Sum:
    total: jax.Array
    label: str = static(default="")


class _Bound:
    """A function bound to a number, jitted, which donates its second argument and counts how often it is traced."""

    def __init__(self, number: int = 2) -> None:
        self.number, self.num_traced = number, 0
        self.function = jax.jit(functools.partial(self._step), donate_argnums=1, static_argnames="width")

    def _step(self, x: jax.Array, pages: jax.Array, *, width: int) -> tuple[jax.Array, _Sum]:
        self.num_traced += 1
        return pages.at[:width].add(x[0]), _Sum(jnp.sin(x).sum() * self.number, "sum")

    def call(self, x: Any = None, pages: Any = None, width: int = 2) -> Call:
        x, pages = jnp.arange(1.0, 4.0) if x is None else x, jnp.zeros((4, 3)) if pages is None else pages
        return Call(StepProgram(width=width), self.function, (x, pages), {"width": width})


def _kept(folder: Path, *facts: str) -> ProgramCache:
    return ProgramCache(folder, facts, jax.devices()[:1])


def test_a_later_process_traces_nothing(tmp_path: Path) -> None:
    first, second = _Bound(), _Bound()
    pages, out = CompiledPrograms(_kept(tmp_path / "programs")).run(first.call())
    other_pages, other = CompiledPrograms(_kept(tmp_path / "programs")).run(second.call())
    assert (first.num_traced, second.num_traced) == (1, 0)
    assert np.array_equal(pages, other_pages)
    assert (out.label, out.total.tobytes()) == (other.label, other.total.tobytes())
    [file] = (tmp_path / "programs").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600, "loading a program runs it: nobody else writes it"
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_what_is_donated_is_updated_in_place(tmp_path: Path) -> None:
    for _process in range(2):
        pages = jnp.zeros((4, 3))
        place = pages.unsafe_buffer_pointer()
        new, _ = CompiledPrograms(_kept(tmp_path)).run(_Bound().call(pages=pages))
        assert pages.is_deleted()
        assert new.unsafe_buffer_pointer() == place


def test_another_shape_than_the_program_has_is_refused(tmp_path: Path) -> None:
    """As by a program that was compiled here."""
    for _process in range(2):
        programs = CompiledPrograms(_kept(tmp_path))
        programs.compile(_Bound().call())
        with pytest.raises(TypeError):
            programs.run(_Bound().call(x=jnp.zeros(4)))


MISSES: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "shape": lambda _patch: {"x": jnp.zeros(5)},
    "dtype": lambda _patch: {"x": jnp.zeros(3, jnp.float16)},
    "structure": lambda _patch: {"x": (jnp.zeros(3),)},
    "static argument": lambda _patch: {"width": 3},
    "XLA's flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true") or {},
    "code": lambda patch: patch.setattr(program_cache, "_code", lambda: "another") or {},
    "processor": lambda patch: patch.setattr(host, "processor", lambda: "another") or {},
    "cores": lambda patch: patch.setattr(host, "num_cores", lambda: 1000) or {},
    "JAX": lambda patch: patch.setattr(program_cache.metadata, "version", lambda name: name) or {},
    "instruction set": lambda patch: patch.setattr(native, "describe", lambda: "another") or {},
    "kernels": lambda patch: patch.setattr(native, "is_available", lambda: "another") or {},
}


@pytest.mark.parametrize("change", MISSES.values(), ids=MISSES.keys())
def test_whatever_decides_about_a_program_finds_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], dict[str, Any]]
) -> None:
    call = _Bound().call()
    path = _kept(tmp_path, "config")._path(call)
    assert _kept(tmp_path, "config")._path(_Bound(3).call()) == path, "the arrays and the function object do not count"
    assert _kept(tmp_path, "another")._path(call) != path
    try:
        assert _kept(tmp_path, "config")._path(_Bound().call(**change(monkeypatch))) != path
    finally:
        monkeypatch.undo()
    assert _kept(tmp_path, "config")._path(call) == path


@pytest.mark.parametrize(
    ("name", "value"),
    [("jax_default_matmul_precision", "highest"), ("jax_enable_x64", True), ("jax_disable_most_optimizations", None)],
)
def test_settings_of_jax_count(tmp_path: Path, name: str, value: object) -> None:
    call, before = _Bound().call(), jax.config.values[name]  # type: ignore[attr-defined]
    path = _kept(tmp_path)._path(call)
    try:
        jax.config.update(name, not before if value is None else value)
        assert _kept(tmp_path)._path(call) != path
    finally:
        jax.config.update(name, before)
    assert _kept(tmp_path)._path(call) == path


def test_code_that_is_traced_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache.specserve, "__file__", str(tmp_path / "__init__.py"))
    native_folder = tmp_path / "kernels" / "native"
    native_folder.mkdir(parents=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "cli").mkdir()
    for file in ("mesh.py", "kernels/native/__init__.py", "models/target.py", f"kernels/native/{native.build.LIBRARY}"):
        found: set[str] = set()
        for text in ("x = 1", "x = 2"):
            (tmp_path / file).write_text(text)
            (tmp_path / "cli" / "serve.py").write_text(text)
            found.add(program_cache._code.__wrapped__())
        assert len(found) == 2
    (tmp_path / "mesh.py").rename(tmp_path / "pytree.py")
    assert program_cache._code.__wrapped__() not in found
    (tmp_path / "cli" / "serve.py").write_text("what is not traced")
    (tmp_path / "pytree.py").rename(tmp_path / "mesh.py")
    assert program_cache._code.__wrapped__() in found


def test_all_that_is_traced_is_known() -> None:
    """What the server's functions import, and what that imports."""
    folder = Path(program_cache.specserve.__file__).parent
    known = {path for pattern in program_cache.TRACED for path in folder.glob(pattern)}
    found, left = set[Path](), [folder / "serve" / "programs" / "calls.py"]
    while left:
        path = left.pop()
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specserve"):
                base = folder.parent.joinpath(*str(node.module).split("."))
                both = {base, *(base / alias.name for alias in node.names)} - {folder}
                files = [file for each in both for file in (each.with_suffix(".py"), each / "__init__.py")]
                left += [file for file in files if file.is_file() and file not in found]
    assert len(found) > 30
    assert not found - known
    assert known.issuperset((folder / "drafters").rglob("*.py")), "a step calls them, and imports them not"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda _data: b"",
    "a flipped bit": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "something else": lambda _data: zlib.compress(pickle.dumps("program")),
    "another program": lambda data: _renamed(data),
    "no program": lambda data: zlib.compress(pickle.dumps((*pickle.loads(zlib.decompress(data))[:1], b"", 1))),
}


def _renamed(data: bytes) -> bytes:
    name, *rest = pickle.loads(zlib.decompress(data))
    return zlib.compress(pickle.dumps((f"{name}-of-another", *rest)))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_file_that_cannot_be_used_is_said_and_made_again(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    CompiledPrograms(_kept(tmp_path)).run(_Bound().call())
    [file] = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    again, repaired = _Bound(), _Bound()
    _, out = CompiledPrograms(_kept(tmp_path)).run(again.call())
    assert out.total == pytest.approx(2 * np.sin([1, 2, 3]).sum())
    assert again.num_traced == 1
    [record] = caplog.records
    assert "cannot be used, its program is compiled anew" in record.getMessage()
    CompiledPrograms(_kept(tmp_path)).run(repaired.call())
    assert repaired.num_traced == 0


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    programs = CompiledPrograms(_kept(tmp_path / "file" / "programs"))
    for width in (1, 2, 3):
        programs.run(_Bound().call(width=width))
    [record] = caplog.records
    assert str(tmp_path / "file" / "programs") in record.getMessage()


def test_a_folder_that_may_only_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    CompiledPrograms(_kept(tmp_path)).run(_Bound().call())

    def refuse(_path: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    again = _Bound()
    CompiledPrograms(_kept(tmp_path)).run(again.call())
    assert again.num_traced == 0
    assert not caplog.records


def test_what_was_not_used_for_longest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [_Bound().call(width=width) for width in range(4)]
    programs, paths = CompiledPrograms(_kept(tmp_path)), [_kept(tmp_path)._path(call) for call in calls]
    for i, call in enumerate(calls[:3]):
        programs.compile(call)
        os.utime(paths[i], (i, i))
    assert _kept(tmp_path).load(calls[0]) is not None  # used now
    monkeypatch.setattr(program_cache, "LARGEST_BYTES", int(3.5 * paths[0].stat().st_size))
    programs.compile(calls[3])
    assert [path.exists() for path in paths] == [True, False, True, True]


def test_files_that_others_take_away_do_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").symlink_to(tmp_path / "away")
    CompiledPrograms(_kept(tmp_path)).run(_Bound().call())
    assert not caplog.records


def test_what_a_cache_of_jax_had_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """XLA would write only a part of it, and fail when it runs."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    try:
        for _process in range(2):
            CompiledPrograms(_kept(tmp_path / "first")).run(_Bound().call())  # JAX keeps it, too
            _, out = CompiledPrograms(_kept(tmp_path / "second")).run(_Bound().call())
            assert out.total == pytest.approx(2 * np.sin([1, 2, 3]).sum())
        assert len(list((tmp_path / "first").iterdir())) == 1
        assert not (tmp_path / "second").exists()
        assert not caplog.records
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize(
    "case",
    ["one device", *(pytest.param(case, marks=pytest.mark.slow) for case in ("mesh", "qwen3_5", "qwen3_5_moe"))],
)
def test_a_server_s_programs_are_kept(
    tiny_target: Target, tiny_head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Those of native kernels, those of a mesh, and those of the layer that Qwen3.5 carries: the same bits, untraced,
    over a cache that is never copied."""
    mesh = mesh_of("data=2,tensor=2") if case == "mesh" else None
    target, head = tiny_target, tiny_head
    if mesh:
        target, head = spread_target("dense", mesh), spread_head("dense", mesh)
    elif case != "one device":
        raw = {"qwen3_5": carried.NEXT_DENSE, "qwen3_5_moe": carried.NEXT_SPARSE}[case]
        target, head = carried.models(tmp_path / "models", raw)

    def make() -> Runner:
        return make_runner(target, head, "chain:3", "off", has_constrained=False, mesh=mesh, folder=tmp_path)

    first = answers(make())
    with monkeypatch.context() as patch:
        patch.setattr(Call, "lower", lambda call: pytest.fail(f"{call.program} was traced"))
        runner = make()
        again = answers(runner)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))
    deeper = dataclasses.replace(runner.config, max_depth=runner.config.max_depth + 1)
    other = ProgramCache(tmp_path, (repr(deeper), str(runner.place)), runner.place.devices)
    assert runner.compiled._cache is not None
    assert runner.compiled._cache.load(runner.call(EMPTY_STATE)) is not None
    assert other.load(runner.call(EMPTY_STATE)) is None, "the functions' own config counts"


@pytest.mark.parametrize(
    "model",
    [
        model if model == "delta nets" else pytest.param(model, marks=pytest.mark.slow)
        for model in (*MODELS, *OF_ONE_CASE)
    ],
)
def test_a_second_process_of_every_kind_of_model_serves_from_what_is_kept(tmp_path: Path, model: str) -> None:
    """It lowers nothing, so nothing that JAX sets up while it lowers is there but by our own doing."""
    starts = []
    for _process in range(2):
        command = [sys.executable, Path(__file__).parents[2] / "support/kept_start.py", tmp_path, model]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        starts.append(json.loads(ran.stdout))
    first, second = starts
    assert first["lowered"] > 0 == second["lowered"]
    assert first["tokens"] == second["tokens"]


def test_layouts_of_other_shapes_are_other_programs(tiny_target: Target, tiny_head: Head, tmp_path: Path) -> None:
    """In memory a number distinguishes them, which means nothing to another process."""
    runner = make_runner(tiny_target, tiny_head, "chain:3", "off", has_constrained=False, folder=tmp_path)
    layout, programs = runner.inputs.layouts.one, _kept(tmp_path)
    wider = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape, 2), x.dtype), layout)
    assert isinstance(wider, Weights)
    slots = runner.place.slots((0,))
    layouts = enumerate((layout, dataclasses.replace(layout), wider))
    calls = [
        runner._calls.make(StepProgram(1, kind="catch-up", layout=number), (each, runner.state, slots))
        for number, each in layouts
    ]
    assert len({call.program for call in calls}) == 3
    same, copy, other = (programs._path(call) for call in calls)
    assert same == copy
    assert same != other
