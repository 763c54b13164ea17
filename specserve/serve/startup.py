"""Checks before a server serves: that its state fits into memory, and that its models compute finite numbers."""

import logging

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.errors import CheckpointError, ConfigError
from specserve.mesh import free_memory
from specserve.serve.engine.options import sampler_rows
from specserve.serve.programs.placement import state_bytes
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import Shapes
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.slot_state import StepConfig

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 8


def check_state_fits(config: StepConfig, shapes: Shapes, mesh: Mesh | None) -> None:
    """Say in one line what slots and cache take on each device and how much is free. Raises ConfigError, which says
    what would fit, where it is not enough; nothing has been allocated by then."""
    free = free_memory(mesh)

    def needed(num_slots: int, num_pages: int) -> int:
        windows = tuple((window, min(number, num_pages)) for window, number in shapes.windows)
        sizes = {"page_size": shapes.page_size, "max_pages": shapes.max_pages, "windows": windows}
        return state_bytes(config, mesh, num_slots, num_pages, **sizes)

    slots, pages, ranks = shapes.num_slots, shapes.pages_of_rank, shapes.num_ranks
    total, without_cache = needed(slots, pages), needed(slots, 0)
    where = " on each device" if ranks > 1 else ""
    asked = (
        f"{slots} slots of {shapes.max_model_len} tokens take {without_cache / 1e9:,.2f} GB and a cache of "
        f"{shapes.num_pages * shapes.page_size} tokens {(total - without_cache) / 1e9:,.2f} GB{where}; "
        f"{free / 1e9:,.2f} GB are free"
    )
    if total <= free:
        logger.info(asked)
        return
    one_page = needed(slots, 1)
    if one_page <= free:
        fitting = ranks * (1 + (free - one_page) // max(1, needed(slots, 2) - one_page))
        raise ConfigError(f"{asked}. --cache-tokens {fitting * shapes.page_size} fits, as fewer --max-slots may")
    fitting = (free - needed(0, 1)) // max(1, needed(2, 1) - needed(1, 1)) // ranks * ranks
    fix = f"--max-slots {fitting} --cache-tokens {ranks * shapes.page_size} fits"
    fix = fix if fitting > 0 else "not even one slot fits"
    raise ConfigError(f"{asked}. {fix}; a lower --max-model-len takes less")


def check_swap_fits(present: Runner, other: Runner) -> None:
    """Check that the state of a runner with another head fits in place of the present one's. The weights of both heads
    are in memory already. Raises ConfigError where the state is too large."""
    mesh, shapes = present.place.mesh, present.shapes
    sizes = {"page_size": shapes.page_size, "max_pages": shapes.max_pages}
    slots, pages = shapes.num_slots, shapes.pages_of_rank
    before, after = (
        state_bytes(runner.config, mesh, slots, pages, **sizes, windows=runner.shapes.windows)
        for runner in (present, other)
    )
    free = free_memory(mesh)
    if after - before > free:
        raise ConfigError(
            f"slots and cache take {before / 1e9:,.2f} GB now and {after / 1e9:,.2f} GB with this head, and "
            f"{free / 1e9:,.2f} GB are free; start a server with it and a smaller cache"
        )


def check_numbers(runner: Runner, target: Target) -> None:
    """Run a few tokens through the target, whose programs are compiled, in a slot that nobody has yet. Raises
    CheckpointError where its logits are not finite; it names the tensors. A head's are looked at when it is loaded."""
    token_ids = list(range(min(_PROBE_TOKENS, target.config.vocab_size, runner.shapes.max_model_len - 1)))
    pages = list(range(-(-len(token_ids) // runner.shapes.page_size)))
    if len(pages) > runner.shapes.pages_of_rank:
        return  # no prompt of this length is ever taken
    params = SamplingParams(temperature=0.0, logprobs=0)
    runner.admit(0, token_ids, pages, 0, sampler_rows(params, 0, len(token_ids)), None)
    result = runner.prefill([(0, len(token_ids), True)], has_logprobs=True).read()
    assert result.logprobs is not None
    if not np.isfinite(result.logprobs.chosen).all():
        target.check()
        raise CheckpointError(
            f"{target.folder}: all weights are finite, and the logits are not: numbers grow too large for "
            f"{target.config.dtype} on the way. Is config.json the config of another model?"
        )
