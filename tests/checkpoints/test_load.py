"""From stored tensors to parameters: whatever way a checkpoint keeps them, on one device or spread over several, and
nothing is missing, left over, or read that is not needed."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import carried
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

from specserve import mesh
from specserve.checkpoints.load import Quantization, load_params, load_target, to_numpy
from specserve.checkpoints.sound import check_weights
from specserve.checkpoints.tensors import TensorFolder, write_json, write_tensors
from specserve.drafters.registry import CARRIED
from specserve.errors import CheckpointError
from specserve.interop.head import load_head
from specserve.kernels.matmul import QuantizedMatrix, dequantize
from specserve.models.families.table import model_config
from specserve.models.params import ParamSpec, TensorPart, embedding_table, matrix, specs, vector
from specserve.models.target import target_spec

Tensors = dict[str, np.ndarray]
EXPERTS, D_IN, D_OUT = 4, 8, 12
SPEC = {
    "embedding": embedding_table("embed", 16, D_IN),
    "norm": vector("norm", D_IN),
    "plain": matrix("plain", D_IN, D_OUT, ("embed", "mlp")),
    "gate": matrix("gate_up", D_IN, D_OUT, ("embed", "mlp"), part=TensorPart(0, D_OUT, 2 * D_OUT, 2 * D_OUT)),
    "up": matrix("gate_up", D_IN, D_OUT, ("embed", "mlp"), part=TensorPart(D_OUT, 2 * D_OUT, 2 * D_OUT, 2 * D_OUT)),
    "gate_bias": vector("gate_up_bias", D_OUT, "mlp", part=TensorPart(0, 1, 2, 2 * D_OUT)),
    "up_bias": vector("gate_up_bias", D_OUT, "mlp", part=TensorPart(1, 2, 2, 2 * D_OUT)),
    "nope": matrix("heads", D_IN, D_OUT, ("embed", "heads"), part=TensorPart(0, 3, 5, 20)),
    "rope": matrix("heads", D_IN, 8, ("embed", "heads"), part=TensorPart(3, 5, 5, 20)),
    "experts": ParamSpec((EXPERTS, D_IN, D_OUT), ("experts", "embed", "mlp"), "experts.{e}.up", transpose=True),
    "stacked": ParamSpec(
        (EXPERTS, D_IN, D_OUT), ("experts", "embed", "mlp"), "stacked", part=TensorPart(1, 2, 2, 2 * D_OUT)
    ),
    "rest": ParamSpec(
        (EXPERTS, D_IN, D_OUT), ("experts", "embed", "mlp"), "stacked", part=TensorPart(0, 1, 2, 2 * D_OUT)
    ),
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


GOLDENS = Path(__file__).parent.parent / "goldens"


def _write_family(folder: Path, family: str, rng: np.random.Generator) -> tuple[dict[str, Any], Tensors]:
    """A checkpoint with the tensors that the family's specs name, of values that distinguish them."""
    raw = json.loads((GOLDENS / family / "config.json").read_text())
    tensors: Tensors = {}
    for spec in specs(target_spec(model_config(raw, dtype="bfloat16"))):
        for name in spec.names:
            tensors[name] = rng.standard_normal(spec.stored_shape).astype(spec.dtype("bfloat16"))
    write_json(folder / "config.json", raw)
    write_tensors(folder / "model.safetensors", tensors)
    return raw, tensors


@pytest.mark.parametrize("family", sorted(path.parent.name for path in GOLDENS.glob("*/config.json")))
def test_a_saved_target_of_every_family_is_the_loaded_one_bit_for_bit(
    tmp_path: Path, rng: np.random.Generator, family: str
) -> None:
    tensors = _write_family(tmp_path, family, rng)[1]
    target = load_target(tmp_path, dtype="bfloat16")
    saved = to_numpy(target.params, target_spec(target.config), "bfloat16")
    assert saved.keys() == tensors.keys()
    for name, value in tensors.items():
        _assert_same_bits(saved[name], value)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama-llama3", set()),
        ("deepseek-v3", {"e_score_correction_bias", "gate"}),
        ("minimax-m2", {"e_score_correction_bias"}),
        ("qwen3-next", {"A_log", "dt_bias", "conv1d"}),
        ("qwen3-5", {"A_log", "dt_bias", "conv1d"}),
        ("ling-3", {"A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "expert_bias", "gate"}),
    ],
)
def test_few_numbers_that_decide_much_stay_float32(
    tmp_path: Path, rng: np.random.Generator, family: str, names: set[str]
) -> None:
    tensors = _write_family(tmp_path, family, rng)[1]
    wide = {name for name, value in tensors.items() if value.dtype == np.float32}
    assert {name.removesuffix(".weight").rsplit(".", 1)[-1] for name in wide} == names
    target = load_target(tmp_path, dtype="bfloat16")
    all_specs = specs(target_spec(target.config))
    for spec, value in zip(all_specs, jax.tree.leaves(target.params), strict=True):
        assert value.dtype == (np.float32 if spec.name in wide else ml_dtypes.bfloat16), spec.name


@pytest.mark.parametrize(
    ("family", "extra", "reason"),
    [
        ("deepseek-v3", "model.layers.{n}.eh_proj.weight", "multi-token prediction"),
        ("glm4-moe", "model.layers.{n}.mlp.experts.3.up_proj.weight", "multi-token prediction"),
        ("minimax-m2", "model.layers.{n}.self_attn.q_proj.weight", "multi-token prediction"),
        ("qwen3-next", "mtp.layers.0.self_attn.q_proj.weight", "multi-token prediction"),
        ("qwen3-5", "mtp.fc.weight", "multi-token prediction"),
        ("qwen3-tied", "lm_head.weight", "tied to the embedding"),
        ("llama-llama3", "model.layers.0.self_attn.rotary_emb.inv_freq", "rotary buffers"),
    ],
)
def test_what_a_forward_does_not_need_is_skipped_and_nothing_else(
    tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, family: str, extra: str, reason: str
) -> None:
    raw, tensors = _write_family(tmp_path, family, rng)
    write_json(tmp_path / "config.json", raw | {"num_nextn_predict_layers": 1, "num_mtp_modules": 1})
    extra = extra.format(n=raw["num_hidden_layers"])
    one = np.zeros(1, np.float32)
    write_tensors(tmp_path / "model.safetensors", tensors | {extra: one})
    with caplog.at_level(logging.DEBUG):
        load_target(tmp_path, dtype="bfloat16")
    assert re.search(rf"not loaded: 1 \([^)]*{reason}", caplog.text)
    stray = f"model.layers.{raw['num_hidden_layers'] + 1}.eh_proj.weight"
    write_tensors(tmp_path / "model.safetensors", tensors | {extra: one, stray: one})
    with pytest.raises(CheckpointError, match=f"{re.escape(stray)} is not part of this architecture"):
        load_target(tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("count", [0, 2])
def test_as_many_layers_of_multi_token_prediction_are_skipped_as_there_are(
    tmp_path: Path, rng: np.random.Generator, count: int
) -> None:
    raw, tensors = _write_family(tmp_path, "deepseek-v3", rng)
    write_json(tmp_path / "config.json", raw | {"num_nextn_predict_layers": count})
    further = [f"model.layers.{raw['num_hidden_layers'] + i}.eh_proj.weight" for i in range(3)]
    write_tensors(tmp_path / "model.safetensors", tensors | dict.fromkeys(further, np.zeros(1, np.float32)))
    with pytest.raises(CheckpointError, match="not part of this architecture") as error:
        load_target(tmp_path, dtype="bfloat16")
    assert [name in str(error.value) for name in further] == [i >= count for i in range(3)]


@pytest.mark.parametrize("is_turned", [False, True], ids=["inputs first", "outputs first"])
@pytest.mark.parametrize("family", ["qwen3-vl-moe", "qwen3-5-moe"])
def test_experts_in_one_tensor_are_those_one_by_one(
    tmp_path: Path, rng: np.random.Generator, family: str, is_turned: bool
) -> None:
    """Publishers and transformers write both orders."""
    raw, tensors = _write_family(tmp_path, family, rng)
    alone = load_target(tmp_path, dtype="bfloat16")
    experts = [f"experts.{e}." for e in range(raw["num_experts"])]
    for first in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
        prefix = first.removesuffix("experts.0.gate_proj.weight")
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}{expert}{part}_proj.weight") for expert in experts])
            for part in ("gate", "up", "down")
        )
        for name, value in (("gate_up", np.concatenate([gate, up], axis=1)), ("down", down)):
            stored = value if is_turned else value.swapaxes(1, 2)
            tensors[f"{prefix}experts.{name}_proj"] = np.ascontiguousarray(stored)
    write_tensors(tmp_path / "model.safetensors", tensors)
    stacked = load_target(tmp_path, dtype="bfloat16")
    for one, other in zip(jax.tree.leaves(alone.params), jax.tree.leaves(stacked.params), strict=True):
        _assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("family", "model_type", "own", "theirs", "vision"),
    [
        ("gemma3", "gemma3", "", "language_model.", "vision_tower.encoder.weight"),
        ("gemma3", "gemma3", "model.", "model.language_model.", "vision_tower.encoder.weight"),
        ("gemma4", "gemma4", "model.", "model.language_model.", "model.embed_audio.embedding_projection.weight"),
        (
            "gemma4-unified-untied",
            "gemma4_unified",
            "model.",
            "model.language_model.",
            "model.vision_embedder.norm",
        ),
        ("kimi-k2", "kimi_k25", "", "language_model.", "mm_projector.proj.0.weight"),
        ("mistral", "mistral3", "", "language_model.", "multi_modal_projector.linear_1.weight"),
        ("qwen3-vl-tied", "qwen3_vl", "model.", "model.language_model.", "model.visual.pos_embed.weight"),
        ("qwen2-5-vl", "qwen2_5_vl", "model.", "model.", "visual.merger.ln_q.weight"),
    ],
)
def test_the_text_model_of_a_multimodal_one_is_loaded(
    tmp_path: Path,
    rng: np.random.Generator,
    caplog: pytest.LogCaptureFixture,
    family: str,
    model_type: str,
    own: str,
    theirs: str,
    vision: str,
) -> None:
    raw, tensors = _write_family(tmp_path, family, rng)
    alone = load_target(tmp_path, dtype="bfloat16")
    wrapped = {re.sub(f"^{own}", theirs, name): value for name, value in tensors.items()}
    wrapped[vision] = np.zeros(1, np.float32)
    write_tensors(tmp_path / "model.safetensors", wrapped)
    write_json(tmp_path / "config.json", {"model_type": model_type, "text_config": raw})
    with caplog.at_level(logging.INFO):
        within = load_target(tmp_path, dtype="bfloat16")
    assert "1 (of a model that also sees or hears" in caplog.text
    for one, other in zip(jax.tree.leaves(alone.params), jax.tree.leaves(within.params), strict=True):
        _assert_same_bits(one, other)


def test_keys_that_no_layer_reads_are_left_out(
    tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """The last layers of Gemma 4 E2B see those of earlier ones, and its checkpoint has some for them all the same."""
    _, tensors = _write_family(tmp_path, "gemma4", rng)
    unread = {f"model.layers.3.self_attn.{name}.weight": np.zeros(1, np.float32) for name in ("k_proj", "v_norm")}
    write_tensors(tmp_path / "model.safetensors", tensors | unread)
    with caplog.at_level(logging.INFO):
        load_target(tmp_path, dtype="float32")
    assert "2 (keys and values of layers that see those of others)" in caplog.text
    write_tensors(tmp_path / "model.safetensors", tensors | {"model.layers.2.self_attn.v_norm.weight": np.zeros(1)})
    with pytest.raises(CheckpointError, match="v_norm"):
        load_target(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, r"has shape \(64, 32\), config.json says \(64, 64\).*config of another model\?"),
        ({"num_hidden_layers": 5}, r"model\.layers\.5\.\S* is not part of this architecture"),
        ({"num_hidden_layers": 7}, r"model\.layers\.6\.\S* is missing"),
        ({"vocab_size": 128}, r"model.embed_tokens.weight has shape \(64, 32\), config.json says \(128, 32\)"),
        ({"model_type": "llama"}, r"q_norm.weight is not part of this architecture"),
        ({}, r"model\.norm\.bias is not part of this architecture"),
    ],
)
def test_the_config_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    tiny.write_target(tmp_path, tiny.TARGET, seed=0)
    write_json(tmp_path / "config.json", tiny.TARGET | changes)
    if not changes:  # a norm with a bias, and be it of zeros, is no RMS norm
        stored = TensorFolder(tmp_path)
        tensors = {name: stored.read(name) for name in stored.names()}
        tensors["model.norm.bias"] = np.zeros_like(tensors["model.norm.weight"])
        write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=words) as error:
        load_target(tmp_path, dtype="float32")
    assert len(str(error.value)) < 2000


def test_every_end_of_text_is_known(tmp_path: Path) -> None:
    tiny.write_target(tmp_path, tiny.TARGET, seed=0)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [7, 2, 9, tiny.TARGET["vocab_size"]]})
    assert load_target(tmp_path, dtype="float32").eos_ids == (7, 2, 9), "the model never emits the last"


PUBLISHED = {  # by DeepSeek, of what transformers saves
    r"^model\.": "",
    r"^embed_tokens": "embed",
    r"^hc_head\.hc_": "hc_head_",
    r"(?<=attn)\.norm\.": ".kv_norm.",
}


def _published(folder: Path, rng: np.random.Generator) -> tuple[Tensors, Tensors]:
    """The tensors of a DeepSeek-V4 as its publisher keeps them, by its own names, and as floats by transformers'."""
    read = TensorFolder(folder)
    floats: Tensors = {}
    theirs: Tensors = {  # copies, in the base model
        "mtp.0.emb.tok_emb.weight": read.read("model.embed_tokens.weight"),
        "mtp.0.head.weight": read.read("head.weight"),
    }
    for name in read.names():
        other, value = name, read.read(name)
        for pattern, by in PUBLISHED.items():
            other = re.sub(pattern, by, other)
        theirs[other] = floats[name] = value
        if not re.search(r"(attn\.w|\.w[123]|[eh]_proj|indexer\.wq_b)", name):
            continue
        scale_name, (rows, inputs) = other.removesuffix("weight") + "scale", value.shape
        size = (1, 32) if ".experts." in name else (16, 16)
        grid = rng.integers(-4, 1, (-(-rows // size[0]), -(-inputs // size[1]))).astype(np.float32)
        scale = np.exp2(grid).astype(ml_dtypes.float8_e8m0fnu)
        if ".experts." in name:
            codes = rng.integers(0, 16, value.shape)
            theirs[other] = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
            numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * np.where(codes < 8, 1, -1)
        else:
            theirs[other] = numbers = value.astype(ml_dtypes.float8_e4m3fn)
        theirs[scale_name] = scale
        of_each = np.repeat(np.repeat(np.exp2(grid), size[0], 0), size[1], 1)[:rows, :inputs]
        floats[name] = (numbers.astype(np.float32) * of_each).astype(np.float32)
    return theirs, floats


@pytest.mark.parametrize("quantization", ["none", "stored"])
def test_deepseek_v4_is_read_as_it_is_published(
    tmp_path: Path, rng: np.random.Generator, quantization: Quantization
) -> None:
    """Under its own names, in FP8 and experts in FP4, both with powers of two as scales; its carried layer too."""
    raw = carried.COMPRESSED | {"moe_intermediate_size": 64, "num_hidden_layers": 3}
    raw["layer_types"], raw["mlp_layer_types"] = ["compressed_sparse_attention", *raw["layer_types"]], None
    folders = [tmp_path / name for name in ("made", "theirs", "floats")]
    carried.write(folders[0], raw, seed=0)
    stated = {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}
    for folder, tensors in zip(folders[1:], _published(folders[0], rng), strict=True):
        folder.mkdir()
        write_json(folder / "config.json", raw | ({"quantization_config": stated} if folder is folders[1] else {}))
        write_tensors(folder / "model.safetensors", tensors)
    names = TensorFolder(folders[1]).names()
    assert names > {"mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"}
    assert names > {"embed.weight", "norm.weight", "head.weight", "hc_head_fn", "layers.0.attn.kv_norm.weight"}
    assert names > {"layers.0.attn.indexer.compressor.norm.weight", "mtp.0.attn.kv_norm.weight", "mtp.0.hc_head_scale"}
    found = []

    def is_quantized(leaf: Any) -> bool:
        return isinstance(leaf, QuantizedMatrix)

    for folder in folders[1:]:
        target = load_target(folder, dtype="float32", quantization=quantization)
        found.append((target.params, load_head(folder, target, dtype="float32", kind=CARRIED).params))
    assert any(map(is_quantized, jax.tree.leaves(found[0], is_leaf=is_quantized))) == (quantization == "stored")
    read = jax.tree.leaves(found[0], is_leaf=is_quantized)
    for one, other in zip(read, jax.tree.leaves(found[1]), strict=True):
        plain = dequantize(one, jnp.dtype("float32")) if is_quantized(one) else one
        np.testing.assert_array_equal(plain, other)
