"""Run the NEON kernel's products on a machine with another processor: compiled across, under QEMU's emulation of the
instructions. `python tools/check_neon.py` exits with status 1 where a product is wrong.

It takes `apt install g++-aarch64-linux-gnu qemu-user-static` (Debian). What is checked is the law of the other
instruction sets' tests, for each format of weights and the ways that scales of 4-bit numbers lie: each number is x @ w
within what rounding explains, and a row is the same to the bit whatever is multiplied beside it. Times under emulation
mean nothing.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from specserve.kernels.native import build

COMPILER, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")
HARNESS = Path(__file__).with_suffix(".cc")


def main() -> None:
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if not (shutil.which(COMPILER) and emulator):
        sys.exit(f"{COMPILER} or {EMULATORS[0]} is not here: apt install g++-aarch64-linux-gnu qemu-user-static")
    sources = (HARNESS, build.FOLDER / "isa_neon.cc")
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "check"
        flags = (*build.FLAGS, *build.VARIANTS["neon"][1], "-static", "-I", str(build.FOLDER))
        subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(program)], check=True)
        sys.exit(subprocess.run([emulator, str(program)], check=False).returncode)


if __name__ == "__main__":
    main()
