"""The layers that keep a recurrent state instead of every token's keys and values: one interface to all kinds."""

import dataclasses

import jax

from specserve.kernels.recurrence import New, State, advance
from specserve.kernels.rows import Unrolled
from specserve.models.config import LayerKind, ModelConfig
from specserve.models.context import Context
from specserve.models.mixers import delta, hashed, lightning, mamba, short_conv
from specserve.models.mixers.delta import DeltaNet, delta_spec
from specserve.models.mixers.lightning import LightningAttention, lightning_spec
from specserve.models.mixers.mamba import Mamba, mamba_spec
from specserve.models.mixers.short_conv import ShortConv, short_conv_spec

__all__ = ["New", "Recurrent", "State", "advance", "init_state", "mix", "spec"]

Recurrent = DeltaNet | LightningAttention | Mamba | ShortConv


def spec(config: ModelConfig, kind: LayerKind, prefix: str) -> Recurrent:
    if kind.mixer == "mamba":
        assert config.mamba is not None
        return mamba_spec(config, config.mamba, prefix)
    if kind.mixer == "conv":
        return short_conv_spec(config, prefix)
    if kind.mixer == "delta":
        assert config.delta is not None
        return delta_spec(config, config.delta, prefix)
    assert config.lightning is not None
    return lightning_spec(config, config.lightning, prefix)


def init_state(config: ModelConfig, kind: LayerKind, batch: int) -> State:
    """Make the recurrent state of sequences that have no token yet."""
    if kind.mixer == "mamba":
        assert config.mamba is not None
        return mamba.init_state(config, config.mamba, batch)
    if kind.mixer == "conv":
        return short_conv.init_state(config, batch)
    if kind.mixer == "delta":
        assert config.delta is not None
        state = delta.init_state(config, config.delta, batch)
        if kind.hashed is None:
            return state
        return dataclasses.replace(state, conv=(*state.conv, *hashed.init_state(config, batch)))
    assert config.lightning is not None
    return lightning.init_state(config.lightning, batch)


def mix(
    params: Recurrent,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,  # [batch, n, d_model], normed
    seen: State | None,  # None: nothing is committed
    context: Context,
) -> tuple[jax.Array, New]:
    """Compute what the layer adds to the residual, [batch, n, d_model], and how the tokens would change its state
    (`advance`). See `kernels.recurrence.recur` for the masks that are possible."""
    assert not isinstance(context.mask, Unrolled), "a rollout is of layers that attend"
    assert context.earlier is None, "a layer that keeps a state runs over all new tokens at once"
    if seen is None:
        seen = init_state(config, kind, x.shape[0])
    if isinstance(params, DeltaNet):
        assert config.delta is not None
        return delta.mix(params, config, config.delta, x, seen, context.mask)
    if isinstance(params, Mamba):
        assert config.mamba is not None
        return mamba.mix(params, config, config.mamba, x, seen, context.mask)
    if isinstance(params, ShortConv):
        return short_conv.mix(params, x, seen, context.mask)
    assert config.lightning is not None
    return lightning.mix(params, config, config.lightning, kind.slope_scale, x, seen, context)
