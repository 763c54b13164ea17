"""Short causal convolutions around the sublayers of a block (DFlash2).

A slot's input to attention and to the MLP, and what these make of it, is mixed with that of the slots just before it in
its block. The kernel is a fixed one for each channel plus one that the slot's normed state gives for each group of
channels. At the start of a block there is nothing before: zeros.
"""

import jax
import jax.numpy as jnp

from specserve.drafters.dflash.config import DFlashConfig
from specserve.kernels.matmul import Weight
from specserve.models.layers import linear
from specserve.models.params import ParamSpec, matrix
from specserve.pytree import pytree


@pytree
class Conv:
    base: jax.Array  # [2, taps, d_model]: of what goes into the sublayer, and of what comes out
    kernel: Weight  # [d_model, 2 * taps * groups], to what a slot adds to both


@pytree
class Convs:
    """The convolutions of one layer."""

    attention: Conv
    mlp: Conv


def conv_spec(config: DFlashConfig, layer: int) -> Convs:
    """The parameters of a layer's convolutions as `ParamSpec`s."""
    width, taps = config.backbone.d_model, config.conv_taps

    def spec(name: str) -> Conv:
        prefix = f"layers.{layer}.{name}_conv"
        # untyped as every leaf of a spec tree is
        base: jax.Array = ParamSpec((2, taps, width), (None, None, "embed"), f"{prefix}.base_kernel")  # pyright: ignore
        outputs = 2 * taps * (width // config.conv_group)
        return Conv(base, matrix(f"{prefix}.kernel_projection.weight", width, outputs, ("embed", None)))

    return Convs(spec("attention"), spec("mlp"))


def kernels(conv: Conv, config: DFlashConfig, normed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute from the slots' normed states [batch, n, d_model] the kernels for what goes into a sublayer and for what
    comes out, each [batch, n, taps, d_model]."""
    batch, n, width = normed.shape
    groups = width // config.conv_group
    own = linear(normed, conv.kernel).reshape(batch, n, 2, config.conv_taps, groups)
    both = conv.base.astype(own.dtype) + jnp.repeat(own, config.conv_group, axis=-1)
    return both[:, :, 0], both[:, :, 1]


def convolve(
    config: DFlashConfig,
    x: jax.Array,  # [batch, n, d_model], blocks one after the other
    kernel: jax.Array,  # [batch, n, taps, d_model]
) -> jax.Array:
    """Sum the slots up to `taps - 1` places before each, within its block."""
    place = jnp.arange(x.shape[1]) % config.block_size
    out = x * kernel[:, :, 0]
    for tap in range(1, config.conv_taps):
        before = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]]
        out += jnp.where((place >= tap)[:, None], before, 0) * kernel[:, :, tap]
    return out
