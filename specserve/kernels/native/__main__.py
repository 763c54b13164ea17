"""The self check of an installation, `python -m specserve.kernels.native`, compares the kernels with XLA's operations
(`kernels.check`). With `build` it builds the library again, in a checkout."""

import logging
import sys

from specserve.kernels import native
from specserve.kernels.check import check_kernels
from specserve.kernels.native import build

logger = logging.getLogger("specserve.kernels.native")


def main() -> None:
    """Log the instruction set. Exit with status 1 where there are no kernels, or they are wrong; the log gives
    the reason."""
    if sys.argv[1:] == ["build"]:
        build.main()
        return
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    if not native.is_available():
        raise SystemExit(1)  # the reason is in the log
    wrong = [each.kernel for each in check_kernels() if not each.is_right]
    if wrong:
        raise SystemExit(f"native CPU kernels: {', '.join(wrong)} differ from XLA's by more than rounding")
    logger.info("native CPU kernels: %s", native.describe())


if __name__ == "__main__":
    main()
