"""The checks of a P-EAGLE head's mask, beside those of its EAGLE-3 network."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from specserve.checkpoints.tensors import CONFIG
from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.peagle.config import NUM_SLOTS, PEagleConfig
from specserve.drafters.peagle.model import mask_spec
from specserve.interop.eagle3.dialects import mask_ids, unsupported
from specserve.interop.eagle3.head_files import EagleFiles
from specserve.interop.findings import Copy, Dialect, Finding, read_checks
from specserve.interop.peagle import dialects
from specserve.models.params import ParamSpec

CHECKS = read_checks("""
[masked slots (P-EAGLE)]
unknown-keys error: keys that nothing is known of
  what they ask for is left out: the head is computed otherwise than it was trained
  by hand: remove them, if the head was trained without
unsupported-switch error: a switch of the layers that is not computed
  we refuse the head, and engines that do not know the switch compute another one
  by hand: export the head again without, if it was trained without
mask-token error: the token of masked slots is not stated, or stated twice, or no token of the target
  engines refuse the head, or fill its slots with a token that it never saw there
  by hand: write the id that the head was trained with
mask-spelling warning: the token of masked slots has no name that vLLM reads
  vLLM refuses the head
  fix: write it under that name too
slots warning: how many tokens one pass foresees is not stated
  slots beyond those that were trained foresee nothing: what they propose is verified in vain
  by hand: write the number of depths that the head was trained with
""")


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
    if unknown := dialects.unknown_keys(files.raw):
        yield CHECKS["unknown-keys"].found(CONFIG, "keys of a P-EAGLE head", ", ".join(unknown))
    if wrong := unsupported(files.raw):
        yield CHECKS["unsupported-switch"].found(CONFIG, "layers that see everything, without biases", ", ".join(wrong))


def check_mask(files: PEagleFiles) -> Iterator[Finding]:
    """Check that the mask's token is stated once, where all engines look for it, and that the number of slots is
    stated."""
    ids, vocab_size = mask_ids(files.raw), files.flat.get("vocab_size")
    got = ", ".join(f"{key}: {value!r}" for key, value in ids.items()) or "nothing"
    value = next(iter(ids.values()), None)
    is_token = type(value) is int and value >= 0 and (type(vocab_size) is not int or value < vocab_size)
    is_flat = files.dialect != "speculators"
    if not is_token or len(set(map(str, ids.values()))) > 1:
        expected = f"one token id below {vocab_size}, under any of {', '.join(dialects.MASK_KEYS)}"
        yield CHECKS["mask-token"].found(CONFIG, expected, got)
    elif is_flat and ids.keys() == {"mask_token_id"}:  # in speculators' own layout vLLM reads that

        def name(repaired: Copy) -> None:
            repaired.raw.update(dict.fromkeys(dialects.WRITTEN_MASK_KEYS, value))

        yield CHECKS["mask-spelling"].found(CONFIG, f"ptd_token_id: {value}", got, name)
    if dialects.num_slots(files.raw) is None:
        yield CHECKS["slots"].found(f"{CONFIG}: {dialects.SLOTS}", f"mostly {NUM_SLOTS}", "nothing")
