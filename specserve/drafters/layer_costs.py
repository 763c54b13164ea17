"""The cost of one transformer layer of a drafter while it learns, for each position: the terms that `costs.py` of every
kind adds up, by the rules of `train.flops`. Numbers are array elements; `num_queries` of them are a position's queries,
all heads together."""

from specserve.drafters.door import Flops


def kept_by_layer(d_model: int, num_queries: int, d_ff: int) -> int:
    """Numbers that stay until the backward pass where nothing is computed again, keys and values left out."""
    return 4 * d_model + 2 * num_queries + 4 * d_ff


def workspace_of_layer(d_model: int, num_queries: int, d_ff: int) -> int:
    """Numbers that the layer needs at once, keys, values and attention's scores left out."""
    return 6 * d_model + 2 * num_queries + 6 * d_ff


def attention_flops(width: int, seen: float, computed: float, *, remat: bool) -> Flops:
    """The operations of attention's products, forward and backward, of a position that sees `seen` keys where the
    kernel computes `computed`. `width` are the numbers of its queries and of what the values bring, all layers
    together. A block is computed again from queries and keys, and its backward pass has four products."""
    times = 2 + 2 + (1 if remat else 0)
    return Flops(3 * 2 * width * seen, times * 2 * width * computed)
