"""The options of an engine; and those of a request as the rows that a slot starts with: numbers and token ids, as the
compiled step takes them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specserve.errors import RequestError
from specserve.serve.engine.pages import Watcher
from specserve.serve.requests.request import Request, SamplingParams
from specserve.speculative.sampling import (
    EMITTED,
    IN_PROMPT,
    IS_STOP,
    MAX_BAD_SEQUENCES,
    MAX_BAD_TOKENS,
    UNBOUNDED,
    SamplerRows,
    TokenRows,
)


@dataclass(frozen=True)
class EngineOptions:
    """The options by which an engine treats its requests. `launch` makes them of a server's settings, which have the
    help."""

    max_queue: int = 1024
    prefill_tokens: int = 0  # per round; 0: one largest chunk
    is_caching: bool = True  # prefixes
    prefers_cached: bool = False  # among equal priorities, the longest cached prefix first
    watchdog_seconds: float = 0.0
    num_pages: int | None = None  # of each data rank, that its sequences may hold together; None: all
    most_steps: int | None = None  # that are dispatched at once; None: as many as the runner can
    watcher: Watcher | None = None  # hears what the prefix cache gains and loses


class Encoder(Protocol):
    """The part of a tokenizer that bad words need."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...


def check_prompt(prompt_ids: Sequence[int], max_tokens: int | None, max_model_len: int, vocab_size: int) -> int:
    """Return how many tokens the model's context leaves for the answer. Raises RequestError (param "prompt" or
    "max_tokens") where the prompt is empty, or is too long for an answer of `max_tokens`."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    room = max_model_len - len(prompt_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens; this model takes {max_model_len} with at least one "
            "left to answer. Shorten it",
            param="prompt",
        )
    if max_tokens is not None and max_tokens > room:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens and max_tokens is {max_tokens}; together at most "
            f"{max_model_len} fit. Lower max_tokens to {room}",
            param="max_tokens",
        )
    for token_id in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token_id < vocab_size:
            message = f"the prompt holds token id {token_id}; ids go from 0 to {vocab_size - 1}"
            raise RequestError(message, param="prompt")
    return room


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for an option that names a token id outside the vocabulary."""
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", params.logit_bias),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise RequestError(f"{name} holds {token_id}; ids go from 0 to {vocab_size - 1}", param=name)


def bad_sequences(words: Sequence[str], tokenizer: Encoder | None) -> list[tuple[int, ...]]:
    """The token sequences that spell the bad words, at the start of a text and after a space. Raises RequestError."""
    if words and tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and this engine has none", param="bad_words")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False)) if tokenizer else ()
            if len(token_ids) > MAX_BAD_TOKENS:
                raise RequestError(
                    f"bad_words: {word!r} has {len(token_ids)} tokens, at most {MAX_BAD_TOKENS} fit", param="bad_words"
                )
            if token_ids:
                found[token_ids] = None
    return list(found)


def check_some_token(
    params: SamplingParams, stop_ids: Collection[int], bad: Sequence[tuple[int, ...]], vocab_size: int
) -> None:
    """Raises RequestError where the options ban every token at the start of the answer already."""
    banned = {token_ids[0] for token_ids in bad if len(token_ids) == 1} | set(stop_ids if params.min_tokens else ())
    if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids: bad_words, or min_tokens and the ids that stop, ban all of them; allow others too",
            param="allowed_token_ids",
        )
    if len(banned) >= vocab_size:
        raise RequestError("bad_words, and min_tokens with stop_token_ids, ban every token", param="bad_words")


def sampler_rows(params: SamplingParams, seed: int, num_prompt: int = 0) -> SamplerRows:
    """Make the rows of one sequence's options, [1], on the host. Negative seeds count as their two's complement."""
    word = 0xFFFFFFFF
    halves: Any = np.array([[seed & word, seed >> 32 & word]], np.uint32)
    has_bias = bool(params.logit_bias) or params.allowed_token_ids is not None

    def real(value: float) -> Any:
        return np.array([value], np.float32)

    def whole(value: int) -> Any:
        return np.array([min(value, UNBOUNDED)], np.int32)

    def flag(value: bool) -> Any:
        return np.array([value])

    return SamplerRows(  # of host arrays: they are sent to the device together
        temperature=real(params.temperature),
        top_k=whole(params.top_k),
        top_p=real(params.top_p),
        min_p=real(params.min_p),
        seed=halves,
        presence_penalty=real(params.presence_penalty),
        frequency_penalty=real(params.frequency_penalty),
        repetition_penalty=real(params.repetition_penalty),
        has_bias=flag(has_bias),
        has_bad_words=flag(bool(params.bad_words)),
        output_start=whole(num_prompt),
        stop_start=whole(num_prompt + params.min_tokens),
        has_logprobs=flag(params.logprobs is not None),
        max_depth=whole(UNBOUNDED if params.speculation is None else params.speculation),
    )


def blank_token_rows(vocab_size: int, stop_ids: Sequence[int] = ()) -> TokenRows:
    """Make the token rows of options that say nothing about single tokens but which end an answer, [1, ...], on the
    host."""
    bias: Any = np.zeros((1, vocab_size), np.float32)
    seen: Any = np.zeros((1, vocab_size), np.int32)
    seen[0, np.asarray(stop_ids, np.int64)] |= IS_STOP
    words: Any = np.full((1, MAX_BAD_SEQUENCES, MAX_BAD_TOKENS), -1, np.int32)
    return TokenRows(bias, seen, words)


def token_rows(
    request: Request,
    output_ids: Sequence[int],  # tokens emitted before, after a preemption
    stop_ids: Sequence[int],  # EOS ids among them
    bad: Sequence[tuple[int, ...]],
    vocab_size: int,
) -> TokenRows | None:
    """Make the rows of what the options say about single tokens, [1, ...], on the host. None where they say
    nothing."""
    params = request.params
    has_penalty = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
    if not (has_penalty or params.min_tokens or bad or params.logit_bias or params.allowed_token_ids is not None):
        return None
    rows: Any = blank_token_rows(vocab_size, stop_ids)
    bias, seen, words = rows.bias[0], rows.seen[0], rows.bad_words[0]
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0.0
    for token_id, value in params.logit_bias.items():
        bias[token_id] += value
    seen[np.asarray(request.prompt_ids)] |= IN_PROMPT
    np.add.at(seen, np.asarray(output_ids, np.int64), EMITTED)
    for row, token_ids in enumerate(bad):
        words[row, MAX_BAD_TOKENS - len(token_ids) :] = token_ids
    return rows
