"""The way from the token ids that steps emit to deltas: it finds where a sequence ends, and which of its text is
certain. No text is emitted twice, and no half character."""

import itertools
import operator
from collections.abc import Collection, Sequence

from specserve.serve.requests.request import Delta, FinishReason, Request
from specserve.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # decoders write it for bytes that are no UTF-8 (yet)


class IncrementalDecoder:
    """Text from tokens that arrive in pieces. `push`ed and `finish`ed text joins to what `decode` of all the ids, those
    of the prompt included, has behind `decode` of the prompt's.

    No half character is ever emitted: trailing U+FFFD may still become a character, so it waits. A push costs at most
    two decodes of a short window (the ids of this push and the last, and what still waits), never of the sequence.
    """

    NUM_HELD = 3  # a UTF-8 character has at most 4 bytes, so at most 3 trailing ones are open
    NUM_WINDOW = 64  # ids that may wait for a character to close before they count as bytes of no character
    NUM_BEFORE = 8  # last ids of the prompt, of which a character or two are enough

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_ids: Collection[int] = (),
    ) -> None:
        """`shown_ids` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids.difference(shown_ids) if skip_special_tokens else frozenset()
        self._window = self._end_of(prompt_ids)
        self._num_context = len(self._window)  # leading ids of the window whose text is all out
        self._num_emitted = len(self._text(self._window))  # characters of the window's text that are out

    def _end_of(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the fewest last ids of a prompt that have a text of whole characters, or all where they have no text.
        Some decoders (Llama's, Mistral's) strip the space before their first token, which an answer's is not."""
        ends = list(itertools.islice(filter(self._is_text, reversed(prompt_ids)), self.NUM_BEFORE))[::-1]
        for start in range(len(ends) - 1, -1, -1):
            text = self._text(ends[start:])
            if text and REPLACEMENT not in text:
                return ends[start:]
        return [] if self._text(ends) else ends

    def _is_text(self, token_id: int) -> bool:
        """Return whether an id adds to the text. Those beyond the tokenizer's are padding of the model's embedding."""
        return token_id < self._tokenizer.vocab_size and token_id not in self._skipped_ids

    def push(self, token_ids: Sequence[int]) -> str:
        """Add these ids, and return the text that is now certain."""
        self._window.extend(filter(self._is_text, token_ids))
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
        """Return the text that was still held back. The decoder starts afresh afterwards."""
        out = self._text(self._window)[self._num_emitted :]
        self._window, self._num_context, self._num_emitted = [], 0, 0
        return out

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _shorten(self, num_chars: int) -> None:
        """Drop the head of a window of `num_chars` characters in which no place is found where a character ends.

        The cut may split a character, which changes at most its own three bytes: far from the open end, and out.
        """
        tail = self._window[-self.NUM_WINDOW // 2 :]
        num_left = len(self._text(tail))
        if num_left > 2 * self.NUM_HELD:
            self._window, self._num_context = tail, 0
            self._num_emitted -= num_chars - num_left


class OutputStream:
    """The output of one sequence. Text that may still turn out to be part of a stop string is held back."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self._stop_ids = request.stop_ids
        self._named_ids = frozenset(params.stop_token_ids)
        self._stops = sorted(params.stop, key=len)
        self._keeps_stop = params.include_stop_str_in_output
        self._num_left = request.max_new_tokens
        self._decoder = None  # token ids alone
        if tokenizer:
            self._decoder = IncrementalDecoder(
                tokenizer,
                request.prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                shown_ids=params.shown_special_ids,
            )
        self._held = ""  # decoded, not yet given out

    def push(self, token_ids: list[int], num_accepted: int = 0) -> Delta:
        """The delta that the tokens of one step make, in order, of which the first `num_accepted` are accepted draft
        tokens. Tokens past the end of the sequence are left out."""
        taken: list[int] = []
        num_chars: list[int] = []
        text: list[str] = []
        for token_id in token_ids:
            taken.append(token_id)
            self._num_left -= 1
            is_stop = token_id in self._stop_ids
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH if self._num_left == 0 else None
            cause = token_id if token_id in self._named_ids else None
            # the id that ends a sequence is reported, and is text only where the request wants it
            if self._decoder is not None:
                settled = "" if is_stop and not self._keeps_stop else self._decoder.push([token_id])
                settled += "" if reason is None else self._decoder.finish()
                self._held += settled
                num_chars.append(len(settled))
            if (found := self._first_stop()) is not None:
                at, cause = found
                text.append(self._held[: at + len(cause) if self._keeps_stop else at])
                self._held, reason = "", FinishReason.STOP
            else:
                certain = len(self._held) - (0 if reason else self._num_uncertain())
                text.append(self._held[:certain])
                self._held = self._held[certain:]
            if reason is not None:
                cause = cause if reason is FinishReason.STOP else None
                return Delta(
                    *(tuple(taken), "".join(text), reason, cause),
                    num_accepted=min(num_accepted, len(taken)),
                    num_chars=tuple(num_chars),
                )
        return Delta(tuple(taken), "".join(text), num_accepted=num_accepted, num_chars=tuple(num_chars))

    def finish(self) -> str:
        """Return the text that was still held back, of an answer that ends before it has stopped."""
        return self._held + (self._decoder.finish() if self._decoder is not None else "")

    def _first_stop(self) -> tuple[int, str] | None:
        """Return where the first stop string begins in the held text, and which one it is. Of two at one place it is
        the shorter, which was complete earlier."""
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found, key=operator.itemgetter(0), default=None)

    def _num_uncertain(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(len(self._held), longest), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
