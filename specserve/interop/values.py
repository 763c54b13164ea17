"""The draft doctor's checks of the numbers in a head's tensors, whatever the head is."""

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from specserve.checkpoints.tensors import TensorFolder
from specserve.interop.findings import FLOATS, Check, Finding

_tensors = partial(Check, "tensors")
NOT_FINITE = _tensors(
    "not-finite",
    "error",
    "values that are no numbers",
    why="every proposal that they touch is noise",
    by_hand="go back to an earlier checkpoint, or download the weights again",
)
ALL_ZERO = _tensors(
    "all-zero",
    "error",
    "{name} holds nothing but zeros",
    why="what goes through it is lost: the head proposes without the target's states, or the same tokens always",
    by_hand="go back to an earlier checkpoint, or export the head again: it looks like one that was never filled",
)
WEIGHT_RANGE = _tensors(
    "weight-range",
    "error",
    "{name} has a size that 16 bits do not hold",
    why="in float16 it is infinite, or zero; in other dtypes what it makes drowns all else, or vanishes",
    by_hand="undo the scale that it was multiplied with, or export the head again",
)


def check_values(tensors: TensorFolder, names: Iterable[str]) -> Iterator[Finding]:
    """Check that every weight is a finite number, that some of each tensor are not zero, and that none is beyond 16
    bits."""
    half = np.finfo(np.float16)
    for name in sorted(names):
        if tensors.dtype(name).name not in FLOATS:
            continue
        where, value = f"{tensors.file(name).name}: {name}", tensors.read(name).astype(np.float32)
        if count := int((~np.isfinite(value)).sum()):
            yield NOT_FINITE.found(where, "finite numbers", f"{count:,} of {value.size:,} are NaN or infinite")
            continue
        largest = float(np.abs(value).max(initial=0.0))
        if not largest:
            yield ALL_ZERO.found(where, "weights", f"{value.size:,} zeros", name=name)
        elif not float(half.smallest_subnormal) <= largest <= float(half.max):
            expected = f"at most {half.max:g}, and more than {half.smallest_subnormal:.0e}"
            yield WEIGHT_RANGE.found(where, expected, f"at most {largest:.1e}", name=name)
