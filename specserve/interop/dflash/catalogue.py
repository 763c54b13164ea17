"""The catalogue of faults that the draft doctor knows in a block drafter's files, as data. `doctor` looks for them,
and `tools/list_checks.py` makes the table in docs/checkpoints.md of it."""

from functools import partial

from specserve.interop.findings import Check

_keys = partial(Check, "block drafters: keys")
SIZES = _keys(
    "block-sizes",
    "error",
    "the shape is not stated",
    why="no loader can build the head",
    by_hand="copy the keys from the config that the head was trained with; block_size counts the anchor's slot too",
)
UNKNOWN_KEY = _keys(
    "unknown-key",
    "error",
    "a key that nobody here knows",
    why="it may say how the head is computed: who passes over a window accepts a quarter",
    by_hand="take it out if it says nothing of how the head is computed",
)
STATED_TWICE = _keys(
    "stated-twice",
    "error",
    "{key} is stated in two places that disagree",
    why="some engines read the one, and some the other",
    by_hand="write in both what it was trained with",
)
UNCOMPUTED = _keys(
    "uncomputed",
    "error",
    "{key} asks for what is not computed here",
    why="we refuse the head rather than run another one",
    by_hand="serve it with an engine that computes it",
)
BLOCK_LAYERS = _keys(
    "block-layers",
    "error",
    "another number of layers is stated than there are tensors of",
    why="engines leave layers out, or run some whose weights are whatever is in memory there",
    repaired="write the number that the tensors are of",
    by_hand="find out which is wrong: tensors may be lost",
)
MASK_TOKEN = _keys(
    "mask-token",
    "error",
    "the mask token is none of the target's tokens",
    why="every slot but the anchor's is filled with the embedding of something else, or of nothing",
    by_hand="write the id that it was trained with; for Qwen3 that is a padding row behind the tokenizer's tokens",
)
_masks = partial(Check, "block drafters: windows and causality")
WINDOWS = _masks(
    "windows",
    "error",
    "windows that make no sense",
    why="they cannot be computed",
    by_hand="write layer_types with an entry for each layer, and sliding_window, no shorter than a block whose "
    "positions see what follows them",
)
FORGOTTEN_WINDOW = _masks(
    "forgotten-window",
    "error",
    "use_sliding_window is not true, beside layers that slide",
    why="transformers forgets the window then, so that the package `dflash` runs without",
    repaired="write true",
)
USE_SWA = _masks(
    "use-swa",
    "warning",
    "windows are stated by use_swa alone",
    why="vLLM reads it, SGLang and the package `dflash` run without windows",
    repaired="write layer_types, sliding_window and is_causal too",
)
ALL_CAUSAL = _masks(
    "all-causal",
    "warning",
    "sliding_window_non_causal is not true, beside layers without windows",
    why="vLLM makes all layers causal by it, those without windows too, which were trained to see the whole block",
    repaired="write true, which changes nothing where no layer has a window",
    by_hand="serve it with another engine than vLLM: the layout cannot say it",
)
SINKS = _masks(
    "sinks",
    "error",
    "attention sinks are there, attention_sink_bias is not",
    why="attention is computed without them",
    repaired="write dflash_config.attention_sink_bias: true",
)
_target = partial(Check, "block drafters: target")
OTHER_TARGET = _target(
    "other-target",
    "error",
    "a head for another target",
    why="it cannot be served with this one",
    by_hand="give the target that it was trained for (--target)",
)
TAPS = _target(
    "block-taps",
    "error",
    "taps that make no sense",
    why="the head cannot be fed",
    by_hand="count the target's layers again: target_layer_ids names outputs, aux_hidden_state_layer_ids inputs",
)
TAPS_UNSTATED = _target(
    "taps-unstated",
    "warning",
    "no taps are stated",
    why="every engine takes default ones, and speculators none",
    repaired="write the default ones of the package `dflash`",
)
TAPS_SLIPPED = _target(
    "taps-slipped",
    "warning",
    "tap ids look as if they were counted in the other layout",
    why="if they are, every tap is one layer off: acceptance falls, and nothing else shows",
    by_hand="compare the acceptance with both, and keep the better",
)
LAST_TAP = _target(
    "last-tap",
    "warning",
    "the last layer is tapped",
    why="transformers gives its state after the target's final norm, other engines before it",
    by_hand="find out with which it was trained; we take the state before the norm",
)
BLOCK_POSITIONS = _target(
    "block-positions",
    "error",
    "the head ends before the target does",
    why="vLLM crashes on prompts that are longer",
    repaired="write the target's",
)
BLOCK_ROPE = _target(
    "block-rope",
    "warning",
    "nothing is said about rotary embeddings",
    why="vLLM turns by theta 1,000,000, transformers by 10,000",
    repaired="write the target's",
    by_hand="give --target",
)
_tensors = partial(Check, "block drafters: tensors")
MISSING = _tensors(
    "block-missing",
    "error",
    "{name} is missing",
    why="it cannot be loaded",
    by_hand="download or export it again",
)
SHAPE = _tensors(
    "block-shape",
    "error",
    "{name} has another shape than config.json says",
    why="it cannot be loaded",
    by_hand="find out which is wrong: config.json may be that of another head",
)
UNKNOWN = _tensors(
    "block-unknown",
    "error",
    "{name} is no part of such a head",
    why="vLLM refuses the head; what it was trained for is lost",
    by_hand="remove it, if the head was trained without",
)
DRAFT_VOCABULARY = _tensors(
    "block-vocabulary",
    "error",
    "d2t and t2d do not say which tokens the rows of lm_head.weight are for",
    why="it would propose other tokens than it means",
    repaired="write offsets (target id = i + d2t[i])",
    by_hand="take both from the checkpoint that the head was trained with",
)

CATALOGUE = tuple(entry for entry in list(vars().values()) if isinstance(entry, Check))
