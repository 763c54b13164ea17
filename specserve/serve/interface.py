"""What the HTTP layer needs of the engine and of the tokenizer, and nothing more.

The real ones are `serve.engine.Engine` and `specserve.tokenizer.Tokenizer`; tests of the HTTP layer bring small fakes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from specserve.serve.request import Delta, Request, SamplingParams


class TokenizerLike(Protocol):
    """Text to ids and back. Every method may be called from several threads at once."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Raises RequestError (param "messages") when the template refuses the messages."""
        ...


class EngineLike(Protocol):
    """A running engine. Its own thread calls `on_delta`; the last delta of a sequence has a finish_reason."""

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def is_healthy(self) -> bool: ...

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_delta: Callable[[Delta], None], /
    ) -> Request:
        """Queue one sequence; never blocks. Raises RequestError (param "prompt" or "max_tokens") or CapacityError."""
        ...
