"""What the process asks of its operating system."""

import gc
import sys
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from specserve import host
from specserve.checkpoints.load import Target
from specserve.serve.placement import bytes_per_token
from specserve.serve.runner import Runner


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


def test_the_processor_is_told_with_its_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And without what changes from one moment to the next."""
    assert host.processor() == host.processor()
    if sys.platform.startswith("linux"):
        assert {"fma", "asimd"}.intersection(host.processor().split())
    found = tmp_path / "cpuinfo"
    told = "processor\t: 0\nvendor_id\t: A\nmodel\t\t: 6\ncpu MHz\t\t: {}\nflags\t\t: fpu {}\n\nprocessor\t: 1\n"
    monkeypatch.setattr(host, "Path", lambda _path: found)
    texts = []
    for speed, flag in ((1000, "avx2"), (2000, "avx2"), (2000, "avx512f")):
        found.write_text(told.format(speed, flag))
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for it")
def test_zeros_are_given_back_and_numbers_are_not() -> None:
    """Whole pages of zeros, whatever lies beside them, come back as zeros; a single number keeps all."""
    array, own = np.empty(8 << 20, np.uint8), psutil.Process()
    array[:] = 0
    array[0] = array[-1] = 7  # beside the whole pages
    before = own.memory_info().rss
    assert host.give_back_zeros(array.ctypes.data + 1, array.nbytes - 2)
    assert before - own.memory_info().rss > 7 << 20
    assert array[0] == array[-1] == 7
    array[5 << 20] = 3
    assert not host.give_back_zeros(array.ctypes.data + 1, array.nbytes - 2)
    assert array.sum() == 17
    assert not host.give_back_zeros(array.ctypes.data, 100), "no whole page"


@pytest.mark.skipif(not sys.platform.startswith("linux") or jax.default_backend() != "cpu", reason="asks Linux for it")
def test_a_server_holds_no_memory_for_pages_that_nobody_has_used(tiny_target: Target) -> None:
    own, sizes = psutil.Process(), []
    for num_pages in (64, 64 + (256 << 20) // (4 * bytes_per_token(tiny_target.config, None))):
        before = own.memory_info().rss
        runner = Runner(tiny_target, None, [None], num_slots=1, max_model_len=64, page_size=4, num_pages=num_pages)
        jax.block_until_ready(runner.state)
        sizes.append(own.memory_info().rss - before)
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(runner.state.cache))
        del runner
    assert sizes[1] - sizes[0] < 64 << 20, "of 256 MiB more"
