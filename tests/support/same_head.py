"""The equality of two heads, to the bit."""

import jax
import numpy as np

from specserve.drafters.interface import Head


def assert_same_head(head: Head, other: Head) -> None:
    assert head.drafter == other.drafter
    np.testing.assert_array_equal(head.target_ids, other.target_ids)
    assert jax.tree.structure(head.params) == jax.tree.structure(other.params)
    for leaf, same in zip(jax.tree.leaves(head.params), jax.tree.leaves(other.params), strict=True):
        assert leaf.dtype == same.dtype
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), np.asarray(same).view(np.uint8))
