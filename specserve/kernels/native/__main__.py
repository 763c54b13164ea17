"""The self check of an installation: `python -m specserve.kernels.native` calls a kernel and compares its result."""

import logging

import jax
import numpy as np

from specserve.kernels import native

logger = logging.getLogger("specserve.kernels.native")


def main() -> None:
    """Log the instruction set, or leave with the reason why there is none."""
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    if not native.is_available():
        raise SystemExit(1)  # the reason is in the log
    x = np.arange(1000, dtype=np.float32)
    result = jax.ffi.ffi_call("specserve_twice", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    np.testing.assert_array_equal(result, x + x)
    logger.info("native CPU kernels: %s", native.describe())


if __name__ == "__main__":
    main()
