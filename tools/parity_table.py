"""Print how far every family's forward is from transformers' (docs/parity.md): the largest difference of logits over a
prompt of 64 tokens, decoding token by token over pages, a tree of 8 nodes, and of the layers' outputs. Ling and Ring up
to 2.5 are compared with tests/support/bailing.py, plain NumPy.

Needs the `oracle` extra. Run from the checkout: `python tools/parity_table.py [case ...]`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import bailing  # pyright: ignore[reportMissingImports]
import parity  # pyright: ignore[reportMissingImports]


def row(case: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        is_plain = case in bailing.CASES
        both = (parity.plain_case if is_plain else parity.live_case)(case, Path(folder))
    prompt, decode, (chunks, tree) = parity.prompt(both), parity.decode(both, width=1), parity.tree(both)
    layers = max(each.layers for each in (prompt, decode, chunks))
    family = both.target.config.family
    cells = (f"{each:.1e}" for each in (prompt.logits, decode.logits, max(chunks.logits, tree.logits), layers))
    return f"| `{family}` | {case} | {np.abs(both.logits).max():.0f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("| family | case | largest logit | prompt | token by token | chunks and tree | layers |")
    print("|---|---|---|---|---|---|---|")
    for case in sys.argv[1:] or [*parity.RAWS, *bailing.CASES]:
        print(row(case), flush=True)
