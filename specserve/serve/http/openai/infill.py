"""Fill-in-the-middle: a prompt before a gap and a suffix after it, in the tokens that a code model was trained with."""

from dataclasses import dataclass

from specserve.errors import RequestError
from specserve.serve.engine.interface import EngineLike
from specserve.serve.http.openai.prompts import check_text_length


@dataclass(frozen=True)
class _Marks:
    """The special tokens around prompt and suffix. What follows the last of them is the middle."""

    prompt: str
    suffix: str
    middle: str = ""  # empty: the suffix comes first, and the middle right after the prompt


_MARKS = (
    _Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, SmolLM
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Marks("[PREFIX]", "[SUFFIX]"),  # Codestral
)


def infill_ids(engine: EngineLike, prompt: str, suffix: str, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids that ask for the text between `prompt` and `suffix`. Raises RequestError (param "suffix")
    where the tokenizer has no tokens for that."""
    check_text_length(engine, len(prompt) + len(suffix), "prompt")
    tokenizer = engine.tokenizer
    for marks in _MARKS:
        ids = [tokenizer.token_id(mark) for mark in (marks.prompt, marks.suffix, marks.middle) if mark]
        known = [token_id for token_id in ids if token_id is not None]
        if len(known) == len(ids):
            before = tokenizer.encode(prompt, add_special_tokens=False)
            after = tokenizer.encode(suffix, add_special_tokens=False)
            start = tokenizer.encode("", add_special_tokens=True) if add_special_tokens else []
            if not marks.middle:
                return [*start, known[1], *after, known[0], *before]
            return [*start, known[0], *before, known[1], *after, known[2]]
    raise RequestError(
        f"suffix: the tokenizer of {engine.model_name} has no tokens for filling in the middle; leave it out",
        param="suffix",
    )
