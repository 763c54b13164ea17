"""Engines for measurements: over models that are loaded once, and without programs that no measurement runs."""

from collections.abc import Callable

from specserve.serve.engine import Engine
from specserve.serve.launch import Models, make_engine
from specserve.serve.settings import ServeRun


def engine_pair(
    models: Models,
    speculation: str,
    *,
    num_slots: int,
    max_model_len: int,
    on_warmup: Callable[[int, int, str], None] = lambda _done, _total, _name: None,
) -> tuple[Engine, Engine]:
    """A plain and a speculative engine over one loaded target, compiled and not yet started."""
    plain, speculative = (
        measured_engine(models, each, num_slots=num_slots, max_model_len=max_model_len, on_warmup=on_warmup)
        for each in ("off", speculation)
    )
    return plain, speculative


def measured_engine(
    models: Models,
    speculation: str,
    *,
    num_slots: int,
    max_model_len: int,
    is_coupled: bool = True,
    on_warmup: Callable[[int, int, str], None] = lambda _done, _total, _name: None,
) -> Engine:
    """An engine for requests without constraints, compiled and not yet started. Raises ConfigError."""
    run = ServeRun(
        speculation=speculation,
        max_slots=num_slots,
        max_model_len=max_model_len,
        constrained=False,
        early_ready=False,
    )
    return make_engine(models, run, on_warmup, is_coupled=is_coupled)


def answering_engine(
    models: Models,
    speculation: str,  # changes no token; empty: auto where there is a head, else off
    *,
    num_slots: int,
    max_model_len: int,
    on_warmup: Callable[[int, int, str], None],
) -> Engine:
    """An engine for many answers to questions that are known beforehand, compiled and not yet started."""
    run = ServeRun(
        speculation=speculation or ("auto" if models.head else "off"),
        max_slots=num_slots,
        max_model_len=max_model_len,
        max_queue=2 * num_slots,
        constrained=False,
        early_ready=False,
    )
    return make_engine(models, run, on_warmup)
