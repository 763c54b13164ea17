"""Layers of multi-token prediction on disk: read out of a target's checkpoint in the names of every family that has
one, and written back in those bit for bit; alone in a folder; as speculators has them; and what is refused, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import carried
import jax
import ml_dtypes
import numpy as np
import pytest
import tiny

from specserve.checkpoints.load import load_target
from specserve.checkpoints.tensors import TensorFolder, read_json, write_json, write_tensors
from specserve.drafters.interface import Head
from specserve.drafters.mtp.drafter import Mtp
from specserve.drafters.registry import CARRIED, DraftSettings, load_kind
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.convert import describe_target, export_head, import_head
from specserve.interop.doctor import examine
from specserve.interop.format import Dialect
from specserve.interop.formats import format_for
from specserve.interop.head import head_files, load_head, read_drafter, save_head
from specserve.serve.launch import load_models

Tensors = dict[str, np.ndarray]

GOLDENS = Path(__file__).parent.parent / "goldens"
MIXTURES = ("model.hyper_connection_mixer", "mtp.hyper_connection_mixer")
LITE, LING_3 = (
    read_json(GOLDENS / name / "config.json") | {"num_nextn_predict_layers": 1, "num_hidden_layers": 4}
    for name in ("glm4-moe-lite", "ling-3")
)
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # and some names of each
    "deepseek_v3": (
        carried.LATENT,
        (
            "model.layers.3.enorm.weight",
            "model.layers.3.hnorm.weight",
            "model.layers.3.eh_proj.weight",
            "model.layers.3.shared_head.norm.weight",
            "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
            "model.layers.3.mlp.experts.7.down_proj.weight",
            "model.layers.3.mlp.gate.e_score_correction_bias",
        ),
    ),
    "deepseek_v32": (
        carried.INDEXED,
        ("model.layers.3.eh_proj.weight", "model.layers.3.self_attn.indexer.weights_proj.weight"),
    ),
    "glm5_next": (
        carried.POOLS,
        ("model.layers.2.eh_proj.weight", "model.layers.2.self_attn.indexer.index_kpool_compress_gate"),
    ),
    "deepseek_v4": (
        carried.COMPRESSED,
        ("mtp.0.e_proj.weight", "mtp.0.attn.kv_norm.weight", "mtp.0.hc_head_fn", "mtp.0.ffn.experts.7.w2.weight"),
    ),
    "qwen4_exp_text": (
        carried.STREAMS,
        (
            "mtp.fc_hidden.weight",
            "mtp.hyper_connection_mixer.hc_norm.weight",
            "mtp.layers.0.self_attn.indexer.index_qk_proj.weight",
        ),
    ),
    "glm4_moe": (
        carried.GLM,
        ("model.layers.3.eh_proj.weight", "model.layers.3.self_attn.q_proj.bias"),
    ),
    "qwen3_next": (
        carried.NEXT,
        (
            "mtp.fc.weight",
            "mtp.norm.weight",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.layers.0.self_attn.q_proj.weight",
            "mtp.layers.0.mlp.shared_expert_gate.weight",
        ),
    ),
    "qwen3_5_text": (carried.NEXT_DENSE, ("mtp.fc.weight", "mtp.layers.0.mlp.gate_proj.weight")),
    "qwen3_5_moe_text": (carried.NEXT_SPARSE, ("mtp.fc.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight")),
    "mimo": (
        carried.MIMO,
        (
            "model.mtp_layers.0.token_layernorm.weight",
            "model.mtp_layers.0.hidden_layernorm.weight",
            "model.mtp_layers.0.input_proj.weight",
            "model.mtp_layers.0.final_layernorm.weight",
            "model.mtp_layers.0.self_attn.q_proj.bias",
        ),
    ),
    "nemotron_h": (
        carried.NEMOTRON_H,
        (
            "mtp.layers.0.eh_proj.weight",
            "mtp.layers.0.norm.weight",
            "mtp.layers.0.mixer.q_proj.weight",
            "mtp.layers.1.norm.weight",
            "mtp.layers.1.mixer.experts.3.up_proj.weight",
            "mtp.layers.1.mixer.fc2_latent_proj.weight",
            "mtp.layers.1.final_layernorm.weight",
        ),
    ),
    "mimo_v2_flash": (
        carried.MIMO_V2,
        tuple(
            f"model.mtp.layers.0.{name}"
            for name in (
                "eh_proj.weight",
                "pre_mlp_layernorm.weight",
                "mlp.up_proj.weight",
                "self_attn.attention_sink_bias",
            )
        ),
    ),
    "glm4_moe_lite": (
        LITE,
        tuple(f"model.layers.{LITE['num_hidden_layers']}.{name}.weight" for name in ("eh_proj", "self_attn.kv_b_proj")),
    ),
    "ling": (
        carried.LING,
        ("model.layers.3.final_layernorm.weight", "model.layers.3.attention.query_key_value.weight"),
    ),
    "ling-2.5": (
        carried.LING_2_5,
        ("model.layers.4.final_layernorm.weight", "model.layers.4.attention.kv_b_proj.weight"),
    ),
    "ling-3": (
        LING_3,
        (f"model.layers.{LING_3['num_hidden_layers']}.final_layernorm.weight",),
    ),
    "qwen3": (carried.SMALL, ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate_proj.weight")),
}


def _assert_same(head: Head, other: Head) -> None:
    assert head.drafter == other.drafter
    assert jax.tree.structure(head.params) == jax.tree.structure(other.params)
    for leaf, same in zip(jax.tree.leaves(head.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(leaf, same)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_checkpoint_carries_is_written_back_in_its_own_names(family: str, tmp_path: Path) -> None:
    raw, some = FAMILIES[family]
    target, head = carried.models(tmp_path, raw)
    stored = TensorFolder(tmp_path)
    tensors, own = head_files(head, target, dtype="float32")
    assert tensors.keys() > set(some)
    assert tensors.keys() == {name for name in stored.names() if carried.is_of_the_layer(name, raw)}
    for name, value in tensors.items():
        np.testing.assert_array_equal(value, stored.read(name), err_msg=name)
    assert own["model_type"] == raw["model_type"]
    save_head(tmp_path / "own", head, target, dtype="float32", notes={})
    assert TensorFolder(tmp_path / "own").names() == tensors.keys()
    _assert_same(head, load_head(tmp_path / "own", target, dtype="float32"))
    assert read_drafter(tmp_path / "own", target.config, "it", dtype="float32") == head.drafter
    assert not examine(tmp_path / "own", target).findings
    assert not examine(tmp_path, target).findings


@pytest.mark.parametrize("is_stacked", [False, True], ids=["experts one by one", "experts in one tensor"])
def test_the_layer_beside_a_multimodal_target_is_the_same(tmp_path: Path, is_stacked: bool) -> None:
    """As checkpoints of Qwen3.5 are: the text model within, the layer outside, experts stacked in either or none."""
    target, head = carried.models(tmp_path, carried.NEXT_SPARSE)

    def wrap(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        for prefix in (
            "model.language_model.layers.0",
            "model.language_model.layers.1",
            *["mtp.layers.0"] * is_stacked,
        ):
            each = [f"{prefix}.mlp.experts.{e}." for e in range(4)]
            parts = {
                part: np.stack([tensors.pop(f"{e}{part}_proj.weight") for e in each]) for part in ("gate", "up", "down")
            }
            tensors[f"{prefix}.mlp.experts.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
            tensors[f"{prefix}.mlp.experts.down_proj"] = parts["down"]
        tensors["model.visual.patch_embed.proj.weight"] = np.zeros(1, np.float32)

    _edit(tmp_path, wrap)
    text = {key: value for key, value in carried.NEXT_SPARSE.items() if key != "tie_word_embeddings"}
    write_json(tmp_path / "config.json", {"model_type": "qwen3_5_moe", "text_config": text})
    within = load_target(tmp_path, dtype="float32")
    assert within.config == target.config
    for leaf, same in zip(jax.tree.leaves(within.params), jax.tree.leaves(target.params), strict=True):
        np.testing.assert_array_equal(leaf, same)
    _assert_same(head, load_head(tmp_path, within, dtype="float32", kind=CARRIED))
    assert not examine(tmp_path, within).findings
    save_head(tmp_path / "own", head, within, dtype="float32", notes={})
    _assert_same(head, load_head(tmp_path / "own", within, dtype="float32"))
    own = {"mtp_use_dedicated_embeddings": True}
    write_json(tmp_path / "config.json", {"model_type": "qwen3_5_moe", "text_config": text | own})
    with pytest.raises(CheckpointError, match="mtp_use_dedicated_embeddings is true"):
        load_head(tmp_path, within, dtype="float32", kind=CARRIED)


def test_layers_that_draft_blocks_are_no_layer_of_this_kind(tmp_path: Path) -> None:
    """As later releases of DeepSeek-V4 have them under the same names."""
    target, _ = carried.models(tmp_path, carried.COMPRESSED)
    write_json(tmp_path / "config.json", carried.COMPRESSED | {"dspark_block_size": 5})
    with pytest.raises(CheckpointError, match=r"dspark_block_size .* not read"):
        load_head(tmp_path, target, dtype="float32", kind=CARRIED)


def test_what_a_last_mixture_does_not_do_is_not_missed(tmp_path: Path) -> None:
    """Checkpoints of Qwen3.8-Flash-Next hold weights by which nothing is added to the streams again."""
    target, head = carried.models(tmp_path, carried.STREAMS)
    _edit(
        tmp_path,
        lambda tensors: tensors.update({f"{at}.block_inject_weight.weight": np.ones((2, 64)) for at in MIXTURES}),
    )
    load_target(tmp_path, dtype="float32")
    _assert_same(head, load_head(tmp_path, target, dtype="float32", kind=CARRIED))


def _edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    stored = TensorFolder(folder)
    tensors = {name: stored.read(name) for name in stored.names()}
    change(tensors)
    write_tensors(folder / "model.safetensors", tensors)


def test_tables_that_are_the_targets_are_shared_and_others_kept(tmp_path: Path, rng: np.random.Generator) -> None:
    target, shared = carried.models(tmp_path, carried.LATENT)
    embedding, head = "model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"

    def copy(tensors: Tensors) -> None:
        tensors[embedding], tensors[head] = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]

    _edit(tmp_path, copy)
    _assert_same(shared, load_head(tmp_path, target, dtype="float32"))
    other = rng.standard_normal((64, 32)).astype(np.float32)
    _edit(tmp_path, lambda tensors: tensors.update({head: other}))
    own = load_head(tmp_path, target, dtype="float32")
    assert isinstance(own.drafter, Mtp)
    assert (own.drafter.config.has_embedding, own.drafter.config.has_head) == (False, True)
    np.testing.assert_array_equal(own.params.head, other.T)
    tensors, raw = head_files(own, target, dtype="float32")
    np.testing.assert_array_equal(tensors[head], other)
    lm_head = TensorFolder(tmp_path).read("lm_head.weight")
    (tmp_path / "own").mkdir()
    write_tensors(tmp_path / "own" / "model.safetensors", tensors | {head: lm_head})
    write_json(tmp_path / "own" / "config.json", raw)
    imported = import_head(tmp_path / "own", tmp_path / "imported", target, target_name="it")
    assert len(imported.changes) == 1
    _assert_same(shared, load_head(tmp_path / "imported", target, dtype="float32"))


def test_a_layer_in_few_bits_is_what_its_scales_make_of_it(tmp_path: Path, rng: np.random.Generator) -> None:
    """As DeepSeek's checkpoints carry it, whether the target is served in what is stored or dequantised."""
    raw = carried.LATENT | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    _, plain = carried.models(tmp_path, carried.LATENT)
    write_json(tmp_path / "config.json", raw)
    expected: Tensors = {}

    def quantise(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.") and tensors[name].ndim == 2]:
            if name.endswith(("mlp.gate.weight", "eh_proj.weight")):  # they stay whole there
                continue
            values = rng.integers(-100, 100, tensors[name].shape).astype(ml_dtypes.float8_e4m3fn)
            grid = [-(-size // 16) for size in values.shape]
            scale = rng.uniform(0.001, 0.01, grid).astype(np.float32)
            each = np.repeat(np.repeat(scale, 16, axis=0), 16, axis=1)[: values.shape[0], : values.shape[1]]
            expected[name] = values.astype(np.float32) * each
            tensors[name], tensors[f"{name}_scale_inv"] = values, scale

    _edit(tmp_path, quantise)
    assert any("experts" in name for name in expected)
    for quantization in ("none", "stored"):
        models = load_models(str(tmp_path), CARRIED, has_tokenizer=False, quantization=quantization)
        assert models.head is not None
        stored = head_files(models.head, models.target, dtype="float32")[0]
        assert stored.keys() == head_files(plain, models.target, dtype="float32")[0].keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(stored[name], value, err_msg=name)
    assert not examine(tmp_path, models.target).findings


def test_a_layer_whose_first_product_is_packed_is_found(tmp_path: Path) -> None:
    """By the name of its words; those of zeros mean -1 times the scale."""
    carried.models(tmp_path, carried.SMALL)
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    write_json(tmp_path / "config.json", carried.SMALL | {"quantization_config": stated})
    scales, fc = np.arange(256, dtype=np.float16).reshape(8, 32), "model.layers.3.eh_proj"

    def pack(tensors: Tensors) -> None:
        del tensors[f"{fc}.weight"]
        words = {"qweight": np.zeros((8, 32), np.int32), "qzeros": np.zeros((8, 4), np.int32), "scales": scales}
        tensors |= {f"{fc}.{part}": value for part, value in words.items()}

    _edit(tmp_path, pack)
    models = load_models(str(tmp_path), CARRIED, has_tokenizer=False)
    assert models.head is not None
    found = head_files(models.head, models.target, dtype="float32")[0][f"{fc}.weight"]
    np.testing.assert_array_equal(found, -np.repeat(scales.T, 8, axis=1))


@pytest.mark.parametrize("raw", [carried.SMALL, carried.NEXT], ids=["qwen3", "qwen3_next"])
def test_speculators_layout_is_written_and_read(tmp_path: Path, raw: dict[str, Any]) -> None:
    target, head = carried.models(tmp_path, raw)
    described = describe_target(tmp_path)
    save_head(tmp_path / "own", head, target, dtype="float32", notes={})
    export_head(tmp_path / "own", tmp_path / "theirs", described, target_name="Qwen/Tiny", dialect="speculators")
    names = TensorFolder(tmp_path / "theirs").names()
    assert read_json(tmp_path / "theirs" / "config.json")["speculators_model_type"] == "mtp"
    experts = {name.removeprefix("mtp_layers.0.mlp.experts.") for name in names if ".experts." in name}
    assert experts == ({"gate_up_proj", "down_proj"} if raw is carried.NEXT else set())
    assert {f"mtp_layers.0.{name}.weight" for name in ("input_proj", "token_layernorm", "self_attn.q_proj")} < names
    assert all(name.startswith("mtp_layers.0.") for name in names)
    _assert_same(head, load_head(tmp_path / "theirs", target, dtype="float32"))
    assert examine(tmp_path / "theirs", target).dialect == "speculators"
    import_head(tmp_path / "theirs", tmp_path / "back", target, target_name="it")
    _assert_same(head, load_head(tmp_path / "back", target, dtype="float32"))
    target, head = carried.models(tmp_path / "moe", carried.LATENT)
    with pytest.raises(CheckpointError, match="no layer of multi-token prediction for deepseek_v3"):
        head_files(head, target, dtype="float32", dialect="speculators")


@pytest.mark.parametrize("raw", [carried.SMALL, carried.NEXT], ids=["qwen3", "qwen3_next"])
def test_a_layer_for_a_part_of_the_tokens_says_which(
    tmp_path: Path, rng: np.random.Generator, raw: dict[str, Any]
) -> None:
    """With d2t and t2d as an EAGLE-3 head has them, in either layout; wrong tables are found, and no other engine is
    said to read them."""
    target, _ = carried.models(tmp_path, raw)
    target_ids = np.sort(rng.choice(64, 24, replace=False)).astype(np.int32)
    drafter = load_kind("mtp").new(DraftSettings(), target.config, 24)
    head = Head(drafter, drafter.init_params(target, target_ids, 0), target_ids)
    np.testing.assert_array_equal(head.params.head, TensorFolder(tmp_path).read("lm_head.weight")[target_ids].T)
    save_head(tmp_path / "own", head, target, dtype="float32", notes={})
    dialects: tuple[Dialect, ...] = ("sglang", "speculators")
    for dialect in dialects:
        folder = tmp_path / dialect
        folder.mkdir()
        tensors, config = head_files(head, target, dtype="float32", dialect=dialect)
        write_tensors(folder / "model.safetensors", tensors)
        write_json(folder / "config.json", config)
        found = load_head(folder, target, dtype="float32")
        _assert_same(head, found)
        np.testing.assert_array_equal(found.target_ids, target_ids)
        assert not examine(folder, target).findings
        assert "a draft vocabulary of 24 tokens (d2t)" in format_for("mtp").unknown_to(dialect, found.drafter)
    imported = import_head(tmp_path / "own", tmp_path / "back", target, target_name="it")
    _assert_same(head, imported.head)
    _edit(tmp_path / "own", lambda tensors: tensors.update(d2t=target_ids.astype(np.int64)))
    assert [finding.code for finding in examine(tmp_path / "own", target).findings] == ["absolute-d2t"]
    with pytest.raises(CheckpointError, match="absolute ids instead of offsets"):
        load_head(tmp_path / "own", target, dtype="float32")
    write_json(tmp_path / "own" / "config.json", read_json(tmp_path / "own" / "config.json") | {"draft_vocab_size": 65})
    with pytest.raises(ConfigError, match="draft_vocab_size is 65; expected 1 to 64"):
        load_head(tmp_path / "own", target, dtype="float32")


def test_the_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    target, head = carried.models(tmp_path, carried.LATENT)
    save_head(tmp_path / "own", head, target, dtype="float32", notes={"target": "mine"})
    tiny.write_target(tmp_path, carried.LATENT | {"n_routed_experts": 4}, seed=0)
    other = load_target(tmp_path, dtype="float32")
    with pytest.raises(CheckpointError, match=r"experts.num_experts 8, not 4\); give its own \(--target\), mine"):
        load_head(tmp_path / "own", other, dtype="float32")
    with pytest.raises(CheckpointError, match=r"model.layers.3.eh_proj.weight is missing \(1 in its config.json"):
        load_models(str(tmp_path), CARRIED, has_tokenizer=False)
    recurrent = carried.NEXT | {"num_hidden_layers": 3}
    (tmp_path / "next").mkdir()
    tiny.write_target(tmp_path / "next", recurrent, seed=0)
    with pytest.raises(ConfigError, match=r"keeps a recurrent state \(delta\)"):
        load_models(str(tmp_path / "next"), CARRIED, has_tokenizer=False)


def _poison(tensors: Tensors) -> None:
    tensors["model.layers.3.enorm.weight"] = np.full(32, np.nan, np.float32)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda tensors: tensors.pop("model.layers.3.hnorm.weight"), "missing-tensor"),
        (lambda tensors: tensors.update({"model.layers.3.hnorm.weight": np.ones(31, np.float32)}), "shape"),
        (lambda tensors: tensors.update({"model.layers.3.extra": np.ones(1, np.float32)}), "unknown-tensor"),
        (_poison, "not-finite"),
        (lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"), "unreadable"),
    ],
)
def test_the_doctor_finds_what_is_wrong(tmp_path: Path, change: Callable[[Tensors], object], code: str) -> None:
    target, head = carried.models(tmp_path, carried.SMALL)
    save_head(tmp_path / "own", head, target, dtype="float32", notes={})
    _edit(tmp_path / "own", change)
    assert [finding.code for finding in examine(tmp_path / "own", target).findings] == [code]
    with pytest.raises(CheckpointError):
        load_head(tmp_path / "own", target, dtype="float32")


def test_a_served_model_knows_where_its_layer_comes_from(tmp_path: Path) -> None:
    _, head = carried.models(tmp_path, carried.SMALL)
    models = load_models(str(tmp_path), CARRIED, has_tokenizer=False)
    assert models.head is not None
    assert models.draft is not None
    assert (models.draft.name, models.head.drafter.name) == (CARRIED, "mtp")
    _assert_same(head, models.head)
