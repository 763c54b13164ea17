"""The tokenizer of a GGUF file as the files of a Hugging Face folder: tokenizer.json and tokenizer_config.json.

A vocabulary is of one of two kinds: `gpt2`, bytes merged in a stated order, cut up before by the regular expressions
that `tokenizer.ggml.pre` names; or `llama`, SentencePiece's, whose order of merging follows from the tokens' scores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specserve import host
from specserve.checkpoints.gguf.container import GgufFile
from specserve.errors import CheckpointError, as_line
from specserve.tokenizer import GENERIC_CLASS

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}"
_QWEN2 = rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}"
_CASED = rf"{_BEFORE}{_UPPER}*{_LOWER}+%s|{_BEFORE}{_UPPER}+{_LOWER}*%s"
_TEKKEN = _CASED.replace("%s", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_REST}"
_O200K = _CASED.replace("%s", f"{_SUFFIXES}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_REST}"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_REST}"
)
_DIGIT = r"\p{N}"
# names of `tokenizer.ggml.pre` -> the expressions that cut a text, one after the other
CUTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_O200K,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
_WHOLE_TOKENS_FIRST = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken", "glm4"))
_BEGINS = _WHOLE_TOKENS_FIRST - {"glm4"}  # texts begin with BOS unless the file says otherwise
_COMPOSED = frozenset(("qwen2", "megrez"))  # texts are put into Unicode's form NFC
# tokens that end a turn or a text whatever else the file says; llama.cpp goes by these names too
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
_SPACE = "▁"


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of a file. Raises CheckpointError for a kind that is not read, and for lists that are
    missing or do not fit each other."""
    kind, pre = _value(file, "model"), file.values.get("tokenizer.ggml.pre")
    tokens, types = _value(file, "tokens"), _types(file)
    used = {i for i, token in enumerate(tokens) if not _is_filler(i, token, types[i])}
    vocabulary = {tokens[i]: i for i in sorted(used)}
    if len(vocabulary) < len(used):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens has the same token twice")
    if kind == "gpt2":
        tokenizer = _byte_level(file, vocabulary, pre)
    elif kind == "llama":
        tokenizer = _sentence_piece(file, vocabulary, types)
    else:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.model is {kind!r}; gpt2 and llama can be read")
    added: dict[int, bool] = {TokenType.UNKNOWN: True, TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    tokenizer.add_tokens(
        [AddedToken(tokens[i], special=added[types[i]], normalized=False) for i in sorted(used) if types[i] in added]
    )
    begins, ends = (_id(file, name) for name in ("bos", "eos"))
    has_bos = file.values.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _BEGINS)
    before = [begins] if has_bos and begins is not None else []
    after = [ends] if file.values.get("tokenizer.ggml.add_eos_token", False) and ends is not None else []
    if before or after:
        names = [*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)]
        special = [(tokens[i], i) for i in {*before, *after}]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=names, pair=[*names, "$B"], special_tokens=special
        )
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the tokenizer_config.json: special tokens and chat templates."""
    tokens = _value(file, "tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _id(file, own) for name, own in names.items()}
    prefix = "tokenizer.chat_template"
    template = file.values.get(prefix)
    further = {name.removeprefix(f"{prefix}."): text for name, text in file.values.items() if f"{prefix}." in name}
    if further:
        named = {"default": template, **further} if template else further
        template = [{"name": name, "template": text} for name, text in named.items()]
    return {
        "tokenizer_class": GENERIC_CLASS,
        "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}),
        **{name: tokens[i] for name, i in ids.items() if i is not None},
    }


def end_ids(file: GgufFile) -> list[int]:
    """Return every id that ends a turn or a text: those that the file states, and its special tokens of the names that
    end them."""
    found = [i for name in ("eos", "eot", "eom") if (i := _id(file, name)) is not None]
    types = _types(file)
    for i, token in enumerate(_value(file, "tokens")):
        if token in _ENDS and types[i] == TokenType.CONTROL:
            found.append(i)
    return list(dict.fromkeys(found))


def _value(file: GgufFile, name: str) -> Any:
    if (value := file.values.get(f"tokenizer.ggml.{name}")) is None:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.{name} is missing; is it the file of a whole language model?"
        )
    return value


def _types(file: GgufFile) -> Sequence[int]:
    tokens = _value(file, "tokens")
    types = file.values.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.token_type has {len(types)} types of {len(tokens)} tokens")
    return types


def _is_filler(i: int, token: str, kind: int) -> bool:
    """Return whether a token only fills the embedding up, as converters write them."""
    return kind == TokenType.UNUSED and token == f"[PAD{i}]"


def _id(file: GgufFile, name: str) -> int | None:
    i, number = file.values.get(f"tokenizer.ggml.{name}_token_id"), len(_value(file, "tokens"))
    if i is not None and not 0 <= i < number:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{name}_token_id is {i}, of {number} tokens")
    return i


def _byte_level(file: GgufFile, vocabulary: dict[str, int], pre: str | None) -> Tokenizer:
    if pre is None or pre not in CUTS:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.pre is {pre!r}; {', '.join(CUTS)} can be read")
    merges = [tuple(merge.split(" ")) for merge in _value(file, "merges")]
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_TOKENS_FIRST)
    except Exception as error:  # the library raises its own kinds
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges cannot be read ({as_line(error)})") from None
    tokenizer = Tokenizer(model)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in CUTS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, vocabulary: dict[str, int], types: Sequence[int]) -> Tokenizer:
    with host.without_torch():
        from transformers.tokenization_utils_base import generate_merges

    scores = _value(file, "scores")
    if len(scores) != len(types):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.scores has {len(scores)} scores of {len(types)} tokens")
    merged = {token: i for token, i in vocabulary.items() if types[i] == TokenType.NORMAL}
    merges = generate_merges(merged, {token: scores[i] for token, i in merged.items()})
    unknown = _id(file, "unknown")
    unknown_token = None if unknown is None else _value(file, "tokens")[unknown]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True))
    has_prefix = file.values.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    return tokenizer
