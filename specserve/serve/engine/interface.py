"""The interfaces of the engine and of the tokenizer, as far as the HTTP layer needs them.

The real ones are `serve.engine.engine.Engine` and `specserve.tokenizer.Tokenizer`; tests of the HTTP layer
bring small fakes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack

from specserve.serve.requests.request import Delta, GrammarSpec, Request, RequestOptions, SamplingParams

# the largest sizes of each class of steps, in tokens (vLLM's buckets); larger ones are one class more
ROUND_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class EngineStats:
    """The counts of an engine since it started, and its present load. Seconds are sums over all steps."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_held: int = 0  # by running sequences
    num_pages_cached: int = 0  # in the prefix cache, held or idle
    num_prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int = 0  # of them, found
    num_preemptions: int = 0
    num_rebuilds: int = 0  # after a device error
    num_steps: int = 0
    num_steps_by_speculation: Mapping[str, int] = field(default_factory=dict)  # "off", "chain:3", ...
    round_sizes: Sequence[int] = (0,) * (len(ROUND_SIZES) + 1)  # steps, with the prompt chunks beside them, by tokens
    num_round_tokens: int = 0  # of all steps together
    page_size: int = 0  # tokens
    cache_dtype: str = ""  # of the target's committed keys and values
    is_caching: bool = False  # prefixes
    busy_seconds: float = 0.0  # of the engine's thread, with work to do
    host_seconds: float = 0.0  # of them, spent on the host and not waiting for the device
    num_programs_left: int = 0  # still to be compiled, while plain decoding serves
    num_late_compiles: int = 0  # programs compiled because a step had to wait for them; must stay 0
    estimated_speedup: float = 1.0  # emitted tokens over what plain steps of the same measured cost would have emitted
    num_caught_up: int = 0  # tokens that the draft read after the target had run them alone
    num_promised: float = 0.0  # draft tokens that a head's confidence expected to be accepted, where that was seen
    num_kept: int = 0  # of them, accepted
    confidence_trust: float = 0.0  # how much of what the confidence says of a row the choice of trees takes over
    max_loras: int = 0  # adapters that there is room for
    running_loras: tuple[str, ...] = ()  # adapters of sequences in a slot
    waiting_loras: tuple[str, ...] = ()  # of other sequences
    seconds_in_step: float = 0.0  # how long the step that is being waited for has taken so far; 0: none


@dataclass(frozen=True)
class DraftInfo:
    """The name of a draft head, and the tau that it promises."""

    name: str
    tau: float | None = None  # tokens per target forward in its own evaluation; None: unknown
    lora: str = ""  # folder of the LoRA adapter that it was trained and measured beside; empty: none
    lora_fingerprint: str = ""


class TemplateLike(Protocol):
    """The interface of a chat template: the variables that it reads, and the text that it writes."""

    @property
    def reads_tools(self) -> bool: ...

    def mentions(self, word: str, /) -> bool: ...

    def reads_variable(self, name: str, /) -> bool: ...


class TokenizerLike(Protocol):
    """The interface of a tokenizer, from text to ids and back. Every method may be called from several threads at
    once."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """The options of sampling that the model recommends to requests that leave them out, by vLLM's names."""
        ...

    def info(self) -> Mapping[str, Any]:
        """Return its class, special tokens and chat template, by their names in a tokenizer_config.json."""
        ...

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...

    def token_id(self, token: str, /) -> int | None:
        """The id of an added token, such as "<|fim_prefix|>"; None where there is none of that name."""
        ...

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render the messages of a chat as token ids. Raises RequestError (param "messages") when the template refuses
        them."""
        ...

    @property
    def template(self) -> TemplateLike: ...

    @property
    def special_token_ids(self) -> Collection[int]:
        """The ids that `decode` leaves out with `skip_special_tokens`."""
        ...

    @property
    def end_ids(self) -> Collection[int]:
        """The ids that end a turn."""
        ...


class EngineLike(Protocol):
    """The interface of a running engine. Its own thread calls `on_delta`; the last delta of a sequence has a
    finish_reason."""

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def speculation(self) -> str:
        """The way to speculate, as the setting spells it."""
        ...

    @property
    def draft(self) -> DraftInfo | None:
        """The head that speculates, or None where there is none."""
        ...

    @property
    def loras(self) -> Mapping[str, str]:
        """The LoRA adapters that requests may name as their `lora`, and the names of their folders."""
        ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def is_ready(self) -> bool:
        """Return whether the engine answers at once, if not as fast as with every program, and is not draining."""
        ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        /,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Queue one sequence. It never waits for the device; a grammar that is not known (`knows_grammar`) is compiled
        first, when those before it are. Raises RequestError, whose param names what does not fit ("prompt",
        "max_tokens", "grammar" or the option whose token ids or words do not fit the vocabulary), or CapacityError."""
        ...

    def knows_grammar(self, grammar: GrammarSpec, /) -> bool:
        """Return at once whether `submit` need not compile this grammar, because it is kept compiled or was refused of
        late."""
        ...

    def load_draft(self, folder: str, /) -> DraftInfo:
        """Replace the draft head by one in a folder, of any kind and shape, while requests run: their tokens stay as
        they would have been, and nothing that the old head wrote is read by the new one. The head is loaded, checked
        and has its programs compiled beside the old one, which stays where anything is wrong: ConfigError or
        CheckpointError says what. May be called from any thread, and returns when the new one speculates; others wait
        for their turn. Raises CapacityError when the engine stops meanwhile."""
        ...

    def set_speculation(self, speculation: str, /) -> None:
        """Speculate in this way from the next step on. No token depends on it. It is a way that programs were compiled
        for, "off", or "auto" where the server began with that. Raises ConfigError, which names the ways."""
        ...

    def flush_cache(self) -> None:
        """Forget every cached prefix and recalled answer, at the engine's next round."""
        ...

    def stats(self) -> EngineStats:
        """Return the counts of the engine so far. It may be called from any thread, at any time."""
        ...

    def drain(self, seconds: float) -> None:
        """Take no new sequences (CapacityError), and wait until those that were taken, running or waiting, have ended
        and their listeners know it. The wait takes at most so many seconds; sequences that are left then go on."""
        ...
