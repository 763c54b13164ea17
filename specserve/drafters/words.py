"""The spellings of speculation settings. It imports no arrays, so that a command's help is quick."""

OWN_TEXT, ALL_TEXT = "ngram", "suffix"  # lookups: the sequence alone is searched, or finished answers too
SHAPES = "chain:K, tree:DEPTHxTOPKxNODES (tree:4x4x12) or static:WIDTHxWIDTHx... (static:3x2x1)"
SPECULATIONS = (
    f"off; {SHAPES} by a head; {OWN_TEXT}:K (prompt lookup) or {ALL_TEXT}:K (recent answers too) without one; or "
    f"head+{OWN_TEXT}: or head+{ALL_TEXT}: before any of these shapes, for whichever promises more"
)
