"""The names of drafters and of ways to speculate. It imports no arrays, so that a command's help is quick."""

from typing import Literal

# as `registry.KINDS` has them
KindName = Literal["eagle3", "p-eagle", "mtp", "dflash", "dspark", "dflash2"]
DEFAULT_KIND: KindName = "eagle3"
CARRIED: KindName = "mtp"  # in the place of a head's folder: the layer that the target's own checkpoint carries

Dialect = Literal["sglang", "vllm", "speculators", "sglang-jax"]  # engines whose layouts heads are written in

# of a head's weights where it runs: as they are stored, or with matrices rounded to 8 bits at load
DraftQuantization = Literal["none", "int8", "fp8"]
DRAFT_QUANTIZATIONS: tuple[DraftQuantization, ...] = ("none", "int8", "fp8")

OWN_TEXT, ALL_TEXT = "ngram", "suffix"  # lookups: the sequence alone is searched, or finished answers too
SHAPES = "chain:K, tree:DEPTHxTOPKxNODES (tree:4x4x12) or static:WIDTHxWIDTHx... (static:3x2x1)"
WAYS = (
    f"off; {SHAPES} by a head; {OWN_TEXT}:K (prompt lookup) or {ALL_TEXT}:K (recent answers too) without one; or "
    f"head+{OWN_TEXT}: or head+{ALL_TEXT}: before any of these shapes, for whichever promises more"
)
