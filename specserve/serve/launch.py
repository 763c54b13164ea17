"""From the settings of a server to an engine: which target, which head, how large a cache."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specserve.checkpoints.head import Head, load_head, read_notes
from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.source import BUNDLED, BUNDLED_HEAD_FOLDER, resolve_target
from specserve.errors import ConfigError
from specserve.mesh import default_dtype
from specserve.provenance import fingerprint
from specserve.serve.engine import Engine
from specserve.serve.runner import Runner
from specserve.serve.settings import ServeRun
from specserve.speculative.tree import Tree, parse_speculation
from specserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LARGEST_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Models:
    """What a server runs. `head` is None where there is nothing to speculate with."""

    name: str
    target: Target
    head: Head | None
    tokenizer: Tokenizer


def load_models(target: str, draft: str) -> Models:
    """Find and load target and head; the head's notes know its target. Raises ConfigError or CheckpointError."""
    folder = _head_folder(target, draft)
    name = target
    notes = read_notes(folder) if folder else {}
    if not name:
        if folder and "target" not in notes:
            raise ConfigError(f"{folder} does not say which target it was trained for; give it with --target")
        name = str(notes.get("target", BUNDLED))
    source = resolve_target(name)
    loaded = load_target(source.folder, dtype=default_dtype())
    head = load_head(folder, loaded, dtype=default_dtype()) if folder else None
    trained_on = notes.get("target_fingerprint")
    if trained_on and trained_on != fingerprint(source.folder):
        logger.warning(
            "%s was trained on other weights than those in %s; its acceptance will be lower, its output is right "
            "all the same",
            folder,
            source.folder,
        )
    return Models(source.name, loaded, head, Tokenizer.load(source.folder))


def _head_folder(target: str, draft: str) -> Path | None:
    if draft:
        folder = Path(draft).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"--draft {draft}: no such folder; train a head first (specserve train --output {draft})")
        return folder
    return BUNDLED_HEAD_FOLDER if target in ("", BUNDLED) and BUNDLED_HEAD_FOLDER.is_dir() else None


def make_engine(models: Models, run: ServeRun, on_warmup: Callable[[int, int, str], None]) -> Engine:
    """Compile every program and build the engine (not started). `on_warmup(done, total, name)` reports."""
    tree = choose_tree(models, run.speculation)
    longest = run.max_model_len or min(models.target.config.max_len, LARGEST_DEFAULT_CONTEXT)
    if longest > models.target.config.max_len:
        raise ConfigError(f"--max-model-len {longest}: the target's context is {models.target.config.max_len}")
    if longest < 2:
        raise ConfigError("--max-model-len must be at least 2: one token to ask, one to answer")
    tokens = run.cache_tokens or run.max_slots * longest
    runner = Runner(
        models.target,
        models.head if tree else None,
        tree,
        num_slots=run.max_slots,
        max_model_len=longest,
        page_size=run.page_size,
        num_pages=-(-tokens // run.page_size),
    )
    for done, name in enumerate(runner.warmup(), start=1):
        on_warmup(done, runner.num_programs, name)
    return Engine(
        runner,
        models.tokenizer,
        model_name=models.name,
        eos_ids=models.target.eos_ids,
        max_queue=run.max_queue,
    )


def choose_tree(models: Models, speculation: str) -> Tree | None:
    """The tree to run, or none: speculation is off, or there is no head (said aloud)."""
    tree = parse_speculation(speculation)
    if tree is None or models.head is not None:
        return tree
    logger.warning("there is no draft head for %s: decoding plainly. Train one, or give it with --draft", models.name)
    return None
