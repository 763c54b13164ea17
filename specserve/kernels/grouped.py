"""The parts that the kernels for experts share: the matrices that they take, rows sorted into blocks of one expert,
and what a call has to read and to multiply. The kernels are in `grouped_gpu` (Triton) and `grouped_tpu` (Mosaic).

What a call costs. Let n rows choose k of E experts each, evenly and independently. A given expert is chosen by none of
them with probability (1 - k/E)^n, so the number of distinct experts is expected to be E (1 - (1 - k/E)^n): 82 of 128
for 16 rows with 8 experts each, where up to 128 are possible. An expert has 3 d_model d_ff weights, of which each is
read once and multiplied with the rows that chose it:

    bytes  distinct * 3 d_model d_ff * (bytes of a weight), and n d_model * (bytes of x) + 4 n d_model for x and the sum
    FLOPs  2 * n k * 3 d_model d_ff needed

So there are 2 n k / distinct operations to a weight: 3 in the example. Every accelerator needs a hundred or more to
be busy, and the call takes the time that its weights take to be read.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import PackedMatrix, QuantizedMatrix
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix

TPU_ROWS = 64  # of a call of `grouped_tpu`: with 256, its programs spill registers and take half a minute to compile

Matrices = jax.Array | NibbleMatrix | PackedMatrix | QuantizedMatrix | WordMatrix  # one for each expert


class ExpertMatrices(Protocol):
    """The experts' matrices and biases, which are None together."""

    @property
    def gate(self) -> Matrices: ...  # [expert, d_model, d_ff]
    @property
    def up(self) -> Matrices: ...  # [expert, d_model, d_ff]
    @property
    def down(self) -> Matrices: ...  # [expert, d_ff, d_model]
    @property
    def gate_bias(self) -> jax.Array | None: ...  # [expert, d_ff]
    @property
    def up_bias(self) -> jax.Array | None: ...  # [expert, d_ff]
    @property
    def down_bias(self) -> jax.Array | None: ...  # [expert, d_model]


class Matrix(NamedTuple):
    """The matrix of each expert as a kernel takes it: arrays, or references to them or to their tiles."""

    values: Any  # [expert, d_in, d_out]
    scale: Any  # [expert, block, d_out] float32, or None
    offset: Any  # likewise
    bias: Any  # [expert, d_out], or None


def matrix(weight: Matrices, bias: jax.Array | None) -> Matrix:
    """The arrays of an expert's matrix that a kernel takes."""
    if isinstance(weight, QuantizedMatrix):
        return Matrix(weight.values, weight.scale, weight.offset, bias)
    assert isinstance(weight, jax.Array | jax.ShapeDtypeStruct), "others have kernels of their own"
    return Matrix(weight, None, None, bias)


def scale_block(weight: Matrices) -> int:
    """The number of inputs that share a scale, or 0 where all of them do."""
    if isinstance(weight, QuantizedMatrix) and weight.scale.shape[-2] > 1:
        return weight.block
    return 0


class ExpertBlocks(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert, in blocks of one expert each. Pair i belongs to
    token i // top_k. The number of blocks is enough for every routing."""

    slots: jax.Array  # [pair] int32: the place of a pair; past the last place where its expert is elsewhere
    pair_of_slot: jax.Array  # [block * size] int32: the number of pairs in an empty place
    expert_of_block: jax.Array  # [block] int32: the number of experts in a block without pairs


def into_blocks(expert_ids: jax.Array, num_experts: int, size: int) -> ExpertBlocks:
    """Sort the pairs of expert_ids [token, top_k] into blocks of `size` places. An id of `num_experts` stands for an
    expert that is elsewhere, whose pairs have no place.

    With ids [[2, 0], [0, 3]], 3 experts and blocks of 4, pairs 1 and 2 fill places 0 and 1, pair 0 place 4, and pair 3
    none; the blocks' experts are [0, 2, 3, ...].
    """
    flat = expert_ids.reshape(-1)
    num_pairs = len(flat)
    num_blocks = (num_pairs + (size - 1) * min(num_experts, num_pairs)) // size
    order = jnp.argsort(flat)
    sorted_ids, counts = flat[order], jnp.bincount(flat, length=num_experts)
    n_blocks = -(-counts // size)  # [expert]
    ends = jnp.cumsum(n_blocks)
    first_slots, first_pairs = (ends - n_blocks) * size, jnp.cumsum(counts) - counts
    slots = first_slots.at[sorted_ids].get(mode="fill", fill_value=num_blocks * size)
    slots = slots + jnp.arange(num_pairs) - first_pairs[sorted_ids]
    slots = jnp.where(sorted_ids < num_experts, slots, num_blocks * size)
    return ExpertBlocks(
        slots[jnp.argsort(order)],
        jnp.full(num_blocks * size, num_pairs, jnp.int32).at[slots].set(order.astype(jnp.int32), mode="drop"),
        # compared with all: a bisection is a loop, which leaves the graph that a GPU runs a step as
        jnp.searchsorted(ends, jnp.arange(num_blocks), side="right", method="compare_all").astype(jnp.int32),
    )


def rows_per_block(num_pairs: int, num_experts: int, least: int) -> int:
    """The number of places in a block: an expert's average share, rounded up to a power of two, from `least` to 64."""
    return min(max(least, 1 << max(num_pairs // num_experts - 1, 0).bit_length()), 64)


@dataclass(frozen=True)
class Cost:
    """The bytes that a call is expected to read and write, and the operations that it needs, by the formulae above."""

    num_bytes: int
    flops: int


def expected_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """The expected number of distinct experts that so many tokens choose, where each chooses evenly and by itself."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def cost(experts: ExpertMatrices, top_k: int, x: jax.Array | jax.ShapeDtypeStruct) -> Cost:
    """Count the bytes and the operations of a call with the rows x [token, d_model], each with `top_k` experts."""
    num_experts, d_ff, d_model = experts.down.shape
    leaves = jax.tree.leaves((experts.gate, experts.up, experts.down))
    of_expert = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / num_experts
    num_bytes = expected_experts(num_experts, top_k, x.shape[0]) * of_expert + x.size * (x.dtype.itemsize + 4)
    return Cost(round(num_bytes), 2 * x.shape[0] * top_k * 3 * d_model * d_ff)
