"""config.json of every family: transformers' config classes (which need no torch) and ours read the same from it,
whichever way it is spelled and whatever it leaves out; and what is not built is refused.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import bailing
import pytest
import transformers

from specserve.errors import ConfigError
from specserve.models.config import LayerKind, ModelConfig
from specserve.models.families.table import model_config

TESTS = Path(__file__).parent.parent
CONFIGS = {path.parent.name: json.loads(path.read_text()) for path in sorted(TESTS.glob("goldens/*/config.json"))}
SAME_AS = {"kimi_k2": "deepseek_v3"}
# left out of a config.json, these take the family's defaults
DEFAULTED = (
    "sliding_window",
    "layer_types",
    "max_window_layers",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "sliding_window_pattern",
    "partial_rotary_factor",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "rope_interleave",
    "use_qk_norm",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "full_attention_interval",
    "kda_safe_gate",
    "kda_lower_bound",
    "layer_group_size",
    "no_rope_layers",
    "no_rope_layer_interval",
    "attention_out_bias",
    "use_bias",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "layer_norm_eps",
    "attention_chunk_size",
    "floor_scale",
    "attn_scale",
    "attn_temperature_tuning",
    "interleave_moe_layer_step",
    "moe_layers",
    "num_kv_shared_layers",
    "global_head_dim",
    "attention_k_eq_v",
    "hidden_size_per_layer_input",
    "attention_value_scale",
)


def _read(raw: dict[str, Any]) -> ModelConfig:
    return model_config(raw, dtype="float32")


def _as_transformers_writes(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The new spelling, with every default filled in."""
    named = raw | {"model_type": SAME_AS.get(raw["model_type"], raw["model_type"])}
    (folder / "config.json").write_text(json.dumps(named))
    return transformers.AutoConfig.from_pretrained(folder).to_dict() | {"model_type": raw["model_type"]}


@pytest.mark.parametrize("case", CONFIGS)
def test_both_spellings_read_alike(case: str, tmp_path: Path) -> None:
    raw = CONFIGS[case]
    assert _read(_as_transformers_writes(raw, tmp_path)) == _read(raw)


@pytest.mark.parametrize("case", CONFIGS)
def test_what_is_left_out_is_as_transformers_assumes(case: str, tmp_path: Path) -> None:
    raw = {key: value for key, value in CONFIGS[case].items() if key not in DEFAULTED}
    assert _read(_as_transformers_writes(raw, tmp_path)) == _read(raw)


def test_ling_2_goes_by_the_name_of_ling_1() -> None:
    raw = bailing.CASES["ling-2"]
    assert _read(raw | {"model_type": "bailing_moe"}) == replace(_read(raw), family="bailing_moe")
    assert _read(bailing.CASES["ling-1"]).experts != _read(raw).experts


def test_a_null_switches_off() -> None:
    assert _read(CONFIGS["mistral"] | {"sliding_window": None}).layers == (LayerKind(),) * 3
    gemma = _read(CONFIGS["gemma2"] | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (gemma.attention_softcap, gemma.logit_softcap) == (0.0, 0.0)


def test_position_turns_all_of_what_mla_keeps_for_it() -> None:
    """Published configs of Ling 3 state for a whole head what `qk_rope_head_dim` says already."""
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}}
    raw = CONFIGS["ling-3"]
    assert _read(raw | nested | {"partial_rotary_factor": 0.5, "rotary_dim": 4}) == _read(raw)


def test_the_text_half_of_a_multimodal_config() -> None:
    """Published Gemma 3 leaves most of it to defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = _read({"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert [i for i, kind in enumerate(config.layers) if not kind.window] == [5, 11, 17, 23, 29]
    assert config.tie_embeddings


def test_llama_4_is_of_one_chunk() -> None:
    """Beyond it tokens of a chunk do not see those of the one before."""
    raw = CONFIGS["llama4"]
    assert (_read(raw).max_len, _read(raw | {"attention_chunk_size": None}).max_len) == (128, 256)


def test_layers_that_share_a_choice_keep_no_keys_for_it() -> None:
    """And a server of sequences that are chosen whole keeps none at all."""
    shared, own = _read(CONFIGS["glm-moe-dsa-shared-tied"]), _read(CONFIGS["glm-moe-dsa"])
    assert [kind.has_indexer for kind in shared.layers] == [True, False, False, True]
    assert shared.latent is not None
    assert [shared.latent.of(kind).entry_dim - shared.latent.cache_dim for kind in shared.layers] == [12, 0, 0, 12]
    assert own.latent is not None
    sizes = [each.entry_dim for length in (17, 18) if (each := own.for_length(length).latent)]
    assert sizes == [own.latent.cache_dim, own.latent.cache_dim + own.latent.index_dim]


def test_minimax_m3_is_published_within_a_model_that_sees() -> None:
    """With keys of its own, and without saying what the text model is."""
    raw = CONFIGS["minimax-m3"]
    nested = {
        f"sparse_{theirs}": raw[f"index_{ours}"]
        for theirs, ours in (
            ("num_index_heads", "n_heads"),
            ("index_dim", "head_dim"),
            ("block_size", "block_size"),
            ("topk_blocks", "topk_blocks"),
            ("local_block", "local_blocks"),
        )
    }
    lists = {"sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 1]}
    ours = {"model_type", "layer_types", "mlp_layer_types", "rope_parameters", *(key for key in raw if "index_" in key)}
    text = {key: value for key, value in raw.items() if key not in ours}
    text |= {"moe_layer_freq": [0, 1, 1], "hidden_act": "swigluoai", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
    text["sparse_attention_config"] = nested | lists | {"sparse_score_type": "max", "use_sparse_attention": True}
    assert _read({"model_type": "minimax_m3_vl", "text_config": text, "vision_config": {}}) == _read(raw)
    named = {"model_type": "minimax_m3_vl", "text_config": text | {"model_type": "minimax_m3"}}
    assert replace(_read(named), family="minimax_m3_vl_text") == _read(raw)


def test_layers_of_deepseek_v4_are_given_in_either_spelling() -> None:
    raw = CONFIGS["deepseek-v4"]
    rest = {key: value for key, value in raw.items() if key not in ("layer_types", "mlp_layer_types", "compress_rates")}
    named = rest | {"layer_types": ["heavily_compressed_attention", "sliding_attention"] * 2}
    named |= {"mlp_layer_types": ["hash_moe"] * 3 + ["moe"]}
    assert _read(rest | {"compress_ratios": [128, 0] * 2}) == _read(named)
    assert [kind.pool for kind in _read(rest).layers] == [128, 128, 128, 4]


def test_linear_attention_of_glm_5_3_is_given_in_either_spelling() -> None:
    raw, flat = CONFIGS["glm5-next"], ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    nested = dict(zip(("head_dim", "num_heads", "short_conv_kernel_size"), map(raw.get, flat), strict=True))
    rest = {key: value for key, value in raw.items() if key not in (*flat, "linear_lower_bound")}
    for bound in (None, -5.0):  # a gate that is safe has one
        assert _read(rest | {"linear_attn_config": nested | {"gate_lower_bound": bound}}) == _read(raw)
    unsafe = nested | {"gate_lower_bound": None, "safe_gate": False}
    assert _read(rest | {"linear_attn_config": unsafe}) == _read(raw | {"linear_lower_bound": None})


def test_qwen_2_5_vl_is_published_flat_and_saved_nested() -> None:
    raw = CONFIGS["qwen2-5-vl"]
    flat = _read(raw | {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}})
    assert replace(flat, family="qwen2_5_vl_text") == _read(raw)
    stale = {"model_type": "qwen2_5_vl", "hidden_size": 64, "text_config": raw}  # such as some versions repeat
    assert _read(stale) == _read(raw)


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("llama-llama3", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama-llama3", {"model_type": "lama"}, "nearest is 'llama'"),
        ("llama-llama3", {"rope_scaling": {"rope_type": "axial"}}, "axial"),
        ("llama-llama3", {"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3-windows-biased", {"layer_types": ["full_attention"]}, "one entry for each of 3 layers"),
        ("qwen3-moe", {"num_experts": None}, "num_experts is missing"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek-v32", {"index_head_dim": 4}, "index_head_dim"),
        ("glm-moe-dsa", {"indexer_types": ["full", "none", "full"]}, "indexer_types"),
        ("qwen4-exp", {"indexer_budget": 13}, "indexer_budget 13 must be a multiple of indexer_compress_ratio 3"),
        ("qwen4-exp", {"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ("qwen4-exp", {"ple_layer_ids": [3]}, "ple_layer_ids must number layers of linear attention, got 3"),
        ("qwen4-exp", {"eos_token_id": None}, "eos_token_id"),
        ("qwen4-exp", {"split_ngram_parts": 3}, "split_ngram_parts 3"),
        ("qwen4-exp", {"layer_types": ["linear_attention", "sliding_attention"] * 2}, "got sliding_attention"),
        ("minimax-m3", {"index_n_heads": 4}, "index_n_heads"),
        ("minimax-m3", {"index_topk_blocks": 1}, "index_topk_blocks 1 the 2 index_local_blocks"),
        ("minimax-m3", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "got sliding_attention"),
        ("minimax-m3", {"sparse_attention_config": {"sparse_topk_freq": 2}}, "no other keys than"),
        ("minimax-m3", {"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block"),
        ("minimax-m3", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("mimo-v2-flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ("mimo-v2-flash", {"swa_head_dim": 8}, "swa_head_dim"),
        ("nemotron-h", {"hybrid_override_pattern": "MX"}, "got X"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("lfm2", {"conv_bias": True}, "conv_bias"),
        ("lfm2-moe", {"layer_types": ["conv", "conv", "sliding_attention", "conv"]}, "got sliding_attention"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron-h", {"time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("smollm3", {"no_rope_layers": ["yes", "no", "yes"]}, "no_rope_layers must list whole numbers"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be more than 0"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block"),
        ("exaone4", {"sliding_window_pattern": "LG"}, "sliding_window_pattern"),
        ("hunyuan-dense", {"use_cla": True}, "use_cla"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ("qwen3-5", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3-5-moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3-5-moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4", {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "the last one full_attention"),
        ("gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers 4 of 5 layers"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 of 5 layers"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 10}}}, "per_layer_config must give all layers"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 10}}}, "per_layer_config must be of layers with full"),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters.full_attention"),
        ("gemma4", {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input is 100"),
        ("gemma4-moe", {"num_global_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ("gemma4-moe", {"top_k_experts": None}, "top_k_experts is missing"),
        ("gemma4-moe", {"use_double_wide_mlp": True}, "use_double_wide_mlp"),
        ("glm-moe-dsa", {"index_topk_pattern": "SFF"}, "'shared' of the first layer"),
        ("glm5-next", {"swiglu_limit": 7.0}, "swiglu_limit"),
        ("glm5-next", {"qk_rope_head_dim": 8}, "qk_rope_head_dim"),
        ("glm5-next", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ("glm5-next", {"index_topk": 25}, "not a multiple of 4"),
        ("glm5-next", {"indexer_types": ["full", "full", "full", "shared"]}, "follows one with linear attention"),
        ("deepseek-v4", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek-v4", {"layer_types": None, "compress_ratios": [0, 4, 128, 16]}, "must name sliding_attention"),
        ("ling-3", {"gated_attention_proj_granularity_type": "element_wise"}, "granularity"),
        ("ling-3", {"architectures": ["BailingMoeV4ForCausalLM"]}, "architectures"),
        ("ling-3", {"no_kda_lora": False}, "no_kda_lora"),
        ("ling-3", {"expert_swiglu_limit_list": [7.0]}, "computes only None"),
    ],
)
def test_what_is_not_built_is_refused_by_name(case: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _read(CONFIGS[case] | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"full_attention_type": "gqa"},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"use_bias": True},
        {"layer_group_size": 3},
    ],
)
def test_what_ling_2_5_lacks_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        _read(bailing.CASES["ling-2.5"] | changes)


@pytest.mark.parametrize("changes", [{"norm_head": True}, {"linear_silu": True}, {"score_function": "softmax"}])
def test_what_ring_linear_lacks_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        _read(bailing.CASES["ring-linear"] | changes)
