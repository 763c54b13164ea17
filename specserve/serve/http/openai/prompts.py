"""The way from a client's prompt to the token ids that the engine takes. Errors are RequestErrors."""

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.errors import RequestError
from specserve.serve.engine.interface import EngineLike
from specserve.serve.http.openai.bodies import SamplingBody
from specserve.serve.http.transport.errors import ModelNotFoundError

# No tokenizer in use has longer tokens than this, so a longer text is over the context, which is found before
# tokenizing it.
MAX_CHARS_PER_TOKEN = 1024


def check_model(engine: EngineLike, model: str | None) -> str:
    """Return the LoRA adapter that a request names as its model; empty: it names the target, or nothing. Raises
    ModelNotFoundError."""
    if model is None or model == engine.model_name:
        return ""
    if model in engine.loras:
        return model
    known, verb = ", ".join(map(repr, (engine.model_name, *engine.loras))), "are" if engine.loras else "is"
    raise ModelNotFoundError(f"the model {model[:200]!r} does not exist; {known} {verb} served", param="model")


def encode(engine: EngineLike, text: str, *, add_special_tokens: bool) -> list[int]:
    check_text_length(engine, len(text), "prompt")
    token_ids = engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise RequestError("prompt is empty: it has no tokens", param="prompt")
    return token_ids


def decode(engine: EngineLike, token_ids: list[int]) -> str:
    return engine.tokenizer.decode(token_ids, skip_special_tokens=False)  # as it was sent, nothing hidden


def render_chat(
    engine: EngineLike,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """Return the prompt that the chat template makes of messages and tools in its own form, with these template
    variables."""
    if not engine.tokenizer.has_chat_template:
        raise RequestError(f"{engine.model_name} has no chat template; use /v1/completions", param="messages")
    check_text_length(engine, sum(len(str(value)) for turn in messages for value in turn.values()), "messages")
    check_text_length(engine, sum(len(str(tool)) for tool in tools), "tools")
    return engine.tokenizer.render_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools or None,
        continue_final_message=continue_final_message,
        template_kwargs=variables or None,
    )


def truncated(engine: EngineLike, body: SamplingBody, token_ids: list[int]) -> list[int]:
    """Return the tokens of a prompt that `truncate_prompt_tokens` leaves. Raises RequestError where it leaves none."""
    most = body.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        most = engine.max_model_len - (body.max_new_tokens or 1)
    if most < 1:
        raise RequestError(
            f"truncate_prompt_tokens must leave a token of the prompt: it should be at least 1, or -1 with room for "
            f"max_tokens in the context of {engine.max_model_len}, got {body.truncate_prompt_tokens}",
            param="truncate_prompt_tokens",
        )
    return token_ids[:most] if body.truncation_side == "right" else token_ids[-most:]


def check_text_length(engine: EngineLike, num_chars: int, param: str) -> None:
    if num_chars > MAX_CHARS_PER_TOKEN * engine.max_model_len:
        raise RequestError(
            f"{param} has {num_chars} characters, far over the model's context of {engine.max_model_len} tokens",
            param=param,
        )


def check_num_tokens(engine: EngineLike, num_tokens: int, param: str) -> None:
    if num_tokens >= engine.max_model_len:
        raise RequestError(
            f"{param} has {num_tokens} tokens; the model takes {engine.max_model_len} with at least one left to answer",
            param=param,
        )


def check_token_ids(engine: EngineLike, token_ids: list[int], param: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < engine.vocab_size:
            raise RequestError(f"{param} token ids must be in [0, {engine.vocab_size}), got {token_id}", param=param)


# --- fill-in-the-middle: text before and after a gap, in the tokens that a code model was trained with ---


_MARKS = (  # before the prompt, the suffix and the middle; without the last, the suffix comes first, then the prompt
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, SmolLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
)


def infill_ids(engine: EngineLike, prompt: str, suffix: str, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids that ask for the text between `prompt` and `suffix`. Raises RequestError (param "suffix")
    where the tokenizer has no tokens for that."""
    check_text_length(engine, len(prompt) + len(suffix), "prompt")
    tokenizer = engine.tokenizer
    for marks in _MARKS:
        known = [token_id for mark in marks if (token_id := tokenizer.token_id(mark)) is not None]
        if len(known) == len(marks):
            before = tokenizer.encode(prompt, add_special_tokens=False)
            after = tokenizer.encode(suffix, add_special_tokens=False)
            start = tokenizer.encode("", add_special_tokens=add_special_tokens)
            if len(known) == 2:
                return [*start, known[1], *after, known[0], *before]
            return [*start, known[0], *before, known[1], *after, known[2]]
    raise RequestError(
        f"suffix: the tokenizer of {engine.model_name} has no tokens for filling in the middle; leave it out",
        param="suffix",
    )
