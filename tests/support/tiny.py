"""Tiny random models for tests: everything that has a shape, and nothing that takes time."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rounding

from specserve.checkpoints.load import Target, to_numpy
from specserve.checkpoints.tensors import write_json, write_tensors
from specserve.drafters.dflash import start
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.dflash.model import head_spec
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.eagle3.model import draft_spec
from specserve.drafters.interface import Head
from specserve.drafters.language_model.drafter import LanguageModel
from specserve.drafters.peagle.config import PEagleConfig
from specserve.drafters.peagle.drafter import PEagle
from specserve.drafters.peagle.model import head_spec as peagle_spec
from specserve.drafters.registry import DraftSettings, load_kind
from specserve.eval.verify.rule import text_logits
from specserve.models.adapters import adaptable
from specserve.models.config import Latent, LayerKind, ModelConfig, Names
from specserve.models.families.table import model_config
from specserve.models.params import init_params
from specserve.models.rope import Rope
from specserve.models.target import TargetParams, target_spec

TARGET: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


LATENT = Latent(kv_rank=12, nope_dim=6, rope_dim=4, v_dim=5, q_rank=10)
LATENTS: dict[str, Any] = {  # changes of a head's config that give it latent attention
    "latent": LATENT,
    "head_dim": 4,
    "num_kv_heads": 1,
    "attention_scale": (6 + 4) ** -0.5,
    "rope": Rope(is_interleaved=True),
}
GEMMA: dict[str, Any] = {  # changes that give it the layers of a Gemma 4
    "has_embedding": True,
    "names": Names(mlp_norm="pre_feedforward_layernorm"),
    "layers": (LayerKind(values_are_keys=True),),
    "qk_norm": "head",
    "has_value_norm": True,
    "out_norms": True,
    "has_layer_scale": True,
    "attention_scale": 1.0,
    "activation": "gelu_tanh",
    "embedding_scale": 32**0.5,
    "logit_softcap": 3.0,
    "rope": Rope(kind="proportional", share=0.5),
}
PLAIN_ROPE = Rope()  # of a head beside a target that turns in its own way


def write_target(folder: Path, raw: dict[str, Any], seed: int) -> None:
    """A Hugging Face folder with random weights. The head is widened, so that distributions have peaks."""
    spec = target_spec(model_config(raw, dtype="float32"))
    params: TargetParams = init_params(spec, jax.random.key(seed), "float32")
    tensors = to_numpy(params, spec, "float32")
    for name in tensors:
        if name == "lm_head.weight":
            tensors[name] = tensors[name] * 1.5
    write_json(folder / "config.json", raw)
    write_tensors(folder / "model.safetensors", tensors)


def few_bits(array: np.ndarray, num_bits: int) -> np.ndarray:
    """Numbers with so many binary digits behind the point: sums of such numbers, and of their products, are exact in
    float32, in any order."""
    return np.round(array.astype(np.float32) * 2**num_bits) / np.float32(2**num_bits)


def write_adapter(folder: Path, target: Target, seed: int, rank: int = 2, **config: Any) -> Path:
    """A PEFT folder of pairs for every matrix."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, (d_out, d_in) in adaptable(target.config).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = rng.normal(size=(rank, d_in)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = (rng.normal(size=(d_out, rank)) * 0.05).astype(np.float32)
    folder.mkdir()
    write_json(folder / "adapter_config.json", {"r": rank, "lora_alpha": 2 * rank, "peft_type": "LORA"} | config)
    write_tensors(folder / "adapter_model.safetensors", tensors)
    return folder


def draft_config(target: ModelConfig, **changes: Any) -> Eagle3Config:
    config = Eagle3Config(
        d_model=target.d_model,
        target_d_model=target.d_model,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        d_ff=target.d_ff,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size * 3 // 4,
        max_len=target.max_len,
        aux_layers=default_taps(target) if target.num_layers > 4 else (0, target.num_layers - 1),
        norm_eps=target.norm_eps,
        rope=target.rope,
    )
    return dataclasses.replace(config, **changes)


def random_head(target: ModelConfig, seed: int, **changes: Any) -> Head:
    config = draft_config(target, **changes)
    params = init_params(draft_spec(config), jax.random.key(seed), config.dtype)
    chosen = np.random.default_rng(seed).permutation(config.vocab_size)[: config.draft_vocab_size]
    return Head(Eagle3(config), params, np.sort(chosen).astype(np.int32))


def random_block_head(target: ModelConfig, seed: int, **settings: Any) -> Head:
    """A head that fills blocks, by the settings of `DraftSettings`."""
    vocab_size = settings.pop("vocab_size", 3 * target.vocab_size // 4)
    config = start.new_config("dflash", DraftSettings(**settings), target, vocab_size)
    params = init_params(head_spec(config), jax.random.key(seed), config.backbone.dtype)
    chosen = np.random.default_rng(seed).permutation(target.vocab_size)[:vocab_size]
    return Head(DFlash(config), params, np.sort(chosen).astype(np.int32))


def random_joint_head(target: ModelConfig, seed: int, changes: dict[str, Any], **settings: Any) -> Head:
    """A head that fills blocks whose slots depend on each other, by what is changed of a plain one's config, and under
    `backbone` of its layers'."""
    plain, own = random_block_head(target, seed, **settings), dict(changes)
    assert isinstance(plain.drafter, DFlash)
    config = plain.drafter.config
    backbone = dataclasses.replace(config.backbone, **own.pop("backbone", {}))
    config = dataclasses.replace(config, backbone=backbone, **own)
    return Head(DFlash(config), init_params(head_spec(config), jax.random.key(seed), "float32"), plain.target_ids)


def random_masked_head(target: ModelConfig, seed: int, num_slots: int = 4, **changes: Any) -> Head:
    """A head that foresees so many tokens in one pass, most of them through masked slots."""
    config = PEagleConfig(draft_config(target, **changes), mask_token_id=target.vocab_size - 1, num_slots=num_slots)
    params = init_params(peagle_spec(config), jax.random.key(seed), config.network.dtype)
    return Head(PEagle(config), params, random_head(target, seed, **changes).target_ids)


def random_carried_layer(target: ModelConfig, seed: int) -> Head:
    """A layer of multi-token prediction."""
    drafter = load_kind("mtp").new(DraftSettings(), target, target.vocab_size)
    params = init_params(drafter.spec(), jax.random.key(seed), drafter.dtype)
    return Head(drafter, params, np.arange(target.vocab_size, dtype=np.int32))


def random_language_model(target: ModelConfig, seed: int, **changes: Any) -> Head:
    """A smaller model of another family than the target, with a window, that proposes all but a few of the tokens."""
    raw = TARGET | {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 16, "sliding_window": 9} | changes
    config = model_config(raw | {"vocab_size": target.vocab_size}, dtype=target.dtype)
    target_ids = np.arange(target.vocab_size, dtype=np.int32)
    target_ids[:3] = -1
    return Head(LanguageModel(config), init_params(target_spec(config), jax.random.key(seed), target.dtype), target_ids)


def causal(n: int) -> jax.Array:  # [1, n, n] bool
    return jnp.tril(jnp.ones((n, n), bool))[None]


def target_logits(target: Target, token_ids: Sequence[int]) -> np.ndarray:  # [n, vocab]
    """One plain forward over a whole sequence: what every cached, paged or speculative path must agree with."""
    n = len(token_ids)
    padded = np.zeros((1, -(-n // 64) * 64), np.int32)  # padding changes nothing before it, and few shapes compile
    padded[0, :n] = token_ids
    return np.asarray(_text_logits(target.config, target.params, jnp.asarray(padded)))[0, :n]


def tolerance(target: Target, token_ids: Sequence[int]) -> np.ndarray:  # [n, 1]
    """What rounding explains of these logits."""
    return rounding.tolerance(
        lambda params: target_logits(dataclasses.replace(target, params=params), token_ids), target.params
    )


_text_logits = jax.jit(text_logits, static_argnums=0)
