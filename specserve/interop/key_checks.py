"""The checks of a head's config.json that are alike for all kinds whose keys are in a table: every key is known, stated
once, and asks for what is computed here. Loaders refuse what they find, and the draft doctor reports it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from specserve.checkpoints.tensors import CONFIG
from specserve.errors import ConfigError
from specserve.interop.findings import FAULTS, LAYERS, Finding, put, refuse
from specserve.interop.keys import OLD_ROPE, ROPE, ROTARY, SCALING, SLIDING, Stated, architectures, is_count, within
from specserve.interop.repairs import write_rope
from specserve.models.families.table import model_config
from specserve.models.rope import Rope

CHECKS = FAULTS["keys"]

_OF_HEADS = re.compile("(?i)eagle|draft|spark|flash|speculator|mtp|nextn|medusa|domino")
_ROTARY = frozenset((*ROTARY, *SCALING))
ROPE_KEYS = ("rope_theta", OLD_ROPE, ROPE)


def check_named(stated: Stated) -> Iterator[Finding]:
    """Check that a head that is named after a kind of heads is named after this one. Trainers also leave the name of
    the target's class, which says nothing."""
    table = stated.table
    for name in sorted(architectures(stated.raw) - table.classes):
        if _OF_HEADS.search(name):
            yield uncomputed("architectures", name, " or ".join(sorted(table.classes)))
    model_type = stated.raw.get("speculators_model_type")
    if model_type is not None and str(model_type) not in table.model_types:
        yield uncomputed("speculators_model_type", model_type, " or ".join(sorted(table.model_types)))


def check_known(stated: Stated) -> Iterator[Finding]:
    """Check that every key is known."""
    every = ", ".join(stated.unknown)
    for path, value in stated.unknown.items():
        yield CHECKS["unknown-key"].found(f"{CONFIG}: {path}", "a key of the layout", repr(value), every=every)


def check_stated_once(stated: Stated) -> Iterator[Finding]:
    """Check that no key but the rotary ones is stated in places that disagree."""
    for key, values in stated.contradictions().items():
        if key not in _ROTARY:
            yield stated_twice(key, values)


def stated_twice(key: str, values: Mapping[str, Any]) -> Finding:
    """Return the fault of values, by path, that disagree."""
    return CHECKS["stated-twice"].found(f"{CONFIG}: {key}", "the same", _listed(values), key=key)


def check_computed(stated: Stated) -> Iterator[Finding]:
    """Check that no key asks for what is not computed."""
    for path, (value, key) in stated.uncomputed().items():
        yield uncomputed(path, value, key.expected)


def uncomputed(path: str, value: Any, expected: str) -> Finding:
    """Return the fault of a value that is not computed here."""
    return CHECKS["uncomputed"].found(f"{CONFIG}: {path}", expected, repr(value), key=path)


def check_sizes(wrong: Mapping[str, Any], expected: str = "positive whole numbers") -> Iterator[Finding]:
    """Check that no key is wrong from which the head's shape follows; None is a missing one."""
    if wrong:
        got = ", ".join(f"{key}: {value!r}" for key, value in wrong.items())
        named = ", ".join(
            f"{key} is missing" if value is None else f"{key} is {value!r}" for key, value in wrong.items()
        )
        yield CHECKS["config-keys"].found(CONFIG, expected, got, named=named)


def check_mask_token(stated: Stated) -> Iterator[Finding]:
    """Check that the token of masked slots is one of the target's."""
    key, vocab_size = "mask_token_id", stated.get("vocab_size")
    mask = stated.get(key)
    if is_count(vocab_size) and (type(mask) is not int or not 0 <= mask < vocab_size):
        got = _listed(stated.found.get(key, {})) or "not stated"
        yield FAULTS["masks"]["mask-token"].found(
            f"{CONFIG}: {key}", f"a token of the target's, 0..{vocab_size - 1}", got
        )


def check_windows(stated: Stated, read: Callable[[Stated], object]) -> Iterator[Finding]:
    """Check that the windows can be read, and that no reader forgets them. `read` raises ConfigError."""
    try:
        read(stated)
    except ConfigError as error:
        got = str(error).removeprefix(f"{stated.where}: ")
        yield CHECKS["windows"].found(CONFIG, "a window for every layer that slides", got)
        return
    if SLIDING in stated.get("layer_types", ()) and not stated.get("use_sliding_window", False):
        got, fix = repr(stated.get("use_sliding_window")), put(LAYERS, use_sliding_window=True)
        yield CHECKS["forgotten-window"].found(f"{CONFIG}: use_sliding_window", "true", got, fix)


OF_ALL = (check_named, check_known, check_stated_once, check_computed)


def refuse_keys(stated: Stated, checks: Iterable[Callable[[Stated], Iterable[Finding]]]) -> None:
    """Raise ConfigError for the first fault with which loaders refuse a head."""
    for check in (*checks, check_rotary):
        refuse(check(stated), stated.where)


def check_rotary(stated: Stated, required: Rope | None = None) -> Iterator[Finding]:
    """Check that the rotary settings can be read, and are stated once. `required` are the target's, if it is known."""
    values = {path: each for key, at in stated.contradictions().items() if key in _ROTARY for path, each in at.items()}
    got = _listed(values)
    try:
        stated.rope()
    except ConfigError as error:
        got = got or str(error).removeprefix(f"{stated.where}: ")
    if got:
        fix = write_rope(required) if required and required in stated.ropes() else None
        yield CHECKS["rope-spellings"].found(f"{CONFIG}: {', '.join(ROPE_KEYS)}", "both spellings, alike", got, fix)


def _listed(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{path}: {value!r}" for path, value in values.items())


def is_read(raw: Mapping[str, Any], key: str) -> bool:
    """Return whether the reader of a target's config.json reads a key: it does not take nonsense in its place. Windows
    of which it is said that there are none, and rotary settings that `rope_parameters` repeats, need not be read."""
    if key in ("use_sliding_window", "sliding_window") and raw.get("use_sliding_window") is False:
        return True
    if (key == "layer_types" and SLIDING not in str(raw[key])) or within(raw, ROPE, key) == raw[key]:
        return True
    try:
        return model_config({**raw, key: object()}, dtype="float32") != model_config(raw, dtype="float32")
    except (ConfigError, AttributeError, TypeError, ValueError):
        return True
