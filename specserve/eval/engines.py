"""Engines for measurements: over models that are loaded once, and without programs that no measurement runs."""

import dataclasses
import logging
from collections.abc import Callable

from specserve.checkpoints.source import resolve_head
from specserve.drafters.head import load_head
from specserve.drafters.notes import read_notes
from specserve.mesh import default_dtype
from specserve.provenance import fingerprint
from specserve.serve.engine import Engine
from specserve.serve.interface import DraftInfo
from specserve.serve.launch import Models, make_engine
from specserve.serve.settings import ServeRun

logger = logging.getLogger(__name__)


def with_draft(models: Models, draft: str) -> Models:
    """The same loaded target with another head. Raises ConfigError or CheckpointError."""
    folder = resolve_head(draft, "--draft")
    head, notes = load_head(folder, models.target, dtype=default_dtype(), mesh=models.mesh), read_notes(folder)
    trained_on, found = notes.get("target_fingerprint"), notes.get("acceptance", {})
    if trained_on and trained_on != models.fingerprint:
        logger.warning("%s was trained on other weights than those of %s", folder, models.name)
    return dataclasses.replace(
        models,
        head=head,
        head_fingerprint=fingerprint(folder),
        head_acceptance=found.get("accept_rate", ()),
        draft=DraftInfo(folder.name, found.get("tau")),
    )


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
    tuned_profile: str = "",
    on_warmup: Callable[[int, int, str], None] = lambda _done, _total, _name: None,
) -> Engine:
    """An engine for requests without constraints, compiled and not yet started. Raises ConfigError."""
    run = ServeRun(
        speculation=speculation,
        max_slots=num_slots,
        max_model_len=max_model_len,
        tuned_profile=tuned_profile,
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
