"""The catalogue of faults that the draft doctor knows in an EAGLE-3 head's files, as data. The functions of
`checks_files` and `checks_meaning` look for them, and `tools/list_checks.py` makes the table in docs/checkpoints.md of
it."""

from dataclasses import replace
from functools import partial

from specserve.interop import values
from specserve.interop.findings import Check

_keys = partial(Check, "keys")
CONFIG_KEYS = _keys(
    "config-keys",
    "error",
    "the shape is not stated",
    why="no loader can build the head",
    by_hand="copy them from the config that the head was trained with",
)
DRAFT_VOCAB_SIZE = _keys(
    "draft-vocab-size",
    "error",
    "draft_vocab_size is not stated",
    why="loaders take the head's rows for the target's whole vocabulary",
    repaired="write the number of rows of lm_head.weight",
)
LAYERS = _keys(
    "layers",
    "error",
    "another number of layers is stated than there are tensors of",
    why="engines leave layers out, or run some whose weights are whatever is in memory there",
    repaired="write the number that the tensors are of",
    by_hand="find out which is wrong: tensors may be lost",
)
ARCHITECTURE_MISSING = _keys(
    "architecture",
    "error",
    "not named as an EAGLE-3 head",
    why="engines pick the model class by this name: they refuse it, or build a whole language model",
    repaired="name it",
)
ARCHITECTURE_UNKNOWN = replace(ARCHITECTURE_MISSING, level="warning")
MODEL_TYPE = _keys(
    "model-type",
    "error",
    "model_type is missing",
    why="transformers cannot tell which config class to read it with",
    repaired="write it",
)
TIED = _keys(
    "tied",
    "error",
    "tie_word_embeddings is true",
    why="loaders ignore lm_head.weight and the draft vocabulary, and propose from the embedding",
    repaired="write false",
)
IGNORED_SWITCH = _keys(
    "ignored-switch",
    "warning",
    "a switch of the layer that no EAGLE-3 head is computed with here",
    why="windows and biases are left out, here and in SGLang; vLLM has some of them, so that it accepts another share",
    by_hand="take it out, if the head was trained without",
)
_speculators = partial(Check, "keys of speculators")
IMPLICIT_FLAG = _speculators(
    "implicit-flag",
    "warning",
    "norm_before_residual is not stated",
    why="vLLM then assumes true, the speculators package and we assume false: one of them computes another head",
    by_hand="write what the head was trained with",
)
SPECULATORS_CONFIG = _speculators(
    "speculators-config",
    "error",
    "speculators_config is not whole",
    why="vLLM refuses the head",
    by_hand="import it and export it again: `specserve export --to speculators` writes all of it",
)
_target = partial(Check, "target")
VOCABULARY_SIZE = _target(
    "vocabulary-size",
    "error",
    "a head for another target",
    why="it cannot be served with this one",
    by_hand="give the target that it was trained for (--target)",
)
TARGET_WIDTH = replace(VOCABULARY_SIZE, code="target-width")
EMBEDDING = _target(
    "embedding",
    "error",
    "a head of its own width without an embedding of its own",
    why="the target's embedding has width {width}, so there is none to share",
    by_hand="export the head again, with embed_tokens.weight",
)
MAX_POSITIONS = _target(
    "max-positions",
    "error",
    "the head ends before the target does",
    why="vLLM crashes on prompts that are longer",
    repaired="write the target's",
)
_tensors = partial(Check, "tensors")
NAMES = _tensors(
    "names",
    "error",
    "{count} tensors have another engine's names",
    why="SGLang leaves out what it does not know, vLLM refuses it",
    repaired="rename them",
)
NORM_FLAG = _tensors(
    "norm-flag",
    "error",
    "the tensors of {flag} are there, the flag is not",
    why="the head is computed without norms that it was trained with: nearly nothing is accepted",
    repaired="write {flag}: true",
)
MISSING_TENSOR = _tensors(
    "missing-tensor",
    "error",
    "{name} is missing",
    why="SGLang goes on with whatever is in memory there, vLLM with ones or an error",
    by_hand="download or export it again; write false for the flag that asks for it, if the head was trained without",
)
SHAPE = _tensors(
    "shape",
    "error",
    "{name} has another shape than config.json says",
    why="it cannot be loaded",
    by_hand="find out which is wrong: config.json may be that of another head",
)
UNKNOWN_TENSOR = _tensors(
    "unknown-tensor",
    "error",
    "{name} is no part of such a head",
    why="SGLang leaves it out, vLLM refuses the head; what it was trained for is lost",
    by_hand="remove it, if the head was trained without",
)
WEIGHT_DTYPE = _tensors(
    "weight-dtype",
    "error",
    "weights that are no 16 or 32 bit floats",
    why="EAGLE-3 loaders would read the numbers as they stand, without scales",
    by_hand="export the head again in bfloat16",
)
MIXED_DTYPES = _tensors(
    "mixed-dtypes",
    "warning",
    "weights of several dtypes",
    why="engines cast all to one of them, and not to the same",
    by_hand="`specserve import --dtype` writes all in one",
)
DTYPE = _tensors(
    "dtype",
    "warning",
    "the dtype that is stated is not that of the weights",
    why="engines then load the head in float32 or in the target's dtype",
    repaired="state that of the weights",
)
NOT_FINITE, ALL_ZERO, WEIGHT_RANGE = values.NOT_FINITE, values.ALL_ZERO, values.WEIGHT_RANGE
_layer = partial(Check, "the layer")
HIDDEN_ACT = _layer(
    "hidden-act",
    "error",
    "an activation that is not computed",
    why="we refuse the head, and engines that run it with silu compute another head",
    by_hand="write silu if the head was trained with it, as all published ones were",
)
EPS = _layer(
    "eps",
    "error",
    "rms_norm_eps makes no sense",
    why="norms divide by it instead of by what they norm: nearly nothing is accepted",
    by_hand="write what the head was trained with, mostly the target's",
)
EPS_DIFFERS = _layer(
    "eps-differs",
    "warning",
    "another rms_norm_eps than the target's",
    why="right only if the head was trained so; if not, small states are scaled otherwise",
    by_hand="compare with what it was trained with",
)
_vocabulary = partial(Check, "vocabulary")
VOCABULARY = _vocabulary(
    "vocabulary",
    "error",
    "d2t does not say what the draft's rows stand for",
    why="proposals are other tokens than the head means: nothing is accepted",
    by_hand="take d2t from the checkpoint that the head was trained with",
)
D2T_MISSING = _vocabulary(
    "d2t-missing",
    "error",
    "d2t is missing",
    why="engines take the draft's rows for the first tokens of the vocabulary: nothing is accepted",
    repaired="derive it from t2d",
)
ABSOLUTE_D2T = _vocabulary(
    "absolute-d2t",
    "error",
    "d2t holds absolute token ids",
    why="engines add i to each: proposals are other tokens than the head means, and nothing is accepted",
    repaired="subtract i from each",
)
UNSORTED_D2T = _vocabulary(
    "unsorted-d2t",
    "error",
    "the draft's rows are not in the order of their tokens",
    why="code that pairs the rows with nonzero(t2d), trainers above all, takes them for other tokens",
    repaired="sort d2t, and the rows of lm_head.weight with it",
    by_hand="give lm_head.weight as many rows as d2t has; both are sorted together then",
)
D2T_DTYPE = _vocabulary(
    "d2t-dtype",
    "warning",
    "d2t is not in int64",
    why="torch refuses to index with most other dtypes",
    repaired="cast it",
)
T2D_MISSING = _vocabulary(
    "t2d-missing",
    "warning",
    "t2d is missing",
    why="engines that serve do without, trainers cannot continue from it",
    repaired="derive it from d2t",
)
T2D_DISAGREES = _vocabulary(
    "t2d-disagrees",
    "error",
    "t2d and d2t name different tokens",
    why="one of them is of another head: engines go by d2t, trainers by t2d",
    by_hand="take both from the checkpoint that the head was trained with; if d2t is right, delete t2d and mend that",
)
T2D_DTYPE = _vocabulary(
    "t2d-dtype",
    "warning",
    "t2d is not a mask of bools",
    why="code that indexes with it picks rows 0 and 1 again and again",
    repaired="cast it",
)
EOS = _vocabulary(
    "eos",
    "warning",
    "EOS ids are not in the draft vocabulary",
    why="the end of an answer can never be proposed: its last step drafts in vain",
    by_hand="train with them in the draft vocabulary, as `specserve train` does",
)
TEMPLATE_TOKENS = _vocabulary(
    "template-tokens",
    "warning",
    "tokens of the chat template, or special ones, are not in the draft vocabulary",
    why="turns, tool calls and thinking that they open or close are drafted in vain",
    by_hand="train with them in the draft vocabulary, as `specserve train` does",
)
_taps = partial(Check, "taps")
TAPS_RANGE = _taps(
    "taps-range",
    "error",
    "taps that the target does not have",
    why="the head cannot be fed",
    by_hand="give the target that it was trained for, or count its layers again",
)
TAPS_ORDER = _taps(
    "taps-order",
    "warning",
    "taps out of order",
    why="fc.weight expects low, middle, high: engines that collect them on the way up feed it otherwise",
    by_hand="write them in the order that the head was trained with",
)
TAPS_OFF_BY_ONE = _taps(
    "taps-off-by-one",
    "warning",
    "tap ids look as if they were counted in another layout",
    why="if they name {other}, every tap is one layer off: acceptance falls to a quarter, and nothing else shows",
    by_hand="compare the acceptance with both, and keep the better; leave the key out for the usual taps",
)
_rope = partial(Check, "rotary settings")
ROPE_MISSING = _rope(
    "rope-missing",
    "warning",
    "nothing is said about rotary embeddings",
    why="every engine turns by its own default, mostly theta 10,000",
    repaired="write the target's",
    by_hand="give --target",
)
ROPE_SPELLINGS = _rope(
    "rope-spellings",
    "error",
    "the spellings of the rotary settings disagree, or cannot be read",
    why="older and newer engines turn by different angles: acceptance falls with the position",
    repaired="write the one that is the target's in both spellings",
    by_hand="write what it was trained with",
)
ROPE_ONE_SPELLING = _rope(
    "rope-one-spelling",
    "warning",
    "the rotary settings are spelled in one way only",
    why="engines that know only the other one turn by theta 10,000",
    repaired="write both",
)
ROPE_DIFFERS = _rope(
    "rope-differs",
    "warning",
    "other rotary settings than the target's",
    why="right only if the head was trained so; if not, acceptance falls with the position",
    by_hand="compare with the settings that it was trained with",
)

CATALOGUE = tuple(entry for entry in list(vars().values()) if isinstance(entry, Check))
