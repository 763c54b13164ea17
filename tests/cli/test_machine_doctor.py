"""`specserve doctor`: each thing that is wrong with a machine is found, said with its fix, and decides about the exit
status."""

import dataclasses
import functools
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from specserve.cli import doctor
from specserve.cli.doctor import MachineCheck
from specserve.cli.main import app
from specserve.kernels import check, native, paged, paged_gpu
from specserve.kernels.paged import PagedPrefix
from specserve.mesh import made_for


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a working directory and a cache of its own, without a network."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(doctor.hub, "absence", lambda: "no network in tests")


def found(run: Callable[[MachineCheck], None], *arguments: Any) -> MachineCheck:
    checked = MachineCheck("one")
    run(checked, *arguments)
    return checked


def test_a_sound_machine_has_no_errors_and_a_broken_one_exits_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        sound = CliRunner().invoke(app, ["doctor", "--json", "--port", port])
    assert sound.exit_code == 0, sound.output
    report = json.loads(sound.stdout)
    assert report["is_sound"]
    by_name = {each["name"]: each for each in report["checks"]}
    assert "is taken" in by_name["port"]["text"]
    assert by_name["port"]["findings"][0]["fix"]
    assert all(each["text"] for each in report["checks"])
    Path("rich.py").touch()
    broken = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert broken.exit_code == 1
    assert "rename" in broken.stdout
    assert "1 errors" in broken.stdout


def test_what_stands_before_an_installed_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working directory and on PYTHONPATH: a module, or a package; a folder of data is neither."""
    other = tmp_path / "other"
    for folder in ("datasets", "specserve"):
        (other / folder).mkdir(parents=True)
    assert not found(doctor.check_names).findings
    monkeypatch.setenv("PYTHONPATH", f"{Path(doctor.__file__).parents[2]}:{other}")
    assert not found(doctor.check_names).findings
    (other / "specserve" / "__init__.py").touch()
    Path("datasets.py").touch()
    said = [finding.what for finding in found(doctor.check_names).findings]
    assert len(said) == 2
    assert str(Path("datasets.py").resolve()) in said[0]
    assert str(other / "specserve") in said[1]


def test_versions_that_specserve_does_not_run_on_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor._version
    monkeypatch.setattr(doctor.metadata, "requires", lambda _name: ["jax>=0.10,<0.13", "numpy>=1; extra == 'x'"])
    for version, number in (("0.12.1", 0), ("0.13.0", 1), (None, 1)):
        monkeypatch.setattr(doctor, "_version", lambda name, own=version: own if name == "jax" else installed(name))
        findings = found(doctor.check_versions).findings
        assert len(findings) == number, version
        assert all("pip install 'jax" in finding.fix for finding in findings)


def test_a_cache_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    assert not found(doctor.check_cache).findings
    (tmp_path / "cache" / "specserve").rmdir()
    (tmp_path / "cache" / "specserve").write_text("a file")
    assert "XDG_CACHE_HOME" in found(doctor.check_cache).findings[0].fix


def test_kernels_that_are_off_by_more_than_rounding_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.is_available():
        pytest.skip(native.describe())
    assert [each for each in check.check_kernels() if not each.is_right] == []
    product, attend = check.matmul, check.attend
    with monkeypatch.context() as patch:  # a key that nobody may see is seen
        patch.setattr(check, "matmul", product)
        patch.setattr(check, "attend", lambda q, k, v, mask, prefix: attend(q, k, v, mask | _is_native(), prefix))
        assert [each.kernel for each in check.check_kernels() if not each.is_right] == ["attention"]
    monkeypatch.setattr(
        check, "matmul", lambda x, w: product(x, w) * (1.001 if isinstance(w, check.PackedMatrix) else 1.0)
    )
    wrong = found(doctor.check_kernels)
    assert len(wrong.findings) == 3
    assert {finding.level for finding in wrong.findings} == {"error"}


def _is_native() -> bool:
    return not native.are_left_out()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_products_in_4_bits_are_checked_on_accelerators(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted here. Scales that are a third too large are found."""
    pack = check.in_nibbles

    def packed(weight: Any) -> Any:
        with made_for(platform):
            return pack(weight)

    monkeypatch.setattr(check, "in_nibbles", packed)
    assert check._four_bits().is_right
    product = check.matmul_float32
    monkeypatch.setattr(check, "matmul_float32", lambda x, weight: 1.33 * product(x, weight))
    assert not check._four_bits().is_right


def test_the_kernel_of_gpus_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted here, in 16 bits. What rounding explains covers it, and does not cover a key that is left out."""
    kernel = paged.PagesKernel(functools.partial(paged_gpu.attend_pages, interpret=True), takes_new=True)
    attend = check.attend
    monkeypatch.setattr(check, "default_layout", lambda _head_dim: "rows")
    monkeypatch.setattr(paged, "kernel_for", lambda _pages: None if native.are_left_out() else kernel)
    monkeypatch.setattr(native, "serves", lambda *_arrays: False)
    assert check._attention("bfloat16").is_right

    def shorter(q: Any, k: Any, v: Any, mask: Any, prefix: PagedPrefix) -> Any:
        lens = prefix.lens if native.are_left_out() else jnp.maximum(prefix.lens - 1, 0)
        return attend(q, k, v, mask, dataclasses.replace(prefix, lens=lens))

    monkeypatch.setattr(check, "attend", shorter)
    assert not check._attention("bfloat16").is_right


def test_without_native_kernels_the_fix_is_said() -> None:
    with native.left_out():
        findings = found(doctor.check_kernels).findings
    assert [finding.level for finding in findings] == ["warning"]
    assert findings[0].fix


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_check: MachineCheck) -> None:
        raise ImportError("cannot import name 'x' from 'jax'\nmore")

    for name in ("versions", "devices", "memory", "kernels", "hub"):
        monkeypatch.setattr(doctor, f"check_{name}", fail)
    checks = list(doctor.examine("127.0.0.1", 0))
    assert [check.name for check in checks if check.findings] == ["versions", "devices", "memory", "kernels", "hub"]
    assert "cannot import name" in checks[1].findings[0].what
