"""Speculation changes no token of any architecture: experts, latents, windows, recurrent states. Through the engine, in
mixed batches with preemptions and hits of prefixes, over plain steps and trees in any order, against plain decoding
alone."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import bailing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import VOCAB, Ask, Dice, Reference, compile_programs, make_engine, make_runner, run, serving
from parity import RAWS, mechanisms
from rounding import assert_within, tolerance

from specserve.checkpoints.load import Target
from specserve.kernels import gather, native
from specserve.models.cache import Cache, Prefix
from specserve.models.families.table import model_config
from specserve.models.params import init_params, is_spec
from specserve.models.target import TargetParams, forward, logits, target_spec
from specserve.serve.programs import shapes

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
ROUTED: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
WINDOWS: dict[str, Any] = {"sliding_window": 11}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "glm4"},
    "experts": {"model_type": "qwen3_moe", "num_experts": 8, **EXPERTS},
    "latents": {"model_type": "deepseek_v3", **ROUTED, **LATENT},
    "latents that an indexer chooses": {
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "shared", "full"],
        "index_n_heads": 12,
        "index_head_dim": 8,
        "index_topk": 12,
        **ROUTED,
        **LATENT,
    },
    "blocks that an indexer chooses": {
        "model_type": "minimax_m3_vl_text",
        "num_local_experts": 4,
        "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 9,
        "index_block_size": 5,
        "index_topk_blocks": 3,
        "partial_rotary_factor": 0.5,
        **EXPERTS,
    },
    "windows and softcaps": {"model_type": "gemma2", "query_pre_attn_scalar": 8, "hidden_activation": None, **WINDOWS},
    "windows and sinks": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "heads of two widths, sinks and KV heads by layer": {
        "model_type": "mimo_v2_flash",
        "num_key_value_heads": 1,
        "v_head_dim": 6,
        "partial_rotary_factor": 0.5,
        "hybrid_layer_pattern": [0, 1, 1],
        "n_routed_experts": 4,
        **EXPERTS,
        **WINDOWS,
    },
    "norms after, windows and no positions": {"model_type": "exaone4", "sliding_window_pattern": 2, **WINDOWS},
    "blocks side by side": {"model_type": "cohere2", "sliding_window_pattern": 2, "logit_scale": 0.5, **WINDOWS},
    "multipliers": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "norms of turned heads": {"model_type": "hunyuan_v1_dense", "attention_bias": True},
    "norms over all heads": {"model_type": "minimax_m2", "num_local_experts": 4, **EXPERTS},
    "growing queries": {
        "model_type": "ministral3",
        "tie_word_embeddings": True,
        "rope_parameters": {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
    },
    "growing queries of latents": {
        "model_type": "mistral4",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
        **ROUTED,
        **LATENT,
    },
    "experts of scaled inputs": {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "no_rope_layer_interval": 2,
        "floor_scale": 8,
    },
    "heads of two widths, keys of earlier layers": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 12,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 6,
        **WINDOWS,
    },
    "values of keys, experts beside an MLP": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "final_logit_softcapping": 20.0,
        **WINDOWS,
    },
    "delta nets": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "full_attention_interval": 2,
        **EXPERTS,
    },
    "several streams, blocks by mean keys, last tokens together": {
        "model_type": "qwen4_exp_text",
        "hc_count": 2,
        "hc_lowrank": 8,
        "output_gate_type": "sigmoid",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "indexer_n_heads": 12,
        "indexer_head_dim": 9,
        "indexer_budget": 12,
        "indexer_compress_ratio": 3,
        "ple_layer_ids": [1, 3],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "eos_token_id": 5,
        **EXPERTS,
    },
    "Mamba": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*E",
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        **EXPERTS,
    },
    "short convolutions": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 4,
        "num_dense_layers": 1,
        **EXPERTS,
    },
    "delta nets by channel": {
        "model_type": "bailing_hybrid",
        "layer_group_size": 3,
        "short_conv_kernel_size": 3,
        **ROUTED,
        **LATENT,
    },
    "delta nets beside latents without positions": {
        "model_type": "kimi_linear",
        "linear_attn_config": {"full_attn_layers": [2], "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 3},
        **ROUTED,
        **LATENT,
    },
    "pools that an indexer chooses, delta nets, streams side by side": {
        "model_type": "glm5_next",
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "hc_sinkhorn_iters": 3,
        "index_n_heads": 12,
        "index_head_dim": 8,
        "index_topk": 12,
        "index_kpool": 4,
        **ROUTED,
        **LATENT,
        "qk_rope_head_dim": 0,
    },
    "windows beside compressed keys, experts by token": {
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 8,
        "q_lora_rank": 12,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 6,
        "index_n_heads": 12,
        "index_head_dim": 8,
        "index_topk": 4,
        "hc_sinkhorn_iters": 3,
        "n_routed_experts": 8,
        **EXPERTS,
        **WINDOWS,
    },
    "lightning and latents": {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "num_experts": 8,
        "num_shared_experts": 1,
        "layer_group_size": 3,
        "group_norm_size": 2,
        "use_qk_norm": True,
        **ROUTED,
        **LATENT,
    },
}


ROUNDED = (  # their pages hold no keys and values of heads
    "latents",
    "latents that an indexer chooses",
    "pools that an indexer chooses, delta nets, streams side by side",
    "windows beside compressed keys, experts by token",
)
TWO_WIDTHS = "heads of two widths, sinks and KV heads by layer"
CACHES = {
    "dense in bfloat16": ("dense", "bfloat16"),
    "latents in bfloat16": ("latents", "bfloat16"),
    "blocks in bfloat16": ("blocks that an indexer chooses", "bfloat16"),
    "dense in int8": ("dense", "int8"),
    "two widths in int8": (TWO_WIDTHS, "int8"),
    "latents in float8": ("latents", "float8_e4m3fn"),
    "blocks in int8": ("blocks that an indexer chooses", "int8"),
    "heads of two widths in int8": ("heads of two widths, keys of earlier layers", "int8"),
}


def make_target(case: str, num_layers: int = 3) -> Target:
    """Random, with weights large enough that every part has a say. Three layers are one of every kind."""
    case, cache_dtype = CACHES.get(case, (case, ""))
    config = model_config(tiny.TARGET | {"num_hidden_layers": num_layers} | CASES[case], dtype="float32")
    config = dataclasses.replace(config, cache_dtype=cache_dtype)
    spec = target_spec(config)
    params: TargetParams = init_params(spec, jax.random.key(3), "float32")
    rng = np.random.default_rng(4)

    def stir(leaf: jax.Array) -> jax.Array:
        values = np.asarray(leaf)
        stirred = values + 0.3 * rng.standard_normal(values.shape) if values.ndim == 1 else values * 1.2
        return jnp.asarray(stirred, leaf.dtype)

    assert jax.tree.structure(spec, is_leaf=is_spec) == jax.tree.structure(params)
    params = jax.tree.map(stir, params)
    if params.head is not None:
        params = dataclasses.replace(params, head=params.head * np.float32(1.5))
    return Target(config, params, (2,), Path("tiny"))


BROADEST = ("delta nets",)  # latents are in test_sharded; the others take minutes more


@pytest.mark.parametrize(
    "case", [case if case in BROADEST else pytest.param(case, marks=pytest.mark.slow) for case in (*CASES, *CACHES)]
)
def test_speculation_changes_no_token_of(case: str, kept: Path | None, rng: np.random.Generator) -> None:
    target = make_target(case, 2 if case == "delta nets" else 3)
    head = tiny.random_head(target.config, seed=1, num_kv_heads=2, head_dim=8, rope=tiny.PLAIN_ROPE)
    kept_states = 3 if target.config.is_recurrent else 0
    options = {"num_slots": 3, "has_constrained": False, "kept_states": kept_states, "folder": kept}
    runner = make_runner(target, head, "off", "tree:3x3x9", **options)
    compile_programs(runner)
    reference = Reference(target, kept)
    with serving(make_engine(runner, Dice(0), num_pages=18)) as engine, reference.engine:
        asks = [reference.any_ask(rng, length, i % 2 == 1) for i, length in enumerate((1, 16, 37, 20, 9))]
        begins_alike = (Ask((*asks[2].prompt, token), asks[2].params) for token in range(3, VOCAB))
        asks.append(next(reference.firm(begins_alike)))
        inboxes = run(engine, asks)
        for ask, inbox in zip(asks, inboxes, strict=True):
            reference.check(ask, inbox)
        assert engine.stats().num_preemptions > 0, "nobody had to give up its pages"
        # hot, where the shared noise decides: there even a random head is accepted
        hot = [dataclasses.replace(asks[1].params, temperature=2.0, seed=seed) for seed in range(9)]
        ask = next(reference.firm(Ask(asks[2].prompt, params) for params in hot))
        for _turn in range(2):  # the first takes what is left of the prompt
            [again] = run(engine, [ask])
            reference.check(ask, again)
            inboxes.append(again)
        assert again.wait().stats.num_cached_tokens >= 32, "nothing was hit"
        stats = [inbox.wait().stats for inbox in inboxes]
    assert sum(sum(each.accepted_per_depth) for each in stats if each) > 10, "nothing was accepted"


QUICK = ("latents", "latents that an indexer chooses")


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in ROUNDED]
)
def test_new_tokens_see_of_each_other_what_pages_keep(case: str, cache_dtype: str, rng: np.random.Generator) -> None:
    """Entries of one head and no values are rounded alike where they are new and where they are read from pages, and
    so is what an indexer and a pool make of them: some tokens behind committed ones, of ragged lengths, have the logits
    of one forward over all of them."""
    target = make_target(case)
    config = dataclasses.replace(target.config, cache_dtype=cache_dtype)
    token_ids = jnp.asarray(rng.integers(0, VOCAB, (2, 20)), jnp.int32)
    places, lens, slots = jnp.tile(jnp.arange(20), (2, 1)), jnp.asarray([6, 14]), jnp.arange(2)
    later, table = lens[:, None] + jnp.arange(6), jnp.asarray([[2, 0, 5], [4, 1, 3]])
    empty = Cache.zeros(config, num_slots=2, num_pages=6, page_size=8)

    def run(params: TargetParams, cache: Cache | None, at: jax.Array, lens: jax.Array) -> tuple[jax.Array, Any]:
        prefix = None if cache is None else Prefix(table, lens, slots=slots)
        ids, mask = jnp.take_along_axis(token_ids, at, axis=1), tiny.causal(at.shape[1])
        out = forward(params, config, ids, at, mask, cache=cache, prefix=prefix)
        return logits(params, config, out.hidden_states), out.new

    @functools.partial(jax.jit, static_argnames="is_plain")
    def whole(params: TargetParams, *, is_plain: bool = False) -> tuple[jax.Array, Any]:
        found, new = run(params, None if is_plain else empty, places, jnp.zeros(2, jnp.int32))
        return jnp.take_along_axis(found, later[..., None], axis=1), new

    @jax.jit
    def behind(params: TargetParams, new: Any) -> jax.Array:
        cache = empty.write(new, table, places, places < lens[:, None], slots=slots)
        return run(params, cache, later, lens)[0]

    expected, new = whole(target.params)
    off = tolerance(lambda params: whole(params)[0], target.params)
    assert_within(behind(target.params, new), expected, off)
    unrounded, _ = whole(target.params, is_plain=True)
    far = np.abs(np.asarray(unrounded) - expected).max(axis=-1)
    assert np.median(far) > 2 * off.max(), "rounding shows too little; choose another seed"


@pytest.mark.skipif(not native.is_available(), reason=native.describe())
@pytest.mark.parametrize("case", CASES)
def test_tokens_that_only_fill_are_zeros(case: str, rng: np.random.Generator) -> None:
    """In every target of which the config says so: then what is made of them takes no time, and programs are larger."""
    target = make_target(case)
    sizes = {"num_slots": 16, "num_pages": 6, "page_size": 8, "max_model_len": 24}
    made = shapes.make_shapes([None], target.config, **sizes)
    assert len(made.batch_sizes) < len(made.step_sizes) or not target.config.keeps_zeros
    if not target.config.keeps_zeros:
        assert not made.leaves_padding
        return
    token_ids = np.where(np.arange(8) < [[8], [3], [0]], rng.integers(0, VOCAB, (3, 8)), gather.NO_TOKEN)
    prefix = Prefix(jnp.asarray([[2, 0, 5], [4, 1, 3], [0, 0, 0]]), jnp.asarray([6, 14, 0]), slots=jnp.arange(3))
    places = prefix.lens[:, None] + jnp.arange(8)
    empty = Cache.zeros(target.config, num_slots=3, num_pages=6, page_size=8)

    @jax.jit
    @native.serving
    def run(params: TargetParams, ids: jax.Array) -> jax.Array:
        mask = tiny.causal(8) & (ids != gather.NO_TOKEN)[:, :, None]
        return forward(params, target.config, ids, places, mask, cache=empty, prefix=prefix).hidden_states

    hidden = np.asarray(run(target.params, jnp.asarray(token_ids, jnp.int32)))
    assert (np.any(hidden != 0, axis=-1) == (token_ids != gather.NO_TOKEN)).all()


def test_every_mechanism_is_served() -> None:
    """By a case above."""
    raws = [tiny.TARGET | {"num_hidden_layers": 3} | raw for raw in CASES.values()]
    assert mechanisms((RAWS | bailing.CASES).values()) <= mechanisms(raws)


def test_chunks_are_as_long_as_prompts_and_layers_let_them_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform in ("CPU", "NATIVE"):
        monkeypatch.setattr(shapes, f"{platform}_CHUNKS", shapes.DEVICE_CHUNKS)

    def chunks(case: str, max_model_len: int = 2048) -> tuple[int, ...]:
        sizes = {"num_slots": 1, "num_pages": 4, "page_size": 16, "max_model_len": max_model_len}
        return shapes.make_shapes([None], make_target(case).config, **sizes).chunks

    assert (chunks("dense"), chunks("delta nets")) == ((64, 256, 1024), (64, 256))
    assert (chunks("dense", 64), chunks("dense", 65)) == ((64,), (64, 256))
