"""Measure models without an engine: what loading costs, a mixture of experts in each of its forms, and the products of
a step on a CPU (docs/log.md).

Run from the checkout: `python tools/bench_models.py load [GB]` (the `oracle` extra adds PyTorch's loader), or
`python tools/bench_models.py moe`, or `python tools/bench_models.py products`.
"""

import sys

from specserve.eval.bench_load import bench_load, load_lines
from specserve.eval.bench_moe import FORMS, measure_moe
from specserve.eval.bench_products import measure_products


def load(gigabytes: float = 2.0) -> None:
    for line in load_lines(bench_load(int(gigabytes * 1e9))):
        print(line)


def moe() -> None:
    names = [form.__name__ for form in FORMS]
    print(f"| d_model, experts, of them chosen, channels | tokens | {' | '.join(names)} |")
    print("|" + "---|" * (2 + len(names)))
    for row in measure_moe():
        experts = row.experts
        cells = (f"**{row.ms[name]:.2f}**" if name == row.chosen else f"{row.ms[name]:.2f}" for name in names)
        shape = f"{row.d_model}, {experts.num_experts}, {experts.top_k}, {experts.d_ff}"
        print(f"| {shape} | {row.num_tokens} | {' | '.join(cells)} |", flush=True)


def products() -> None:
    for i, row in enumerate(measure_products()):
        if not i:
            print(f"| rows | {' | '.join(row.ms)} |\n|{'---|' * (1 + len(row.ms))}")
        print(f"| {row.num_rows} | {' | '.join(f'{ms:.2f}' for ms in row.ms.values())} |", flush=True)


if __name__ == "__main__":  # the loads run in processes of their own, which import this file again
    match sys.argv[1:]:
        case ["load", *rest] if len(rest) < 2:
            load(*map(float, rest))
        case ["moe"]:
            moe()
        case ["products"]:
            products()
        case _:
            sys.exit(__doc__)
