"""The self check of an installation, `python -m specserve.kernels.native`, calls a kernel and compares its result. With
`build` it builds the library again, in a checkout."""

import logging
import sys

import jax.numpy as jnp
import numpy as np

from specserve.kernels import native
from specserve.kernels.matmul import matmul, pack
from specserve.kernels.native import build

logger = logging.getLogger("specserve.kernels.native")


def main() -> None:
    """Log the instruction set, or exit with status 1 after the reason why there are no kernels was logged."""
    if sys.argv[1:] == ["build"]:
        build.main()
        return
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    if not native.is_available():
        raise SystemExit(1)  # the reason is in the log
    weight = np.arange(35, dtype=np.float32).reshape(5, 7)
    np.testing.assert_array_equal(matmul(jnp.eye(5), pack(jnp.asarray(weight))), weight)
    logger.info("native CPU kernels: %s", native.describe())


if __name__ == "__main__":
    main()
