"""Short convolutions as LFM2 has them (arXiv 2511.23404, section 2): two gates around a causal convolution of a few
tokens, whose last inputs are all of a sequence's state."""

from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import Weight
from specserve.kernels.recurrence import New, State, convolve
from specserve.kernels.rows import Documents
from specserve.models.config import ModelConfig
from specserve.models.layers import linear
from specserve.models.params import ParamSpec, TensorPart, matrix
from specserve.pytree import pytree


@pytree
class ShortConv:
    k: Weight  # [d_model, d_model], the gate of what is convolved
    q: Weight  # [d_model, d_model], the gate of the result
    v: Weight  # [d_model, d_model]
    conv: jax.Array  # [d_model, 1, width]
    o: Weight  # [d_model, d_model]


def short_conv_spec(config: ModelConfig, prefix: str) -> ShortConv:
    """The parameters as `ParamSpec`s. One tensor holds the three projections, in this order."""
    size = config.d_model

    def project(i: int) -> Any:
        part = TensorPart(i * size, (i + 1) * size, 3 * size, 3 * size)
        return matrix(f"{prefix}.in_proj.weight", size, size, ("embed", None), part=part)

    conv: Any = ParamSpec((size, 1, config.conv_width), (None, None, None), f"{prefix}.conv.weight")
    out = matrix(f"{prefix}.out_proj.weight", size, size, (None, "embed"))
    return ShortConv(k=project(0), q=project(1), v=project(2), conv=conv, o=out)


def init_state(config: ModelConfig, batch: int) -> State:
    """Make the state of sequences that have no token yet."""
    return State(None, (jnp.zeros((batch, config.conv_width - 1, config.d_model), config.dtype),))


def mix(
    params: ShortConv,
    x: jax.Array,  # [batch, n, d_model], normed
    seen: State,
    mask: jax.Array | Documents,  # [batch or 1, n, n] bool
) -> tuple[jax.Array, New]:
    """Compute what the layer adds to the residual, [batch, n, d_model], and what the tokens would change in its
    state."""
    new = linear(x, params.k) * linear(x, params.v)
    out = linear(x, params.q) * convolve(new, params.conv, seen.conv[0], mask).astype(x.dtype)
    return linear(out, params.o), New(None, None, None, (new,))
