"""Adapters of PEFT: its pairs and scales as PEFT computes them, merged into whatever form a model is served in, and
what is no pair of LoRA refused by name.

Weights and pairs are numbers of few bits, so their sums are exact in float32 in any order."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from spread import mesh_of

from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.lora import LoraPair, lora_pairs
from specserve.checkpoints.tensors import TensorFolder, write_json, write_tensors
from specserve.checkpoints.update import other_target
from specserve.errors import CheckpointError, ConfigError

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": ["q_proj"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "fused": {"model_type": "phi3", "pad_token_id": 0},  # q, k and v in one matrix, gate and up in another
    "experts": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def _served(folder: Path, family: str, stored: Any = np.float32, **how: Any) -> Target:
    folder.mkdir()
    tiny.write_target(folder, tiny.TARGET | {"num_hidden_layers": 2} | FAMILIES[family], seed=3)
    tensors = TensorFolder(folder)
    exact = {name: tiny.few_bits(tensors.read(name), 4).astype(stored) for name in tensors.names()}
    write_tensors(folder / "model.safetensors", exact)
    return load_target(folder, is_served=True, is_arranged=True, **how)


def _arrays(tensors: TensorFolder, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A pair for each matrix of the layers, by PEFT's names. Of experts the third has a smaller rank, and the second no
    pair for one of its matrices."""
    found = {}
    for name in sorted(name for name in tensors.names() if ".layers." in name and len(tensors.shape(name)) == 2):
        if name.endswith("experts.1.up_proj.weight"):
            continue
        num_out, num_in = tensors.shape(name)
        rank = 2 if ".experts.2." in name else 4
        module = f"base_model.model.{name.removesuffix('.weight')}"
        found[f"{module}.lora_A.weight"] = rng.integers(-3, 4, (rank, num_in)).astype(np.float32)
        found[f"{module}.lora_B.weight"] = rng.integers(-3, 4, (num_out, rank)).astype(np.float32) / 4
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["float32", "bfloat16", "int8", "bfloat16 over a mesh"])
def test_pairs_are_an_update_with_the_merged_weights(
    family: str, how: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """To the last bit, where sums are exact: from a folder and from pairs in memory, of JAX or NumPy, whatever version
    came before. What is stored in 16 bits is rounded once too, when the sum is made."""
    quantization: Any = "int8" if how == "int8" else "none"
    dtype, _, is_spread = how.partition(" ")
    mesh = mesh_of("data=2,tensor=4") if is_spread else None
    stored = ml_dtypes.bfloat16 if is_spread else np.float32
    dtype = "float32" if dtype == "int8" else dtype
    served = _served(tmp_path / "model", family, stored, dtype=dtype, quantization=quantization, mesh=mesh)
    tensors = TensorFolder(served.folder)
    arrays = _arrays(tensors, rng)
    assert len(arrays) > 2 * 2 * 3
    whole = {name: tensors.read(name).astype(np.float32) for name in tensors.names()}
    for key in arrays:
        if ".lora_A." in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            scale = np.float32(6 / len(arrays[key]))
            whole[name] = whole[name] + scale * (arrays[key.replace("_A", "_B")] @ arrays[key])
    config = CONFIG | {"rank_pattern": {r"experts\.2\.\w+": 2}}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_json(adapter / "adapter_config.json", config)
    write_tensors(adapter / "adapter_model.safetensors", arrays)
    here = {name: jax.numpy.asarray(each) for name, each in arrays.items()}
    if mesh:  # a trainer has its own, over which its arrays are cut
        trainers = NamedSharding(jax.make_mesh((4,), ("x",), devices=jax.devices()[4:]), PartitionSpec("x"))
        here = {name: jax.device_put(each, trainers) if len(each) % 4 == 0 else each for name, each in here.items()}
    pairs = lora_pairs(here, config)
    expected = other_target(served, whole, quantization=quantization, mesh=mesh)
    moved = other_target(expected, whole, quantization=quantization, mesh=mesh)
    for given in (adapter, str(adapter), pairs):
        found = other_target(moved, given, quantization=quantization, mesh=mesh)
        jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
        places = ([leaf.sharding for leaf in jax.tree.leaves(of.params)] for of in (found, served))
        assert [*next(places)] == [*next(places)]
    assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, expected.params.layers, served.params.layers)))


def test_scales_are_those_of_peft(rng: np.random.Generator) -> None:
    """By PEFT's rule of patterns: the first whose end of a module's name fits, in the order that they stand in."""

    def pair(module: str, rank: int) -> dict[str, np.ndarray]:
        sides = {"A": rng.normal(size=(rank, 8)), "B": rng.normal(size=(6, rank))}
        return {f"base_model.model.{module}.lora_{side}.default.weight": each for side, each in sides.items()}

    modules = {f"model.layers.{i}.self_attn.{name}_proj": (i, name) for i in (1, 11) for name in "qkv"}
    config = {
        **CONFIG,
        "rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.\w_proj": 8},
        "alpha_pattern": {"v_proj": 5, "1.self_attn.v_proj": 7},
    }
    ranks = {module: 2 if name == "k" else 8 if i == 1 else 4 for module, (i, name) in modules.items()}
    arrays = {k: v for module, rank in ranks.items() for k, v in pair(module, rank).items()}
    for use_rslora in (False, True):
        found = lora_pairs(arrays, {**config, "use_rslora": use_rslora})
        for module, (_, name) in modules.items():
            alpha, rank = 5 if name == "v" else 6, ranks[module]
            own = found[f"{module}.weight"]
            assert own.scale == alpha / (math.sqrt(rank) if use_rslora else rank)
            assert own.a is arrays[f"base_model.model.{module}.lora_A.default.weight"]
    of_seeing = lora_pairs(pair("model.language_model.layers.0.mlp.up_proj", 4), CONFIG)
    assert list(of_seeing) == ["model.layers.0.mlp.up_proj.weight"]


Q = "base_model.model.model.layers.0.self_attn.q_proj"
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # settings, arrays in place of q_proj's, the words
    "dora": ({"use_dora": True}, {}, "use_dora is True; only pairs"),
    "saved whole": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save is"),
    "biases": ({"bias": "lora_only"}, {}, "bias is 'lora_only'"),
    "bias of B": ({"lora_bias": True}, {}, "lora_bias is True"),
    "fused experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, {}, "target_parameters is"),
    "turned": ({"fan_in_fan_out": True}, {}, "fan_in_fan_out is True"),
    "unknown": ({"use_novelty": True}, {}, "use_novelty is True"),
    "other kind": ({"peft_type": "IA3"}, {}, "peft_type is 'IA3', expected 'LORA'"),
    "begun otherwise": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights is 'pissa', which changes the model's"),
    "no alpha": ({"lora_alpha": None}, {}, "lora_alpha is None, expected a number above 0"),
    "no rank": ({"r": 0}, {}, "r is 0"),
    "pattern": ({"rank_pattern": {"q_proj(": 3}}, {}, "rank_pattern is .* expected module patterns"),
    "pattern's number": ({"alpha_pattern": {"q_proj": "3"}}, {}, "alpha_pattern is"),
    "rank": ({"r": 3}, {}, r"self_attn.q_proj: lora_A is \(4, 32\) and lora_B \(32, 4\), expected rank 3"),
    "half": ({}, {f"{Q}.lora_B.weight": None}, "q_proj: lora_A is .* lora_B missing"),
    "embedding": ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones(3)}, "lora_embedding_A is no"),
    "magnitude": ({}, {f"{Q}.lora_magnitude_vector": np.ones(32)}, "lora_magnitude_vector is no lora_A or lora_B"),
    "two adapters": ({}, {f"{Q}.lora_A.other.weight": np.ones((4, 32))}, "lora_A of .*q_proj is there twice"),
    "shape": (
        {},
        {f"{Q}.lora_A.weight": np.ones((4, 31))},
        r"q_proj.weight is \(32, 32\), and its pair is B .* A \(4, 31",
    ),
    "no such matrix": ({}, {f"{Q}s.lora_A.weight": np.ones((4, 3)), f"{Q}s.lora_B.weight": np.ones((3, 4))}, "q_projs"),
    "not a number": ({}, {f"{Q}.lora_B.weight": np.full((32, 4), np.nan)}, "infinite: model.layers.0.self_attn.q_proj"),
    "nothing": ({}, {f"{Q}.lora_A.weight": None, f"{Q}.lora_B.weight": None}, "there are no LoRA pairs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_pair_of_lora_is_refused_by_name(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    settings, changed, words = WRONG[case]
    served = _served(tmp_path / "model", "dense", dtype="float32")
    arrays = {
        name: each for name, each in _arrays(TensorFolder(served.folder), rng).items() if name.startswith(f"{Q}.")
    }
    arrays |= changed
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG | settings))
    write_tensors(adapter / "adapter_model.safetensors", {k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(CheckpointError, match=words):
        other_target(served, adapter, quantization="none", mesh=None)


def test_an_adapter_is_never_a_pickle_and_never_merged_into_few_bits(tmp_path: Path) -> None:
    served = _served(tmp_path / "model", "dense", dtype="float32")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors; .* a pickle is never read"):
        other_target(served, tmp_path, quantization="none", mesh=None)
    pairs = {"model.layers.0.self_attn.q_proj.weight": LoraPair(np.ones((4, 32)), np.ones((32, 4)), 1.0)}
    with pytest.raises(ConfigError, match="as its files store it"):
        other_target(served, pairs, quantization="stored", mesh=None)


def test_a_pair_of_a_head_that_is_the_embedding_is_refused_and_a_whole_model_is_no_adapter(tmp_path: Path) -> None:
    served = _served(tmp_path / "model", "dense", dtype="float32")
    (tmp_path / "tied").mkdir()
    tiny.write_target(tmp_path / "tied", tiny.TARGET | {"tie_word_embeddings": True}, seed=3)
    tied = load_target(tmp_path / "tied", dtype="float32")
    pairs = {"lm_head.weight": LoraPair(np.ones((4, 32)), np.ones((64, 4)), 1.0)}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not used by this model"):
        other_target(tied, pairs, quantization="none", mesh=None)
    (served.folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    other_target(served, served.folder, quantization="none", mesh=None)
