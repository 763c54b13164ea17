"""What a mixture of experts costs in each of its forms: one layer with random weights, on whatever device runs it.

Run from the checkout: `python benchmarks/experts.py`. The table has milliseconds, and at the end the form that
the model takes.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
from served_flags import device

from specserve.models.config import Experts, ModelConfig
from specserve.models.moe import Form, all_experts, by_blocks, choose_form, moe, moe_spec, sorted_by_expert
from specserve.models.params import init_params

FORMS: tuple[Form, ...] = (all_experts, sorted_by_expert, by_blocks)  # every backend computes them, with a gradient
SHAPES = (  # d_model, experts
    (32, Experts(num_experts=8, top_k=2, d_ff=16)),
    (512, Experts(num_experts=8, top_k=2, d_ff=1024)),
    (512, Experts(num_experts=64, top_k=8, d_ff=256)),
)
TOKEN_COUNTS = (1, 8, 64, 512)
PATIENCE = 2.0  # seconds for each form, after which it is not timed again


@dataclass(frozen=True)
class MoeTimes:
    """What one shape took with so many tokens."""

    d_model: int
    experts: Experts
    num_tokens: int
    ms: dict[str, float]  # by form: the median of its calls, routing included
    chosen: str  # the form that `moe` takes


def measure_moe(
    shapes: Sequence[tuple[int, Experts]] = SHAPES,
    token_counts: Sequence[int] = TOKEN_COUNTS,
    *,
    repeats: int = 25,
    dtype: str = "float32",
) -> Iterator[MoeTimes]:
    """Time every form of the layer for each shape and number of tokens: those of every backend, and the one that this
    backend takes.

    The forms take turns, call by call, in alternating order. Every turn has other tokens, hence other experts: as in
    a model, whose other layers leave nothing of this one in the caches."""
    compute = jax.jit(moe, static_argnums=(1, 3))
    for d_model, experts in shapes:
        config = ModelConfig("bench", 1, d_model, 1, 1, 1, d_model, experts.d_ff, 1, experts=experts, dtype=dtype)
        params = init_params(moe_spec(config, "layer"), jax.random.key(0), dtype)
        for num_tokens in token_counts:
            chosen = choose_form(experts, num_tokens, jax.default_backend())
            forms = tuple(dict.fromkeys((*FORMS, chosen)))
            turns = list(jax.random.normal(jax.random.key(1), (repeats, num_tokens, d_model), dtype))
            times: dict[str, list[float]] = {form.__name__: [] for form in forms}
            for form in forms:
                compute(params, config, turns[0], form).block_until_ready()  # compiles
            for i, x in enumerate(turns):
                for form in forms[:: 1 if i % 2 else -1]:
                    if sum(times[form.__name__]) < PATIENCE:
                        start = time.perf_counter()
                        compute(params, config, x, form).block_until_ready()
                        times[form.__name__].append(time.perf_counter() - start)
            ms = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
            yield MoeTimes(d_model, experts, num_tokens, ms, chosen.__name__)


def main() -> None:
    """Print the table, row by row as it is measured."""
    names = [form.__name__ for form in FORMS]
    print(f"{device()}\n")
    print(f"| d_model, experts, of them chosen, channels | tokens | {' | '.join(names)} | taken |")
    print("|" + "---|" * (3 + len(names)))
    for row in measure_moe():
        experts = row.experts
        cells = [*(f"{row.ms[name]:.2f}" for name in names), f"{row.chosen}: {row.ms[row.chosen]:.2f}"]
        shape = f"{row.d_model}, {experts.num_experts}, {experts.top_k}, {experts.d_ff}"
        print(f"| {shape} | {row.num_tokens} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
