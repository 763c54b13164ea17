"""The head that a run begins with."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.load import Target
from specserve.drafters.dflash.config import DFlashConfig, short_windows
from specserve.drafters.dflash.model import Conv, Convs, DFlashParams, head_spec
from specserve.drafters.dflash.settings import MarkovSettings
from specserve.drafters.layers import check_taps, layers_like, windows_of
from specserve.drafters.settings import ALL_TOKENS
from specserve.errors import ConfigError
from specserve.kernels.matmul import Weight
from specserve.models.config import ModelConfig, Names
from specserve.models.params import init_params
from specserve.models.target import head_columns, whole_norm

BLOCK_SIZE = 8
MOST_LAYERS, FEWEST_TAPS = 5, 3
MOST_RANK = 256
FORESEEING = ("dspark", "domino")  # the anchor's slot of their blocks predicts a token too
WHOLE = ("dflash2", "domino")  # they propose all tokens
GRU_WIDTH = 4  # of a published Domino's state, to its rank
CONV_TAPS, CONV_GROUP, SELECTOR_TOP_K = 2, 16, 16  # of published DFlash2 heads
FEWEST_MORE = 3  # layers that a target must have beside as many as are tapped by default
NAMES = Names(layer="layers.{i}", sinks="attention_sink_bias")  # of the published tensors


def default_block_size(kind: str) -> int:
    """Return the block size for the usual number of predicted tokens. One slot less is needed where the anchor's slot
    predicts too."""
    return BLOCK_SIZE - (kind in FORESEEING)


def suits(kind: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings of training as published heads were trained, the rate whatever the target's width."""
    num_slots = (given.get("draft.block_size") or default_block_size(kind)) - (kind not in FORESEEING)
    found = {"train.rollout_decay": slot_decay(num_slots), "train.lr": 6e-4, "train.clip": 1.0}
    if kind in WHOLE:
        found["draft.vocab_size"] = ALL_TOKENS
    return found


def slot_decay(num_slots: int) -> float:
    """Return the weight of a slot in the loss, relative to the one before it: exp(-1 / gamma), with the gammas of
    published heads, 4 for 7 slots and 7 for 15 (DFlash, arXiv 2602.06036), and on the line through both for other
    numbers."""
    return round(math.exp(-1 / (4 + 3 / 8 * (num_slots - 7))), 2)


def new_config(kind: str, settings: MarkovSettings, target: ModelConfig, draft_vocab_size: int) -> DFlashConfig:
    """The head's shape: layers like the target's where the settings say nothing. Raises ConfigError."""
    num_layers = settings.num_layers or min(MOST_LAYERS, max(1, target.num_layers // 8))
    aux_layers = settings.aux_layers or default_taps(target.num_layers, max(num_layers, FEWEST_TAPS))
    check_taps(aux_layers, target)
    backbone = ModelConfig(
        family="qwen3",
        d_model=target.d_model,
        **layers_like(target, settings, num_layers),
        has_sinks=settings.sinks,
        qk_norm="head",
        names=NAMES,
        dtype="float32",
    )
    is_causal, block_size = _masks(kind, settings, windows_of(backbone))
    if kind in WHOLE and draft_vocab_size < target.vocab_size:
        raise ConfigError(
            f"draft.vocab_size {draft_vocab_size}: a {kind} head proposes all {target.vocab_size} tokens of the "
            "target; leave --vocab-size out"
        )
    rank = settings.rank or min(MOST_RANK, target.d_model // 2)
    joint: dict[str, Any] = {}
    if kind == "dspark":
        joint = {"foresees_anchor": True, "markov_rank": rank, "markov_type": settings.markov}
        joint["confidence"] = "state and token"
    elif kind == "domino":
        joint = {"foresees_anchor": True, "gru_width": GRU_WIDTH * rank, "correction_rank": rank, "num_uncorrected": 1}
    elif kind == "dflash2":
        group = math.gcd(CONV_GROUP, target.d_model)
        joint = {"conv_taps": CONV_TAPS, "conv_group": group, "selector_rank": rank}
        joint["selector_top_k"] = min(SELECTOR_TOP_K, target.vocab_size)
    mask_token_id = settings.mask_token if settings.mask_token >= 0 else target.vocab_size - 1
    if mask_token_id >= target.vocab_size:
        raise ConfigError(f"draft.mask_token {mask_token_id}: the target has tokens 0..{target.vocab_size - 1}")
    return DFlashConfig(
        backbone=backbone,
        aux_layers=tuple(aux_layers),
        draft_vocab_size=draft_vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        is_causal=is_causal,
        **joint,
    )


def _masks(kind: str, settings: MarkovSettings, windows: Sequence[int]) -> tuple[tuple[bool, ...], int]:
    """Return whether the slots of each layer see those before them alone, and the size of a block. Raises
    ConfigError."""
    block_size, fewest = settings.block_size or default_block_size(kind), 1 if kind in FORESEEING else 2
    if block_size < fewest:
        raise ConfigError(
            f"draft.block_size {block_size} leaves a {kind} block nothing to predict; give {fewest} or more"
        )
    is_causal = tuple(settings.causal == "all" or (not settings.causal and window > 0) for window in windows)
    if short := short_windows(windows, is_causal, block_size):
        raise ConfigError(
            f"draft.window {short[0]} is shorter than the block of {block_size}, whose positions see what follows "
            "them; give a longer one, or leave draft.causal out"
        )
    return is_causal, block_size


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps from layer 1 to the fourth from the end, evenly spread, as published heads have them. Raises ConfigError
    where the target has too few layers."""
    if num_layers < num_taps + FEWEST_MORE:
        raise ConfigError(f"a target of {num_layers} layers has no {num_taps} default taps; give draft.aux_layers")
    if num_taps == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def initial_params(config: DFlashConfig, target: Target, target_ids: np.ndarray, seed: int) -> DFlashParams:
    """Make a fresh head whose final norm and output rows are the target's own, and in which the slots do not depend on
    each other yet: the bias by the token before is nothing, and convolutions pass on what they get."""
    dtype = config.backbone.dtype
    params: DFlashParams = init_params(head_spec(config), jax.random.key(seed), dtype)
    if params.markov is not None:
        markov = dataclasses.replace(params.markov, bias=_nothing(params.markov.bias))
        params = dataclasses.replace(params, markov=markov)
    if params.domino is not None:
        params = dataclasses.replace(params, domino=dataclasses.replace(params.domino, up=_nothing(params.domino.up)))
    convs = tuple(Convs(_passing(each.attention), _passing(each.mlp)) for each in params.convs)
    params = dataclasses.replace(params, convs=convs)
    norm = whole_norm(target.params, target.config).astype(dtype)
    if params.head is None:
        return dataclasses.replace(params, norm=norm)
    columns = head_columns(target.params, jnp.asarray(target_ids)).astype(dtype)
    return dataclasses.replace(params, norm=norm, head=columns)


def _passing(conv: Conv) -> Conv:
    return Conv(jnp.zeros_like(conv.base).at[:, 0].set(1), _nothing(conv.kernel))


def _nothing(weight: Weight) -> Any:
    return jax.tree.map(jnp.zeros_like, weight)
