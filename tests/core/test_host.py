"""What the process asks of its operating system."""

import gc
import sys
from pathlib import Path

import pytest

from specserve import host


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    host.write_whole(file, b"first")
    host.write_whole(file, b"second")
    assert file.read_bytes() == b"second"

    def fail(_source: str, _target: str) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(host.os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        host.write_whole(file, b"third")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"second"


def test_the_processor_is_described_with_its_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And without the facts that change from one moment to the next."""
    assert host.processor() == host.processor()
    if sys.platform.startswith("linux"):
        assert {"fma", "asimd"}.intersection(host.processor().split())
    found = tmp_path / "cpuinfo"
    text = "processor\t: 0\nvendor_id\t: A\nmodel\t\t: 6\ncpu MHz\t\t: {}\nflags\t\t: fpu {}\n\nprocessor\t: 1\n"
    monkeypatch.setattr(host, "Path", lambda _path: found)
    texts = []
    for speed, flag in ((1000, "avx2"), (2000, "avx2"), (2000, "avx512f")):
        found.write_text(text.format(speed, flag))
        texts.append(host.processor())
    assert texts[0] == texts[1] != texts[2]
    assert "vendor_id\t: A; model\t\t: 6; flags\t\t: fpu avx2" in texts[0]
    found.unlink()
    assert host.platform.node() in host.processor()


def test_imports_are_not_searched_for_garbage() -> None:
    """Nor is the search turned on where it was off."""
    with host.without_collecting():
        assert not gc.isenabled()
        with host.without_collecting():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), host.without_collecting():
        _ = 1 / 0
    assert gc.isenabled()


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_environment_decides_about_a_gpus_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """JAX refuses to start where both names of the variable are set."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(host.os, "environ", environment)
    host.take_gpu_memory()
    assert environment == {"XLA_CLIENT_MEM_FRACTION": host.GPU_SHARE}
    environment.clear()
    environment[name] = ".5"
    host.take_gpu_memory()
    assert environment == {name: ".5"}
