"""The draft doctor of a P-EAGLE head's files. It makes the checks of an EAGLE-3 head's files, and those of the
mask."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG
from specserve.drafters.peagle.config import NUM_SLOTS
from specserve.interop.eagle3 import doctor
from specserve.interop.eagle3.dialects import mask_ids, unsupported
from specserve.interop.eagle3.head_files import EagleFiles
from specserve.interop.findings import Check, Copy, DoctorReport, Finding
from specserve.interop.peagle import dialects

_masks = partial(Check, "masked slots (P-EAGLE)")
UNKNOWN_KEYS = _masks(
    "unknown-keys",
    "error",
    "keys that nothing is known of",
    why="what they ask for is left out: the head is computed otherwise than it was trained",
    by_hand="remove them, if the head was trained without",
)
UNSUPPORTED = _masks(
    "unsupported-switch",
    "error",
    "a switch of the layers that is not computed",
    why="we refuse the head, and engines that do not know the switch compute another one",
    by_hand="export the head again without, if it was trained without",
)
MASK_TOKEN = _masks(
    "mask-token",
    "error",
    "the token of masked slots is not stated, or stated twice, or no token of the target",
    why="engines refuse the head, or fill its slots with a token that it never saw there",
    by_hand="write the id that the head was trained with",
)
MASK_SPELLING = _masks(
    "mask-spelling",
    "warning",
    "the token of masked slots has no name that vLLM reads",
    why="vLLM refuses the head",
    repaired="write it under that name too",
)
NUM_SLOTS_UNSTATED = _masks(
    "slots",
    "warning",
    "how many tokens one pass foresees is not stated",
    why="slots beyond those that were trained foresee nothing: what they propose is verified in vain",
    by_hand="write the number of depths that the head was trained with",
)
CATALOGUE = (UNKNOWN_KEYS, UNSUPPORTED, MASK_TOKEN, MASK_SPELLING, NUM_SLOTS_UNSTATED)


def examine(folder: Path, target: Target | None) -> DoctorReport:
    """Make all checks. Without a target, those that need one are left out. Raises CheckpointError where there is
    nothing to look at: no config.json, no whole safetensors file."""
    files = EagleFiles(folder, target, dialects.FAMILY)
    findings = [finding for check in (*doctor.CHECKS, _check_keys, _check_mask) for finding in check(files)]
    slots = dialects.num_slots(files.raw) or f"{NUM_SLOTS}, as it does not say"
    told = ", ".join(map(str, dict.fromkeys(mask_ids(files.raw).values()))) or "not stated"
    return doctor.report(files, findings, files.facts() | {"slots": f"{slots}; masked by token {told}"})


def _check_keys(files: EagleFiles) -> Iterator[Finding]:
    """Check that every key of config.json is known, and every switch computed."""
    if unknown := dialects.unknown_keys(files.raw):
        yield UNKNOWN_KEYS.found(CONFIG, "keys of a P-EAGLE head", ", ".join(unknown))
    if wrong := unsupported(files.raw):
        yield UNSUPPORTED.found(CONFIG, "layers that see everything, without biases", ", ".join(wrong))


def _check_mask(files: EagleFiles) -> Iterator[Finding]:
    """Check that the mask's token is stated once, where all engines look for it, and that the number of slots is
    stated."""
    ids, vocab_size = mask_ids(files.raw), files.flat.get("vocab_size")
    got = ", ".join(f"{key}: {value!r}" for key, value in ids.items()) or "nothing"
    value = next(iter(ids.values()), None)
    is_token = type(value) is int and value >= 0 and (type(vocab_size) is not int or value < vocab_size)
    is_flat = files.dialect != "speculators"
    if not is_token or len(set(map(str, ids.values()))) > 1:
        expected = f"one token id below {vocab_size}, under any of {', '.join(dialects.MASK_KEYS)}"
        yield MASK_TOKEN.found(CONFIG, expected, got)
    elif is_flat and ids.keys() == {"mask_token_id"}:  # in speculators' own layout vLLM reads that

        def name(repaired: Copy) -> None:
            repaired.raw.update(dict.fromkeys(dialects.WRITTEN_MASK_KEYS, value))

        yield MASK_SPELLING.found(CONFIG, f"ptd_token_id: {value}", got, name)
    if dialects.num_slots(files.raw) is None:
        yield NUM_SLOTS_UNSTATED.found(f"{CONFIG}: {dialects.SLOTS}", f"mostly {NUM_SLOTS}", "nothing")
