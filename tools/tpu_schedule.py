"""How many instructions a TPU's compiler makes of the products with 4-bit weights, without a TPU.

    pip install libtpu     # of JAX's version
    python tools/tpu_schedule.py v5e:2x2 v6e:2x2 --rows 8,32,256

A program of the kernel is one run of instruction words, which take a cycle each, so their number is the least that a
chunk of weights takes. On a v5e at 1.5 GHz 1,200 of them pass while the bytes of a million weights in groups of 32 are
read, and 1,920 while those of 8 bits are. libtpu's flags for its schedule are not documented and may change.
"""

import argparse
import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

SCHEDULE = "*multiply_words*final_hlo-static-per-bundle-utilization.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="+", help="slices as libtpu names them, such as v5e:2x2")
    parser.add_argument("--rows", default="8,32,256", help="rows of a product, a list (%(default)s)")
    parser.add_argument("--numbers", default="uint4,int4,fp4", help="kinds of numbers, a list (%(default)s)")
    parser.add_argument("--block", type=int, default=32, help="inputs that share a scale (%(default)s)")
    parser.add_argument("--inputs", type=int, default=4096, help="of the matrix (%(default)s)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="schedule-"))
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    print("| device | numbers | rows | words of instructions for a million weights | vector unit busy |")
    print("|---|---|---:|---:|---:|")
    for device in options.devices:
        for numbers in options.numbers.split(","):
            for rows in map(int, options.rows.split(",")):
                words, share = measure(folder, device, numbers, rows, options.block, options.inputs)
                print(f"| {device} | {numbers} | {rows} | {words:,.0f} | {share:.0%} |", flush=True)


def measure(folder: Path, device: str, numbers: str, rows: int, block: int, d_in: int) -> tuple[float, float]:
    """Compile a product; return its instruction words for a million weights, and the share of them that the vector unit
    fills."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from specserve.kernels import nibbles, nibbles_tpu
    from specserve.plan.ahead import describe

    described, d_out = describe(device), 16 * nibbles_tpu.COLUMNS
    place = SingleDeviceSharding(described.devices[0])

    def array(*shape: int, dtype: str = "uint32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    in_words: Any = functools.partial(nibbles.in_words, block=block, numbers=numbers)  # type: ignore
    of_blocks = array(d_in // block, d_out, dtype="float32")
    made = jax.eval_shape(in_words, array(d_in, d_out, dtype="int8"), of_blocks, of_blocks)
    weight = jax.tree.map(lambda each: array(*each.shape), made)
    for old in folder.iterdir():
        old.unlink()
    with described.made_for():
        jax.jit(nibbles_tpu.multiply).lower(array(rows, d_in, dtype="bfloat16"), weight).compile()
    (file,) = folder.glob(SCHEDULE)
    kinds, text = file.read_text().split("== UTILIZATION:")
    names, capacity = kinds.strip().splitlines()[-2:]
    unit = [name.strip() for name in names.split(",")].index("VALU")
    used = [list(map(int, line.split())) for line in text.splitlines() if re.fullmatch(r"[\d ]+", line)]
    share = sum(each[unit] for each in used) / (len(used) * int(capacity.split()[unit]))
    return len(used) * 2**20 / (made.chunk * nibbles_tpu.COLUMNS), share


if __name__ == "__main__":
    main()
