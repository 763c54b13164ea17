"""The nouns of serving: a client's request, and the engine's answer. They are host data only, without arrays.

`SamplingParams` is validated when it is made, so the engine never meets a bad value.
"""

import dataclasses
import enum
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, Self, TypedDict, get_type_hints

import numpy as np
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from specserve.errors import RequestError
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.ranges import (
    Bias,
    MinP,
    NumTokens,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TokenId,
    TopK,
    TopP,
)
from specserve.speculative.sampling import MAX_LOGPROBS

MAX_SEED = 2**63 - 1
MAX_WORDS = 64  # stop strings, or bad words
MAX_WORD_CHARS = 1024
MAX_TOKEN_IDS = 1024  # of one list of token ids in the options, logit_bias included
MAX_CHOICES = 128
SMALLEST_TEMPERATURE = 1e-5  # below it, as in vLLM, sampling is greedy: logits over less would overflow

_Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]
Words = Annotated[Sequence[_Word], Field(max_length=MAX_WORDS), AfterValidator(tuple)]
TokenIds = Annotated[Sequence[TokenId], Field(max_length=MAX_TOKEN_IDS), AfterValidator(tuple)]
Biases = Annotated[Mapping[TokenId, Bias], Field(max_length=MAX_TOKEN_IDS), AfterValidator(dict)]


class FinishReason(enum.StrEnum):
    """The reason why a sequence ended: in OpenAI's words, in vLLM's and SGLang's for one that the operator has ended
    (its tokens so far are the answer), and in our own two."""

    STOP = "stop"  # an EOS id, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORTED = "abort"  # the operator has ended it; `Delta.error` says so
    CANCELLED = "cancelled"  # the client went away, or the engine stopped
    ERROR = "error"  # the engine failed; `Delta.error` says how


@dataclass(frozen=True)
class GrammarSpec:
    """The grammar that an answer must follow. `text` is a JSON schema, a regular expression (Rust's syntax, without
    look-around), a JSON list of strings of which the answer is one, or a grammar in llguidance's dialect of Lark."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    is_needed: bool = True  # else the answer follows none where this one cannot be used


@dataclass(frozen=True)
class SamplingParams:
    """The options for drawing the answers to one prompt, under vLLM's names. The constructor checks every value:
    RequestError names the field and the range. Token ids are checked against the vocabulary when the request is
    submitted."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1  # answers; answer i is drawn with seed + i
    max_tokens: Annotated[NumTokens, Field(ge=1)] | None = None  # None: up to the context length
    min_tokens: NumTokens = 0  # no end-of-sequence or stop token id before
    temperature: Annotated[Temperature, AfterValidator(lambda t: t if t >= SMALLEST_TEMPERATURE else 0.0)] = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[TopK, AfterValidator(lambda k: max(0, k))] = 0  # 0 or -1: off
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0  # taken from the logit of every token the answer holds
    frequency_penalty: Penalty = 0.0  # taken from that logit as often as the answer holds the token
    repetition_penalty: RepetitionPenalty = 1.0  # divides positive and multiplies negative logits of tokens seen
    logit_bias: Biases = field(default_factory=dict)  # added to the logits of token ids
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None  # None: all
    bad_words: Words = ()  # never produced, nor with a space in front
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None  # None: the engine draws one
    stop: Annotated[Words, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: bool = False  # the text ends with the stop string, or the text of the stop token id
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None  # the grammar that the answer must follow, to its end
    skip_special_tokens: bool = True  # they are no text
    shown_special_ids: TokenIds = ()  # special tokens that are text all the same
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # of each token, and of so many likely ones
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # the same of the prompt's tokens
    hidden_states: bool = False  # of the prompt, behind the layers that the server keeps
    speculation: NumTokens | None = None  # draft tokens that a step may accept; 0: none; None: the server's choice
    return_tree: bool = False  # the tree that each step proposed, and its accepted path

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            try:
                object.__setattr__(self, name, kind.validate_python(getattr(self, name)))
            except ValidationError as error:
                raise request_error(error, name) from None
        if self.grammar is not None and self.ignore_eos:
            raise RequestError("ignore_eos: nothing may follow the end of a grammar; leave it out", param="ignore_eos")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens should be at most max_tokens, {self.max_tokens}, got {self.min_tokens}", param="min_tokens"
            )

    def choices(self) -> list[Self]:
        """Return SamplingParams for each of the n answers."""
        return [
            dataclasses.replace(self, n=1, seed=None if self.seed is None else _wrap_seed(self.seed + i))
            for i in range(self.n)
        ]


def _wrap_seed(seed: int) -> int:
    return (seed + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1


@functools.cache
def _kinds() -> dict[str, TypeAdapter[Any]]:
    """Return a validator for each field, which also brings it into the one spelling that the engine knows."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    return {name: TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)) for name, hint in hints.items()}


def option_schemas() -> dict[str, dict[str, Any]]:
    """The JSON schema of each option: its type and its range."""
    return {name: kind.json_schema() for name, kind in _kinds().items()}


def request_error(error: ValidationError, param: str) -> RequestError:
    """Return the first of pydantic's findings about the field `param`, as the error that a client gets."""
    found = error.errors(include_url=False, include_context=False)[0]
    message = found["msg"].removeprefix("Input ")
    return RequestError(f"{param} {message[0].lower()}{message[1:]}, got {describe(found['input'])}", param=param)


def describe(value: Any) -> str:
    """A value as a client sent it, cut where it is long."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "an object"
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:80] + "..."


@dataclass(frozen=True)
class SpeculationStats(Acceptance):
    """The acceptance and the cached tokens of one sequence, and how long it took."""

    num_cached_tokens: int = 0  # prompt tokens whose keys and values were in the prefix cache
    drafts: tuple[tuple[int, int], ...] = ()  # of each step over draft tokens: how many there were, how many accepted
    max_accepted: int = 0  # draft tokens that one step of this server accepts, at most; 0: it does not speculate
    queue_seconds: float = 0.0  # from submission to a slot
    prefill_seconds: float = 0.0  # from there to the first token
    decode_seconds: float = 0.0  # from there to the last token
    versions: tuple[tuple[int, str], ...] = ()  # of the weights: the first token of each, and its name

    @property
    def num_drafts(self) -> int:
        """Steps that verified draft tokens. Steps of plain decoding are none of them, but count in `num_steps`."""
        return len(self.drafts)

    @property
    def version(self) -> str:
        """The version of the weights that the last token is of; empty: it never had a slot."""
        return self.versions[-1][1] if self.versions else ""

    @property
    def of_drafts(self) -> Acceptance:
        """The acceptance of those steps alone, which are all that accept a draft token or are cut."""
        return Acceptance(self.num_drafts, self.num_draft_tokens, self.accepted_per_depth, self.num_cut)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the target's own distribution: before bias, penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely token ids with theirs, best first


@dataclass(frozen=True)
class PromptToken:
    """A token of a prompt, and how likely the target took it to be after those before it."""

    token_id: int
    logprobs: TokenLogprobs | None  # None: the first, which nothing comes before
    rank: int  # 1 is the most likely token; 0 for the first


class TokenMask(Protocol):
    """The tokens that may come next in one sequence, by a grammar, a schema or a list of choices. It is called on the
    engine's thread, in turn. An exception ends that request alone; the client gets the text of a RequestError."""

    def masks(self, parents: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:  # [node, ceil(vocab / 8)] uint8
        """Return a bit for each token, 1 where it may follow a node of a proposed tree; bit i of byte j is that of
        token 8 j + i. Node 0 is the end of the accepted tokens (its token id means nothing), and has a 1 in its row. A
        node behind a token that may not come there may have any row."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Note that these tokens have been added to the sequence."""
        ...


def fill_masks(allowed: np.ndarray, mask: TokenMask, parents: np.ndarray, token_ids: np.ndarray) -> None:
    """Write a request's masks into its rows, [node, bytes] uint8."""
    rows = np.asarray(mask.masks(parents.tolist(), token_ids.tolist()))
    if rows.shape != allowed.shape or rows.dtype != np.uint8 or not rows[0].any():
        raise ValueError(
            f"a token mask returned {rows.dtype} {rows.shape}; expected uint8 {allowed.shape}, the first row with a bit"
        )
    allowed[:] = rows


@dataclass(frozen=True)
class DraftTree:
    """The tree that a step proposed for one sequence. Node 0 is the root, the last token before the step; it is its own
    parent, and other parents come before their children."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]  # the nodes of the delta's accepted tokens, from the child of the root down

    def accepted_alone(self) -> "DraftTree":
        """Return the tree without the nodes that were refused."""
        nodes = tuple(range(len(self.accepted) + 1))
        token_ids = tuple(self.token_ids[node] for node in (0, *self.accepted))
        return DraftTree(token_ids, (0, *nodes[:-1]), nodes[1:])


@dataclass(frozen=True)
class Delta:
    """The part of an answer that one engine step added. The last one of a sequence has a `finish_reason`."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None: something else did
    error: str | None = None
    is_refused: bool = False  # with an error: the request's own options brought it about, so its client gets it
    stats: SpeculationStats | None = None  # set on the last delta
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token id, when the request asked for them
    prompt: tuple[PromptToken, ...] = ()  # all of it, in the first delta with tokens, when the request asked for it
    # [prompt token, (layers + 1) * d_model], as `prompt`: behind the kept layers, and what the logits are made of
    hidden_states: np.ndarray | None = None
    num_accepted: int = 0  # the first so many tokens are accepted draft tokens; one after them is the target's own
    num_chars: tuple[int, ...] = ()  # of the answer's text, that each token has settled, also what is held back yet
    tree: DraftTree | None = None  # when the request asked for it, and the step proposed one

    @property
    def draft_depths(self) -> tuple[int, ...]:
        """The origin of each token: 0 is the target's own draw, d a draft token accepted at depth d of the tree."""
        return tuple(depth if depth <= self.num_accepted else 0 for depth in range(1, len(self.token_ids) + 1))


class RequestOptions(TypedDict, total=False):
    """The options that an engine's `submit` takes by name, beside the sampling parameters. The names are those of
    `Request`'s fields."""

    priority: int  # lower runs first, as in vLLM; 0 where it is not given
    cache_salt: str  # prefixes are shared only between requests of one salt
    token_mask: TokenMask | None
    request_id: str  # as the log quotes it; empty: a number
    client: str  # the one that shares the queue with the others
    lora: str  # the LoRA adapter that it is answered by; empty: the target alone


@dataclass(eq=False)
class Request:
    """The request for one sequence, checked, and with all that follows from its options and the model."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams  # with n = 1
    max_new_tokens: int  # params.max_tokens, bounded by the context length
    seed: int
    on_delta: Callable[[Delta], None]  # called on the engine's thread; must not block
    priority: int = 0  # lower runs first, as in vLLM
    client: str = ""  # the one that shares the queue with the others
    cache_salt: str = ""  # prefixes are shared only between requests of one salt
    token_mask: TokenMask | None = None
    stop_ids: frozenset[int] = frozenset()  # any of them ends it: its stop token ids, and the model's EOS ids
    bad_sequences: Sequence[tuple[int, ...]] = ()  # token ids that spell its bad words
    lora: str = ""  # the LoRA adapter that it is answered by; empty: the target alone
    adapter_id: int = -1  # the adapter's place
    submit_time: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False  # set from any thread

    def cancel(self) -> None:
        """Ask the engine to stop this sequence at its next step. Safe from any thread, any number of times."""
        self.is_cancelled = True
