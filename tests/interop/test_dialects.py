"""Heads for other engines and from them: what is written reads back bit for bit, and says what each engine reads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import tiny
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from same_head import assert_same_head

from specserve.checkpoints.load import Target
from specserve.drafters.eagle3.config import default_taps
from specserve.drafters.layers import windowed
from specserve.errors import CheckpointError
from specserve.interop import published
from specserve.interop.convert import describe_target, export_head, import_head
from specserve.interop.eagle3 import dialects
from specserve.interop.format import Dialect
from specserve.interop.head import load_head, save_head
from specserve.interop.notes import read_notes

Tensors = dict[str, np.ndarray]
ODD = {"aux_layers": (0, 2, 4), "norm_output": True, "fc_norm": True, "norm_before_fc": True}


@pytest.fixture(scope="module")
def described(tiny_target: Target) -> Target:
    return describe_target(tiny_target.folder)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "bfloat16"),
        ({"has_embedding": True, "norm_before_residual": True}, "float32"),
        (ODD, "bfloat16"),
        ({"draft_vocab_size": 64, "aux_layers": (1, 4)}, "float16"),
        ({"num_layers": 3, "qk_norm": "head", "layers": windowed((0, 9, 9))}, "bfloat16"),
        ({"num_layers": 2, "d_model": 24, "has_embedding": True, "fc_norm": True}, "float32"),
    ],
)
@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_export_then_import_changes_no_bit(
    tmp_path: Path, described: Target, dialect: Dialect, changes: dict[str, object], dtype: str
) -> None:
    head = tiny.random_head(described.config, seed=3, dtype=dtype, **changes)
    save_head(tmp_path / "ours", head, described, dtype=dtype, notes={"target": "tiny", "steps": 7})
    export_head(tmp_path / "ours", tmp_path / "theirs", described, target_name="tiny", dialect=dialect)
    import_head(tmp_path / "theirs", tmp_path / "back", described, target_name="tiny")
    assert_same_head(head, load_head(tmp_path / "back", described, dtype=dtype))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    assert read_notes(tmp_path / "back")["steps"] == 7


def _exported(tmp_path: Path, target: Target, dialect: Dialect, **changes: object) -> tuple[dict, Tensors]:
    head = tiny.random_head(target.config, seed=3, dtype="bfloat16", **changes)
    save_head(tmp_path / "ours", head, target, dtype="bfloat16", notes={})
    export_head(tmp_path / "ours", tmp_path / "theirs", target, target_name="org/tiny", dialect=dialect)
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    return raw, load_file(tmp_path / "theirs" / "model.safetensors")


@pytest.mark.parametrize("dialect", get_args(Dialect))
@pytest.mark.parametrize("taps", [(1, 2, 2), (0, 2, 4)], ids=["default", "chosen"])
def test_each_flavour_says_what_its_engine_reads(
    tmp_path: Path, described: Target, dialect: Dialect, taps: tuple[int, ...]
) -> None:
    """The facts, engine by engine: names of tensors, where the taps stand and how they are counted, which flags."""
    raw, tensors = _exported(tmp_path, described, dialect, aux_layers=taps)
    is_default = taps == default_taps(described.config)
    inputs = [i + 1 for i in taps]
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(taps)}
    layer = "midlayer." if dialect in ("sglang", "sglang-jax") else "layers.0."
    assert f"{layer}self_attn.q_proj.weight" in tensors
    assert {name.split(".")[0] for name in tensors} - {"embed_tokens"} == {
        layer.split(".")[0], "fc", "norm", "lm_head", "d2t", "t2d"
    }  # fmt: skip
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, bool)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), tensors["d2t"] + np.arange(48))
    assert raw["tie_word_embeddings"] is False
    assert raw["draft_vocab_size"] == 48
    if dialect == "speculators":
        assert raw["architectures"] == ["Eagle3DraftModel"]
        assert raw["speculators_model_type"] == "eagle3"
        assert all(raw[flag] is False for flag in dialects.FLAGS), "their defaults are not plain EAGLE-3"
        assert raw["eagle_aux_hidden_state_layer_ids"] == inputs
        assert raw["transformer_layer_config"]["vocab_size"] == 64
        assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
        assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
        target = load_file(described.folder / "model.safetensors")["model.embed_tokens.weight"]
        np.testing.assert_array_equal(tensors["embed_tokens.weight"], target.astype(tensors["fc.weight"].dtype))
    else:
        assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
        assert "embed_tokens.weight" not in tensors, "the target's is shared"
        assert raw.get("eagle_config") == (None if is_default or dialect == "vllm" else eagle)
        assert raw.get("eagle_aux_hidden_state_layer_ids") == (inputs if dialect == "vllm" and not is_default else None)


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_further_layers_have_the_norm_that_each_engine_looks_for(
    tmp_path: Path, described: Target, dialect: Dialect
) -> None:
    """Under the other name it would be left out, or left at ones, without a word."""
    raw, tensors = _exported(tmp_path, described, dialect, num_layers=3)
    norm = "hidden_norm" if dialect in ("sglang", "sglang-jax") else "input_layernorm"
    for i in (1, 2):
        found = {name.split(".")[2] for name in tensors if name.startswith(f"layers.{i}.")}
        assert found == {norm, "self_attn", "post_attention_layernorm", "mlp"}
        assert tensors[f"layers.{i}.self_attn.q_proj.weight"].shape == (32, 32)
    assert raw.get("transformer_layer_config", raw)["num_hidden_layers"] == 3


def _renamed(rename: Callable[[str], str]) -> Callable[[dict, Tensors], Tensors]:
    return lambda raw, tensors: {rename(name): value for name, value in tensors.items()}


def _as_older_trainers_wrote_it(raw: dict, tensors: Tensors) -> Tensors:
    """Absolute ids in int32, no t2d, fewer keys, another engine's name for the architecture."""
    for key in ("rope_parameters", "target_hidden_size", "torch_dtype", "bos_token_id", "head_dim"):
        raw.pop(key)
    raw |= {"architectures": ["LlamaForCausalLM"], "truncated_vocab_size": raw.pop("draft_vocab_size")}
    tensors["d2t"] = (tensors["d2t"] + np.arange(48)).astype(np.int32)
    del tensors["t2d"]
    return tensors


def _with_buffers(raw: dict, tensors: Tensors) -> Tensors:
    return tensors | {"midlayer.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}


def _without_d2t(raw: dict, tensors: Tensors) -> Tensors:
    del tensors["d2t"]
    return tensors


@pytest.mark.parametrize(
    "disguise",
    [
        _renamed(lambda name: f"model.{name}"),
        _renamed(lambda name: name if name in ("lm_head.weight", "t2d") else f"model.{name}"),
        _renamed(lambda name: {"d2t": "draft_id_to_target_id"}.get(name, name.replace("midlayer.", "layers.0."))),
        _renamed(lambda name: name.replace("midlayer.", "layers.0.")),  # SGLang's norm beside vLLM's first layer
        _renamed(lambda name: name.replace("layers.1.hidden_norm", "layers.1.input_layernorm")),
        _as_older_trainers_wrote_it,
        _with_buffers,
        _without_d2t,
    ],
)
def test_heads_are_read_as_they_were_published(
    tmp_path: Path, described: Target, disguise: Callable[[dict, Tensors], Tensors]
) -> None:
    head = tiny.random_head(described.config, seed=3, dtype="float16", num_layers=2)
    save_head(tmp_path / "head", head, described, dtype="float16", notes={})
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    tensors = disguise(raw, load_file(tmp_path / "head" / "model.safetensors"))
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "config.json").write_text(json.dumps(raw))
    import_head(tmp_path / "head", tmp_path / "back", described, target_name="tiny")
    assert_same_head(head, load_head(tmp_path / "back", described, dtype="float16"))


def test_what_cannot_be_repaired_is_refused_and_leaves_nothing(tmp_path: Path, described: Target) -> None:
    head = tiny.random_head(described.config, seed=3)
    save_head(tmp_path / "head", head, described, dtype="float32", notes={})
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"] * np.nan}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.weight: values that are no numbers"):
        import_head(tmp_path / "head", tmp_path / "back", described, target_name="tiny")
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


def test_nothing_is_overwritten_unasked(tmp_path: Path, described: Target) -> None:
    head, output = tiny.random_head(described.config, seed=3), tmp_path / "theirs"
    save_head(tmp_path / "ours", head, described, dtype="float32", notes={})
    output.mkdir()
    export_head(tmp_path / "ours", output, described, target_name="tiny", dialect="vllm")  # an empty folder is free
    (output / "README.md").write_text("mine")
    before = (output / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="not empty"):
        export_head(tmp_path / "ours", output, described, target_name="tiny", dialect="sglang")
    assert (output / "model.safetensors").read_bytes() == before
    export_head(tmp_path / "ours", output, described, target_name="tiny", dialect="sglang", is_forced=True)
    assert_same_head(head, load_head(output, described, dtype="float32"))
    assert (output / "README.md").read_text() == "mine"
    with pytest.raises(CheckpointError, match="the folder that is read"):
        export_head(output, output, described, target_name="tiny", dialect="vllm", is_forced=True)
    assert {entry.name for entry in tmp_path.iterdir()} == {"ours", "theirs"}


def test_a_target_without_weights_does_for_all_but_the_embedding(tmp_path: Path, described: Target) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(described.folder / "config.json", tmp_path / "bare")
    bare = describe_target(tmp_path / "bare")
    save_head(tmp_path / "ours", tiny.random_head(bare.config, seed=3), bare, dtype="float32", notes={})
    export_head(tmp_path / "ours", tmp_path / "vllm", bare, target_name="tiny", dialect="vllm")
    with pytest.raises(CheckpointError, match="no token embedding"):
        export_head(tmp_path / "ours", tmp_path / "speculators", bare, target_name="tiny", dialect="speculators")


DTYPES = ("int64", "int32", "int16", "uint32", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "bool")


@given(st.sets(st.integers(0, 70_000), min_size=2, max_size=40).map(sorted), st.sampled_from(DTYPES), st.booleans())
@example([0, 2050], "float16", False)
@example([0, 258], "bfloat16", False)
@example([5, 2053], "float16", True)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_vocabulary_in_any_dtype_is_read_exactly_or_refused(ids: list[int], dtype: str, has_mask: bool) -> None:
    """A float dtype rounds whole numbers to others: what it may have rounded counts only where the mask agrees."""
    tables = published.vocab_to_tensors(np.array(ids), 70_001)
    stored, mask = tables["d2t"].astype(np.dtype(dtype)), tables["t2d"] if has_mask else None
    is_kept = np.array_equal(stored.astype(np.float64), tables["d2t"])
    try:
        found = published.vocab_from_tensors(stored, mask, len(ids), 70_001, "head")
    except CheckpointError:
        sure = {"float16": 2**11, "bfloat16": 2**8, "float8_e4m3fn": 2**4}.get(dtype, 2**53)
        assert dtype == "bool" or not is_kept or (not has_mask and tables["d2t"].max() >= sure)
        return
    np.testing.assert_array_equal(found, ids)
    assert published.read_vocab(stored, mask, len(ids), 70_001).target_ids is not None


@given(st.sets(st.integers(0, 99), min_size=2, max_size=60).map(sorted), st.booleans(), st.booleans(), st.randoms())
def test_a_vocabulary_is_read_right_however_it_was_stored(
    ids: list[int], is_absolute: bool, is_shuffled: bool, random
) -> None:
    """With the mask there is never a doubt: offsets or ids, in order or not."""
    random.shuffle(ids) if is_shuffled else None
    target_ids = np.array(ids)
    tables = published.vocab_to_tensors(target_ids, 100)
    stored = target_ids if is_absolute else tables["d2t"]
    found = published.read_vocab(stored, tables["t2d"], len(ids), 100)
    assert found.agrees
    assert found.target_ids is not None
    # a table that both readings explain, mask included, names the same tokens either way
    np.testing.assert_array_equal(np.sort(found.target_ids), np.sort(target_ids))
    if not is_shuffled:
        np.testing.assert_array_equal(found.target_ids, target_ids)
