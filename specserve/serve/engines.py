"""The models that settings name, and engines for measurements over them, without programs that no measurement
runs."""

import logging
from collections.abc import Callable

from specserve.drafters.registry import CARRIED
from specserve.interop.bundled import resolve_head
from specserve.mesh import SERVING_AXES, in_equal_parts, parse_mesh, program_platform
from specserve.serve.engine.engine import Engine
from specserve.serve.launch import Models, load_beside, load_models, make_engine
from specserve.serve.settings import ServeRun, TargetRun

logger = logging.getLogger(__name__)

BUSY_SLOTS = 8  # of an engine that answers; with as many a CPU computes whatever it verifies


def load(run: TargetRun | ServeRun, draft: str, *, has_tokenizer: bool = True, is_checked: bool = False) -> Models:
    """Load the target that the settings of a command or a server name, with a head. Raises ConfigError or
    CheckpointError."""
    return load_models(
        run.target,
        draft,
        has_tokenizer=has_tokenizer,
        quantization=run.quantization,
        draft_quantization=run.draft_quantization,
        is_checked=is_checked,
        mesh=parse_mesh(run.mesh, SERVING_AXES),
    )


def with_draft(models: Models, draft: str) -> Models:
    """Return the same loaded target with another head. Raises ConfigError or CheckpointError."""
    return load_beside(models, draft, models.target.folder if draft == CARRIED else resolve_head(draft, "--draft"))


def measured_engine(
    models: Models,
    speculation: str,
    *,
    num_slots: int,  # at least: over a mesh, as many as its data ranks share out evenly
    max_model_len: int,
    is_coupled: bool = True,
    hidden_states: tuple[int, ...] = (),  # layers, as of `serve`; none: the engine returns no states of prompts
    on_warmup: Callable[[int, int, str], None] = lambda _done, _total, _name: None,
) -> Engine:
    """An engine for requests without constraints, compiled and not yet started. Raises ConfigError."""
    run = ServeRun(
        speculation=speculation,
        max_slots=in_equal_parts(models.mesh, "batch", num_slots),
        max_model_len=max_model_len,
        constrained=False,
        early_ready=False,
        hidden_states=hidden_states,
    )
    return make_engine(models, run, on_warmup, is_coupled=is_coupled, has_scoring=bool(hidden_states))


def answering_engine(
    models: Models,
    speculation: str,  # changes no token; empty: auto where there is a head and it may pay, else off
    *,
    num_slots: int,
    max_model_len: int,
    on_warmup: Callable[[int, int, str], None],
) -> Engine:
    """An engine for many answers to questions that are known beforehand, compiled and not yet started."""
    # for so many at once no draft pays on a CPU, and its programs take minutes to compile
    may_pay = models.head and (num_slots < BUSY_SLOTS or program_platform() != "cpu")
    if models.head and not (speculation or may_pay):
        logger.info(
            "%d answers at once are made without the draft head: on a CPU it costs more than it brings from %d on; "
            "--speculation auto takes it all the same",
            num_slots,
            BUSY_SLOTS,
        )
    run = ServeRun(
        speculation=speculation or ("auto" if may_pay else "off"),
        max_slots=num_slots,
        max_model_len=max_model_len,
        max_queue=max(8, 2 * num_slots),  # two calls at once are sent ahead of one slot too
        constrained=False,
        early_ready=False,
    )
    return make_engine(models, run, on_warmup, has_scoring=False)
