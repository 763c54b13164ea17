"""What is known of the files of a P-EAGLE head beside those of its EAGLE-3 network: the keys of config.json, and the
faults that loaders refuse and the draft doctor reports."""

from specserve.interop.eagle3.catalogue import HEAD_KEYS, NETWORK_KEYS
from specserve.interop.eagle3.catalogue import KEYS as EAGLE3_KEYS
from specserve.interop.eagle3.dialects import MASK_KEYS
from specserve.interop.findings import read_checks
from specserve.interop.keys import LAYER, KeyTable, known

SLOTS = "num_depths"  # in the flat layout
_NETWORK = frozenset(key.name for key in NETWORK_KEYS)
_OTHERS = ("dflash_config", "parallel_drafting", "down_sample_ratio", "down_sample_ratio_min")
_KEYS = [*NETWORK_KEYS, *HEAD_KEYS, *known(*MASK_KEYS, SLOTS, *_OTHERS)]
KEYS = KeyTable(
    _KEYS,
    over=EAGLE3_KEYS.over,
    strict={"": frozenset(key.name for key in _KEYS), LAYER: _NETWORK, "dflash_config": frozenset({MASK_KEYS[0]})},
)


CHECKS = read_checks("""
[masked slots (P-EAGLE)]
unknown-keys error: keys that nothing is known of
  what they ask for is left out: the head is computed otherwise than it was trained
  by hand: remove them, if the head was trained without
  refused: {got}: keys that nothing is known of, so that the head might be computed otherwise than it was trained;
    remove them if the head was trained without
unsupported-switch error: a switch of the layers that is not computed
  we refuse the head, and engines that do not know the switch compute another one
  by hand: export the head again without, if it was trained without
  refused: {got}: no P-EAGLE head is computed so here; export it without
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
