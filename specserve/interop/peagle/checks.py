"""The checks of a P-EAGLE head's mask, beside those of its EAGLE-3 network."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from specserve.checkpoints.tensors import CONFIG
from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.peagle.config import NUM_SLOTS, PEagleConfig
from specserve.drafters.peagle.model import mask_spec
from specserve.interop.eagle3.checks import EagleFiles
from specserve.interop.eagle3.dialects import MASK_KEYS, mask_ids
from specserve.interop.findings import Dialect, Finding, put
from specserve.interop.peagle import dialects
from specserve.interop.peagle.catalogue import CHECKS, KEYS, SLOTS
from specserve.models.params import ParamSpec


class PEagleFiles(EagleFiles):
    """The files of a head with masked slots."""

    architectures: ClassVar[Mapping[Dialect, str]] = dict.fromkeys(EagleFiles.architectures, dialects.ARCHITECTURE)
    known: ClassVar[frozenset[str]] = EagleFiles.known | dialects.OWN

    def specs(self, config: Eagle3Config) -> list[ParamSpec]:
        return [*super().specs(config), mask_spec(PEagleConfig(config, mask_token_id=0, num_slots=0))]

    def facts(self) -> dict[str, str]:
        slots = dialects.num_slots(self.raw) or f"{NUM_SLOTS}, as it does not say"
        masks = ", ".join(map(str, dict.fromkeys(mask_ids(self.raw).values()))) or "not stated"
        return super().facts() | {"slots": f"{slots}; masked by token {masks}"}


def check_keys(files: PEagleFiles) -> Iterator[Finding]:
    """Check that every key of config.json is known, and every switch computed."""
    yield from dialects.check_keys(KEYS.read(files.raw, CONFIG))


def check_mask(files: PEagleFiles) -> Iterator[Finding]:
    """Check that the mask's token is stated once, where all engines look for it, and that the number of slots is
    stated."""
    ids, vocab_size = mask_ids(files.raw), files.stated.get("vocab_size")
    got = ", ".join(f"{key}: {value!r}" for key, value in ids.items()) or "nothing"
    value = next(iter(ids.values()), None)
    is_token = type(value) is int and value >= 0 and (type(vocab_size) is not int or value < vocab_size)
    is_flat = files.dialect != "speculators"
    if not is_token or len(set(map(str, ids.values()))) > 1:
        expected = f"one token id below {vocab_size}, under any of {', '.join(MASK_KEYS)}"
        yield CHECKS["mask-token"].found(CONFIG, expected, got)
    elif is_flat and ids.keys() == {"mask_token_id"}:  # in speculators' own layout vLLM reads that
        fix = put(**dict.fromkeys(dialects.WRITTEN_MASK_KEYS, value))
        yield CHECKS["mask-spelling"].found(CONFIG, f"ptd_token_id: {value}", got, fix)
    if dialects.num_slots(files.raw) is None:
        yield CHECKS["slots"].found(f"{CONFIG}: {SLOTS}", f"mostly {NUM_SLOTS}", "nothing")
