"""Text <-> token ids, for training and serving alike: plain text, chats, loss masks, and text that arrives in pieces.

A thin wrapper around transformers' tokenizer of a model folder. Knows nothing of models or requests; torch is never
needed, and transformers is imported only when a tokenizer is loaded.
"""

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specserve.errors import CheckpointError, DataError, RequestError

log = logging.getLogger(__name__)

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TEMPLATE_VARIABLES = frozenset({"tools", "documents"})  # parameters of transformers that reach the template
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no UTF-8 (yet)


class Tokenizer:
    """One model folder's tokenizer and chat template.

    Threads may share it for everything but `encode_chat`: transformers tracks generation tags in the template itself.
    """

    def __init__(self, backend: Any) -> None:
        """`backend` is a transformers tokenizer; use `load`."""
        self._backend = backend
        self._vocab_size = len(backend)
        self._special_ids = frozenset(backend.all_special_ids)
        options = inspect.signature(backend.apply_chat_template).parameters
        self._reserved_names = frozenset(options).union(["messages"]) - TEMPLATE_VARIABLES

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face model folder. Raises CheckpointError; never looks on the network."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; expected a model folder with a tokenizer.json")
        auto_tokenizer = _import_auto_tokenizer()
        try:
            # The length check of transformers would only log; lengths are the caller's business.
            backend = auto_tokenizer.from_pretrained(str(folder), local_files_only=True, model_max_length=2**62)
        except Exception as error:  # transformers raises whatever its parsers raise
            raise CheckpointError(f"{folder}: cannot read the tokenizer: {error}") from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer knows, added tokens included. The model's embedding may be padded beyond it."""
        return self._vocab_size

    @property
    def eos_token_id(self) -> int | None:
        return self._backend.eos_token_id

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out with `skip_special_tokens`."""
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text. Raises RequestError on a lone surrogate, which no UTF-8 text can hold."""
        _check_unicode(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, byte for byte (no clean-up of spaces); bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins.

        The template writes the special tokens, BOS included, so none are added. `template_kwargs` become template
        variables; they cannot replace the template. Raises RequestError when the model has no chat template, the
        template rejects the messages, or a variable has a reserved name.
        """
        template_kwargs = template_kwargs or {}
        if reserved := sorted(self._reserved_names.intersection(template_kwargs)):
            raise RequestError(
                f"chat_template_kwargs cannot set {', '.join(reserved)}: the name is reserved",
                param="chat_template_kwargs",
            )
        return self.encode(self._render(messages, add_generation_prompt, template_kwargs), add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Token ids of a whole chat and its loss mask: True where the assistant speaks, its end of turn included.

        The spans come from the template's `{% generation %}` tags, else from what each assistant message adds to
        the rendered chat. Raises DataError for messages that the template rejects.
        """
        try:
            if GENERATION_TAG.search(self._backend.get_chat_template() if self.has_chat_template else ""):
                encoded = self._apply_template(messages, return_assistant_tokens_mask=True, return_dict=True)
                return encoded["input_ids"], [bool(bit) for bit in encoded["assistant_masks"]]
            return self._encode_by_prefixes(messages)
        except RequestError as error:
            raise DataError(str(error)) from error

    def template_token_ids(self) -> frozenset[int]:
        """Every id that a draft vocabulary must hold: special and added tokens, EOS, the template's own text."""
        token_ids = set(self._special_ids) | set(self._backend.get_added_vocab().values())
        probe = [{"role": role, "content": "1"} for role in ("system", "user", "assistant", "user")]
        # Without a system message some templates write a default one; others accept no system message at all.
        for messages in (probe, probe[1:]) if self.has_chat_template else ():
            try:
                token_ids.update(self.render_chat(messages))
            except RequestError as error:
                log.debug("chat template rejects roles %s: %s", [m["role"] for m in messages], error)
        return frozenset(token_ids)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, template_kwargs: Mapping[str, Any]
    ) -> str:
        return self._apply_template(
            messages, **template_kwargs, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _apply_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """`apply_chat_template` with every failure of the template turned into a RequestError."""
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; send a plain prompt instead", param="messages")
        try:
            return self._backend.apply_chat_template(list(messages), **options)
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"the chat template cannot render these messages: {error}", param="messages") from error

    def _encode_by_prefixes(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Loss mask of a template without generation tags: message i's span is what rendering it adds."""
        text = self._render(messages, False, {})
        encoded = self._backend(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        loss_mask = [False] * len(token_ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start, stop = self._span(text, messages, i)
            inside = [t for t, (low, high) in enumerate(offsets) if low < stop and high > start]
            # What follows the end-of-turn token (a newline, in ChatML) is template, not something the model says.
            last_special = max((t for t in inside if token_ids[t] in self._special_ids), default=None)
            for t in inside:
                loss_mask[t] = last_special is None or t <= last_special
        return token_ids, loss_mask

    def _span(self, text: str, messages: Sequence[Mapping[str, Any]], i: int) -> tuple[int, int]:
        """Characters [start, stop) of message `i` in the rendered chat `text`."""
        header = self._answer_header()
        if i:
            before = self._render(messages[:i], False, {})
            if not text.startswith(before):
                raise DataError(
                    "the chat template rewrites earlier turns; put generation tags in it to mark the answers"
                )
            start = len(before) + _common_length(header, text[len(before) :])
        else:  # nothing can be rendered before the first message, but BOS or a default system message may stand there
            start = text.find(header) + len(header)
        upto = self._render(messages[: i + 1], False, {})
        if text.startswith(upto):
            return start, len(upto)
        # Templates that drop the reasoning of earlier turns render message i otherwise than when it was the last:
        # its end is then the first end-of-turn marker after its start.
        marker = max(self._special_tokens(), key=lambda token: upto.rfind(token, start))
        stop = text.find(marker, start)
        if upto.rfind(marker, start) < 0 or stop < 0:
            raise DataError("the chat template has no end-of-turn token; put generation tags in it to mark the answers")
        return start, stop + len(marker)

    def _answer_header(self) -> str:
        """What the template writes before an answer (`<|im_start|>assistant\\n` in ChatML)."""
        probe = [{"role": "user", "content": "1"}]
        return self._render(probe, True, {})[len(self._render(probe, False, {})) :]

    def _special_tokens(self) -> list[str]:
        return self._backend.convert_ids_to_tokens(sorted(self._special_ids))


class IncrementalDecoder:
    """Text from tokens that arrive in pieces: `push`ed and `finish`ed text joins to `decode` of all the ids.

    No half character is ever emitted: trailing U+FFFD may still become a character, so it waits. A push costs at most
    two decodes of a short window (the ids of this push and the last, and what still waits), never of the sequence.
    """

    NUM_HELD = 3  # a UTF-8 character has at most 4 bytes, so at most 3 trailing ones are open
    NUM_WINDOW = 64  # ids that may wait for a character to close before they count as bytes of no character

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_context = 0  # leading ids of the window whose text is all out
        self._num_emitted = 0  # characters of the window's text that are out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids settle."""
        vocab_size = self._tokenizer.vocab_size  # ids beyond it are padding of the model's embedding: no text
        self._window.extend(i for i in token_ids if i < vocab_size and i not in self._skipped_ids)
        text = self._text(self._window)
        num_settled = len(text.rstrip(REPLACEMENT))
        is_open = num_settled < len(text)
        is_overdue = len(self._window) - self._num_context > self.NUM_WINDOW
        if is_open and is_overdue:
            num_settled = max(num_settled, len(text) - self.NUM_HELD)
        out = text[self._num_emitted : num_settled]
        self._num_emitted = max(self._num_emitted, num_settled)
        if out and not is_open:
            # A character ends here, so a later decode may begin here. It does begin one piece earlier, because some
            # decoders strip the space before their first token.
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            self._num_emitted = len(self._text(self._window))
        elif is_overdue:
            self._shorten(len(text))
        return out

    def finish(self) -> str:
        """The text still held back. The decoder starts afresh afterwards."""
        out = self._text(self._window)[self._num_emitted :]
        self._window, self._num_context, self._num_emitted = [], 0, 0
        return out

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _shorten(self, num_chars: int) -> None:
        """Drop the head of a window of `num_chars` characters that finds no place where a character ends.

        The cut may split a character, which changes at most its own three bytes: far from the open end, and out.
        """
        tail = self._window[-self.NUM_WINDOW // 2 :]
        num_left = len(self._text(tail))
        if num_left > 2 * self.NUM_HELD:
            self._window, self._num_context = tail, 0
            self._num_emitted -= num_chars - num_left


def _import_auto_tokenizer() -> Any:
    """transformers' AutoTokenizer, without its advice to install torch: tokenizers do not need it."""
    logger = logging.getLogger("transformers")
    logger.addFilter(_reject)  # on this logger only: its children still warn, and levels stay as the user set them
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer
    finally:
        logger.removeFilter(_reject)


def _reject(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            param="prompt",
        ) from error


def _common_length(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
