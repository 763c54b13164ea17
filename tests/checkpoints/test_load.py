"""From stored tensors to parameters: whatever way a checkpoint keeps them, on one device or spread over several, and
nothing is missing, left over, or read that is not needed."""

import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from specserve import mesh
from specserve.checkpoints.load import check_weights, load_params, to_numpy
from specserve.checkpoints.tensors import TensorFolder, write_tensors
from specserve.errors import CheckpointError
from specserve.models.params import ParamSpec, Part, embedding_table, matrix, vector

Tensors = dict[str, np.ndarray]
EXPERTS, D_IN, D_OUT = 4, 8, 12
SPEC = {
    "embedding": embedding_table("embed", 16, D_IN),
    "norm": vector("norm", D_IN),
    "plain": matrix("plain", D_IN, D_OUT, ("embed", "mlp")),
    "gate": matrix("gate_up", D_IN, D_OUT, ("embed", "mlp"), part=Part(0, D_OUT, 2 * D_OUT, 2 * D_OUT)),
    "up": matrix("gate_up", D_IN, D_OUT, ("embed", "mlp"), part=Part(D_OUT, 2 * D_OUT, 2 * D_OUT, 2 * D_OUT)),
    "gate_bias": vector("gate_up_bias", D_OUT, "mlp", part=Part(0, 1, 2, 2 * D_OUT)),
    "up_bias": vector("gate_up_bias", D_OUT, "mlp", part=Part(1, 2, 2, 2 * D_OUT)),
    "nope": matrix("heads", D_IN, D_OUT, ("embed", "heads"), part=Part(0, 3, 5, 20)),
    "rope": matrix("heads", D_IN, 8, ("embed", "heads"), part=Part(3, 5, 5, 20)),
    "experts": ParamSpec((EXPERTS, D_IN, D_OUT), ("experts", "embed", "mlp"), "experts.{e}.up", transpose=True),
    "stacked": ParamSpec((EXPERTS, D_IN, D_OUT), ("experts", "embed", "mlp"), "stacked", part=Part(1, 2, 2, 2 * D_OUT)),
    "rest": ParamSpec((EXPERTS, D_IN, D_OUT), ("experts", "embed", "mlp"), "stacked", part=Part(0, 1, 2, 2 * D_OUT)),
}


def _tensors(rng: np.random.Generator) -> Tensors:
    shapes = {
        "embed": (16, D_IN),
        "norm": (D_IN,),
        "plain": (D_OUT, D_IN),
        "gate_up": (2 * D_OUT, D_IN),
        "gate_up_bias": (2 * D_OUT,),
        "heads": (20, D_IN),
        "stacked": (EXPERTS, D_IN, 2 * D_OUT),
        **{f"experts.{e}.up": (D_OUT, D_IN) for e in range(EXPERTS)},
    }
    return {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


def _expected(tensors: Tensors) -> Tensors:
    """What the spec says, written out."""
    is_nope = np.arange(20) % 5 < 3
    return {
        "embedding": tensors["embed"],
        "norm": tensors["norm"],
        "plain": tensors["plain"].T,
        "gate": tensors["gate_up"][:D_OUT].T,
        "up": tensors["gate_up"][D_OUT:].T,
        "gate_bias": tensors["gate_up_bias"][::2],
        "up_bias": tensors["gate_up_bias"][1::2],
        "nope": tensors["heads"][is_nope].T,
        "rope": tensors["heads"][~is_nope].T,
        "experts": np.stack([tensors[f"experts.{e}.up"].T for e in range(EXPERTS)]),
        "stacked": tensors["stacked"][..., 1::2],
        "rest": tensors["stacked"][..., ::2],
    }


@pytest.fixture
def tensors(tmp_path: Path, rng: np.random.Generator) -> Tensors:
    tensors = _tensors(rng)
    write_tensors(tmp_path / "model.safetensors", tensors)
    return tensors


def _assert_same_bits(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert got.tobytes() == expected.tobytes()


def test_parameters_are_put_together_as_the_spec_says(tmp_path: Path, tensors: Tensors) -> None:
    loaded = load_params(SPEC, TensorFolder(tmp_path), "bfloat16")
    for name, value in _expected(tensors).items():
        _assert_same_bits(loaded[name], value)
    wide = load_params(SPEC, TensorFolder(tmp_path), "float32")
    for name, value in _expected(tensors).items():
        _assert_same_bits(wide[name], value.astype(np.float32))


def test_saved_and_loaded_bfloat16_is_the_same_bit_for_bit(tmp_path: Path, tensors: Tensors) -> None:
    loaded = load_params(SPEC, TensorFolder(tmp_path), "bfloat16")
    saved = to_numpy(loaded, SPEC, "bfloat16")
    assert saved.keys() == tensors.keys()
    for name, value in tensors.items():
        _assert_same_bits(saved[name], value)


@pytest.mark.parametrize(("tensor", "expert"), [(4, 1), (2, 2), (1, 4), (2, 1)])
def test_a_spread_load_is_the_whole_one_and_reads_each_byte_once(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, tensor: int, expert: int
) -> None:
    devices = mesh.make_mesh(tensor=tensor, expert=expert)
    shardings = {name: mesh.sharding(devices, spec.axes) for name, spec in SPEC.items()}
    read: list[int] = []
    plain_read = TensorFolder.read

    def counted(self: TensorFolder, name: str, index: Any = ()) -> np.ndarray:
        value = plain_read(self, name, index)
        read.append(value.nbytes)
        return value

    monkeypatch.setattr(TensorFolder, "read", counted)
    spread = load_params(SPEC, TensorFolder(tmp_path), "bfloat16", shardings=shardings)
    for name, value in _expected(tensors).items():
        assert spread[name].sharding == shardings[name]
        _assert_same_bits(spread[name], value)
    assert sum(read) == sum(value.nbytes for value in tensors.values())
    largest = max(np.prod(shardings[name].shard_shape(spec.shape)) for name, spec in SPEC.items())
    assert max(read) <= 2 * largest, "more was in hand at once than a device's share of one parameter"


def test_every_problem_is_in_one_error(tmp_path: Path, tensors: Tensors) -> None:
    del tensors["norm"], tensors["experts.2.up"]
    tensors["plain"] = tensors["plain"][:-1]
    tensors["heads"] = tensors["heads"].astype(np.int32)
    tensors["embed"] = tensors["embed"].astype(ml_dtypes.float8_e4m3fn)
    tensors["more"] = np.zeros(3, np.float32)
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as error:
        load_params(SPEC, TensorFolder(tmp_path), "float32")
    for words in (
        "norm is missing",
        "experts.2.up is missing",
        "model.safetensors: plain has shape (11, 8), config.json says (12, 8)",
        "model.safetensors: heads is int32, expected a float",
        "model.safetensors: embed is float8_e4m3fn, but there is no embed_scale_inv",
        "more is not part of this architecture",
    ):
        assert words in str(error.value)
    assert str(error.value).count("heads is int32") == 1, "two parameters read it, and it is one problem"


def test_nothing_is_read_before_all_is_checked(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tensors["stacked"]
    write_tensors(tmp_path / "model.safetensors", tensors)
    monkeypatch.setattr(TensorFolder, "read", lambda *_: pytest.fail("something was read"))
    with pytest.raises(CheckpointError, match="stacked is missing"):
        load_params(SPEC, TensorFolder(tmp_path), "float32")


def test_what_is_skipped_is_said_with_its_reason(
    tmp_path: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(2):
        tensors[f"layers.{i}.rotary_emb.inv_freq"] = np.ones(3, np.float32)
        tensors[f"layers.{i}.input_scale"] = np.ones(1, np.float32)
    tensors["other"] = np.ones(3, np.float32)
    write_tensors(tmp_path / "model.safetensors", tensors)
    with caplog.at_level(logging.INFO):
        load_params(SPEC, TensorFolder(tmp_path), "float32", skipped={"oth.r": "for a test"})
    [line] = [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()]
    assert "1 (for a test)" in line
    assert "2 (rotary buffers, computed here)" in line
    assert "2 (scales of activations" in line


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, tensors: Tensors, value: float) -> None:
    loaded = load_params(SPEC, TensorFolder(tmp_path), "bfloat16")
    check_weights(loaded, SPEC, "here")
    loaded["experts"] = loaded["experts"].at[3, 2, 1].set(value)
    loaded["norm"] = loaded["norm"].at[0].set(value)
    with pytest.raises(CheckpointError, match=r"^here: .*: experts\.3\.up; norm; copy"):
        check_weights(loaded, SPEC, "here")
