"""Safetensors files are believed only as far as they agree with themselves, and slices read back bit for bit."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specserve.checkpoints.tensors import DTYPES, TensorFolder, write_tensors
from specserve.errors import CheckpointError

HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I8", "shape": [5], "data_offsets": [24, 29]},
}


def _write(path: Path, header: Any, data: bytes = bytes(29), claim: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if claim is None else claim).to_bytes(8, "little") + text + data)


def _refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        TensorFolder(folder)
    return str(error.value)


def test_every_dtype_and_slice_reads_back_bit_for_bit(tmp_path: Path, rng: np.random.Generator) -> None:
    """Also where tensors of odd sizes leave the next one at an odd byte, without elements and without axes."""
    header, data, expected = {}, b"", {}
    for name, dtype in DTYPES.items():
        for shape in ((3, 5, 7), (), (0, 4)):
            size = math.prod(shape) * dtype.itemsize
            content = rng.integers(0, 2, size, np.uint8).tobytes()
            key = f"{name}{len(shape)}"
            header[key] = {"dtype": name, "shape": shape, "data_offsets": [len(data), len(data) + size]}
            expected[key] = np.frombuffer(content, dtype).reshape(shape)
            data += content
    _write(tmp_path / "model.safetensors", header, data)
    folder = TensorFolder(tmp_path)
    assert folder.names() == expected.keys()
    for key, value in expected.items():
        assert (folder.shape(key), folder.dtype(key)) == (value.shape, value.dtype)
        _assert_same_bits(folder.read(key), value)
        assert folder.read(key).flags.owndata or not value.size, "or a file that changes would change the weights"
    for name in DTYPES:
        for index in ((slice(1, 3), slice(2, 4), slice(0, 7)), (slice(0, 3), np.array([0, 4]), slice(6, 7))):
            _assert_same_bits(folder.read(f"{name}3", index), expected[f"{name}3"][index])


def _assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert got.tobytes() == expected.tobytes()


def test_what_is_written_is_what_the_library_reads(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = {"w": rng.standard_normal((4, 6)).astype(np.float32).T, "d2t": np.arange(3)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        _assert_same_bits(value, np.ascontiguousarray(tensors[name]))
        _assert_same_bits(TensorFolder(tmp_path).read(name), value)


def test_no_beginning_of_a_file_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    _write(path, HEADER)
    whole = path.read_bytes()
    TensorFolder(tmp_path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert f"{path}: not a whole safetensors file" in _refused(tmp_path)


def _with(**changes: Any) -> dict[str, Any]:
    return HEADER | {"b": HEADER["b"] | changes}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{}]", "Extra data"),
        (b"[]", "no JSON object"),
        (b"[" * 100_000, "recursion"),
        (b"\xff", "utf-8"),
        (b'{"a": {}, "a": {}}', "names a tensor twice"),
        ({"a": []}, "a lacks dtype, shape or data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2, 3]}}, "a lacks dtype, shape or data_offsets"),
        (_with(dtype="F33"), "b has dtype F33"),
        (_with(dtype=["F32"]), "b has dtype"),
        (_with(shape=[-5]), r"b has shape \[-5\].*not counts"),
        (_with(shape=[5.0]), r"b has shape \[5\.0\].*not counts"),
        (_with(shape=[True]), "not counts"),
        (_with(shape=5), "b lacks"),
        (_with(shape=[6]), r"b is I8 of shape \[6\], 6 bytes, its data_offsets span 5"),
        (_with(shape=[4]), r"b is I8 of shape \[4\], 4 bytes, its data_offsets span 5"),
        (_with(dtype="F64"), r"40 bytes, its data_offsets span 5"),
        (_with(data_offsets=[29, 24]), "span -5"),
        (_with(data_offsets=[23, 28]), "b overlaps a: it begins at byte 23 of the data, expected 24"),
        (_with(data_offsets=[25, 30]), "b leaves a hole after a: it begins at byte 25 of the data, expected 24"),
        (_with(shape=[2**50], data_offsets=[24, 24 + 2**50]), "its tensors take .* bytes, the file holds 29"),
        (_with(shape=[4], data_offsets=[24, 28]), "its tensors take 28 bytes, the file holds 29"),
        ({"a": HEADER["a"]}, "its tensors take 24 bytes, the file holds 29"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(tmp_path: Path, header: Any, words: str) -> None:
    _write(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=words) as error:
        TensorFolder(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("claim", [2**63, 2**40, 200_000_000, 99_000_000, 0])
def test_a_header_of_absurd_length_is_not_read(tmp_path: Path, claim: int) -> None:
    _write(tmp_path / "model.safetensors", HEADER, claim=claim)
    assert ("not a whole" if claim == 0 else f"its header claims {claim:,} bytes, the file has") in _refused(tmp_path)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two tensors in two files."""
    for file, name in (("1.safetensors", "a"), ("2.safetensors", "b")):
        save_file({name: np.ones(3, np.float32)}, tmp_path / file)
    _index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    return tmp_path


def _index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_as_the_index_says(shards: Path) -> None:
    folder = TensorFolder(shards)
    assert {name: folder.file(name).name for name in folder.names()} == {"a": "1.safetensors", "b": "2.safetensors"}


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}, "b should be in 1.*, it is in 2"),
        ({"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}, "c should be in 2.*, it is in no file"),
        ({"a": "1.safetensors", "c": "2.safetensors"}, "b in 2.safetensors is not mentioned"),
        ({"a": "1.safetensors", "b": "3.safetensors"}, "names 3.safetensors, which is not there"),
        ({"a": "1.safetensors", "b": "../2.safetensors"}, "is not in the model's folder"),
        ({"a": 1}, "must say the file of every tensor"),
        (["a"], "must say the file of every tensor"),
    ],
)
def test_an_index_that_lies_is_refused(shards: Path, weight_map: Any, words: str) -> None:
    _index(shards, weight_map)
    with pytest.raises(CheckpointError, match=words) as error:
        TensorFolder(shards)
    assert str(shards) in str(error.value)


def test_a_tensor_in_two_shards_is_refused(shards: Path) -> None:
    save_file({"a": np.zeros(3, np.float32), "b": np.ones(3, np.float32)}, shards / "2.safetensors")
    assert "a is also in 2.safetensors" in _refused(shards)
