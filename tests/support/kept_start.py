"""A start of a server of each kind of model, as a process of its own: `kept_start.py FOLDER MODEL...` prints the tokens
that every model gives, and how many programs were lowered for them. Programs are kept in the folder."""

import json
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from engines import make_runner
from spread import head_of, target_of

from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.options import sampler_rows
from specserve.serve.programs.calls import Call
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams

PROMPT = [5, 9, 11, 5, 9, 11, 5, 9]


def answers(runner: Runner) -> list[np.ndarray]:
    """Return what one sequence gets, of a prompt, a plain step and two of a chain, and the state after them. Steps
    update the cache in place."""
    runner.admit(0, PROMPT, range(4), 0, sampler_rows(SamplingParams(temperature=0.0), 0), None)
    place = jax.tree.leaves(runner.state.cache)[0]
    places = [shard.data.unsafe_buffer_pointer() for shard in place.addressable_shards]
    found = [runner.prefill([(0, len(PROMPT), True)]).read().token_ids]
    found += [runner.step((0,), tree).read().token_ids for tree in (None, *[parse_speculation("chain:3")] * 2)]
    new = jax.tree.leaves(runner.state.cache)[0]
    assert [shard.data.unsafe_buffer_pointer() for shard in new.addressable_shards] == places, "the cache was copied"
    return [*found, *map(np.asarray, jax.tree.leaves(runner.state))]


def main(folder: str, *models: str) -> None:
    jax.config.update("jax_enable_compilation_cache", False)  # programs that it has are not kept once more
    for model in models:
        target, head = target_of(model), head_of(model)
        runner = make_runner(target, head, "chain:3", "off", has_constrained=False, folder=Path(folder))
        with mock.patch.object(Call, "lower", autospec=True, side_effect=Call.lower) as lower:
            tokens = [each.tolist() for each in answers(runner)[:4]]
        print(json.dumps({"model": model, "tokens": tokens, "lowered": lower.call_count}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
