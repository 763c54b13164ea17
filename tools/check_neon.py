"""Run the products of ARM's kernels, NEON's and those with dot products of bytes, on a machine with another processor:
compiled across, under QEMU's emulation of the instructions. `python tools/check_neon.py` exits with status 1 where a
product is wrong.

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
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch) / name for name in ("neon.o", "dotprod.o", "check.o")]
        program = Path(scratch) / "check"
        for made in objects:
            source = HARNESS if made.stem == "check" else build.FOLDER / f"isa_{made.stem}.cc"
            flags = (*build.FLAGS, *build.VARIANTS.get(made.stem, ("", ()))[1], "-I", str(build.FOLDER))
            subprocess.run([COMPILER, *flags, "-c", str(source), "-o", str(made)], check=True)
        subprocess.run([COMPILER, "-static", *map(str, objects), "-o", str(program)], check=True)
        sys.exit(subprocess.run([emulator, str(program)], check=False).returncode)


if __name__ == "__main__":
    main()
