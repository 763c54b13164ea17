"""Run the products of kernels for processors that are not at hand, in place of tests that skip these instruction sets.

`python tools/check_kernels.py` takes g++ for the kernels of AVX2, AVX-512, VNNI and AMX, whose instructions are C++
functions then (tools/emulated), and `apt install g++-aarch64-linux-gnu qemu-user-static` (Debian) for ARM's, NEON's
and those with dot products, which are compiled across and run under QEMU. It exits with status 1 where a product is
wrong.

What is checked is the law of the other instruction sets' tests, for each format of weights and the ways that scales of
whole numbers lie: each number is x @ w within what rounding explains, and a row is the same to the bit whatever is
multiplied beside it. Times under emulation mean nothing.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from specserve.kernels.native import build

ACROSS, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")
HARNESS, EMULATED = Path(__file__).with_suffix(".cc"), Path(__file__).parent / "emulated"


def check(compiler: str, names: tuple[str, ...], flags: dict[str, tuple[str, ...]], *run: str) -> None:
    """Compile the kernels of these instruction sets and the harness, and run it. Files of tools/emulated stand in for
    those of the library and of the compiler where the processor is another."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for path in (
            *build.FOLDER.glob("*.h"),
            *build.FOLDER.glob("*.cc"),
            HARNESS,
            *(() if run else EMULATED.glob("*.h")),
        ):
            shutil.copy(path, folder)
        objects = []
        for source in (*(f"isa_{name}.cc" for name in names), HARNESS.name):
            of_source = flags.get(source.removesuffix(".cc").removeprefix("isa_"), ())
            objects.append(str(folder / f"{source}.o"))
            command = (compiler, *build.FLAGS, *of_source, "-I", scratch, "-c", str(folder / source), "-o", objects[-1])
            subprocess.run(command, check=True)
        program = str(folder / "check")
        subprocess.run((compiler, "-static", *objects, "-o", program), check=True)
        status = subprocess.run((*run, program), check=False).returncode
    if status:
        sys.exit(status)


def main() -> None:
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if not (shutil.which(ACROSS) and emulator):
        sys.exit(f"{ACROSS} or {EMULATORS[0]} is not here: apt install g++-aarch64-linux-gnu qemu-user-static")
    as_if = ("-D__F16C__",)  # float16 numbers are widened by an instruction
    flags: dict[str, tuple[str, ...]] = dict.fromkeys(("avx2", "avx512"), as_if)
    flags |= {"avxvnni": (*as_if, "-D__AVXVNNI__"), **dict.fromkeys(("vnni", "amx"), (*as_if, "-D__AVX512VNNI__"))}
    check("g++", tuple(flags), flags)
    check(ACROSS, ("neon", "dotprod"), {name: build.VARIANTS[name][1] for name in ("neon", "dotprod")}, emulator)


if __name__ == "__main__":
    main()
