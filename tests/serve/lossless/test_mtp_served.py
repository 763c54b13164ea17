"""The layer of multi-token prediction, served: no token changes, and a prefix hit accepts what a miss does."""

import random
from pathlib import Path
from typing import Any

import carried
import pytest
from engines import (
    SEEDS,
    VOCAB,
    Ask,
    Fixed,
    Reference,
    compile_programs,
    make_engine,
    make_runner,
    moved_weights,
    run,
    serving,
)

from specserve.drafters.speculation import parse_speculation
from specserve.serve.requests.request import SamplingParams

PROMPT = tuple(random.Random(8).choices(range(3, VOCAB), k=41))
# greedy, and sampled hot, where the shared noise decides: there even a random layer is accepted
PARAMS = [
    SamplingParams(max_tokens=30, seed=seed, temperature=temperature, ignore_eos=True)
    for seed, temperature in ((0, 0.0), (1, 2.0), (2, 2.0))
]


@pytest.mark.parametrize(
    ("raw", "speculation"),
    [
        pytest.param(carried.SMALL, "tree:3x2x6", id="dense, tree"),
        pytest.param(carried.LATENT, "tree:3x2x6", id="latents and experts, tree", marks=pytest.mark.slow),
        pytest.param(carried.WINDOWED, "chain:3", id="windows, chain", marks=pytest.mark.slow),
        pytest.param(carried.GLM, "tree:3x2x6", id="biases and experts, tree", marks=pytest.mark.slow),
        pytest.param(carried.NEXT, "tree:3x2x6", id="beside recurrent layers, tree", marks=pytest.mark.slow),
        pytest.param(carried.NEXT_DENSE, "tree:3x2x6", id="Qwen3.5, tree"),
        pytest.param(carried.NEXT_SPARSE, "chain:3", id="Qwen3.5 with experts, chain", marks=pytest.mark.slow),
        pytest.param(carried.MIMO, "tree:3x2x6", id="before the final norm, tree", marks=pytest.mark.slow),
        pytest.param(carried.MIMO_V2, "tree:3x2x6", id="heads of two widths, tree", marks=pytest.mark.slow),
        pytest.param(carried.NEMOTRON_H, "tree:3x2x6", id="beside Mamba, tree", marks=pytest.mark.slow),
        pytest.param(carried.INDEXED, "tree:3x2x6", id="latents that an indexer chooses", marks=pytest.mark.slow),
        pytest.param(carried.POOLS, "tree:3x2x6", id="pools in one stream, tree", marks=pytest.mark.slow),
        pytest.param(carried.STREAMS, "tree:3x2x6", id="several streams, tree", marks=pytest.mark.slow),
        pytest.param(carried.COMPRESSED, "tree:3x2x6", id="streams over a window, tree"),
        pytest.param(carried.LING_2_5, "tree:3x2x6", id="latents beside lightning, tree", marks=pytest.mark.slow),
    ],
)
def test_speculation_changes_no_token_and_a_hit_no_acceptance(
    tmp_path: Path, kept: Path | None, raw: dict[str, Any], speculation: str
) -> None:
    """Prompts of one chunk and of three, asked twice: the second time all but a rest is in the cache, where there is
    one."""
    target, head = carried.models(tmp_path, raw)
    runner = make_runner(target, head, speculation, has_constrained=False, folder=kept)
    compile_programs(runner)
    reference, accepted = Reference(target, kept), 0
    with reference.engine, serving(make_engine(runner, Fixed(parse_speculation(speculation)))) as engine:
        asks = reference.firm(Ask(PROMPT[: 41 - 13 * i], params) for i, params in enumerate(PARAMS))
        for ask in asks:
            expected = reference.answer(ask)
            engine.flush_cache()
            found = [run(engine, [ask])[0] for _ in range(2)]
            first, second = (inbox.wait().stats for inbox in found)
            assert first is not None
            assert second is not None
            assert found[0].token_ids == found[1].token_ids == expected.token_ids
            num_cached = 0 if target.config.is_recurrent else (len(ask.prompt) - 1) // 8 * 8
            assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_cached)
            said = expected.token_ids, first.num_steps, first.accepted_per_depth
            for seed in SEEDS[:1]:
                engine.flush_cache()
                with moved_weights(runner, target, head, seed):
                    again = run(engine, [ask])[0]
                moved = again.wait().stats
                assert moved is not None
                assert (again.token_ids, moved.num_steps, moved.accepted_per_depth) == said, f"{ask}: a near-tie"
            assert (second.num_steps, second.accepted_per_depth) == said[1:]
            accepted += first.num_accepted
    assert accepted > 0, "nothing was accepted, so nothing was tested"
