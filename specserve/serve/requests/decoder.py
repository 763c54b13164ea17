"""The text of an answer while its tokens arrive. No text is emitted twice, and no half character."""

from collections.abc import Collection, Sequence

from specserve.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # decoders write it for bytes that are no UTF-8 (yet)


class IncrementalDecoder:
    """Text from tokens that arrive in pieces: `push`ed and `finish`ed text joins to `decode` of all the ids.

    No half character is ever emitted: trailing U+FFFD may still become a character, so it waits. A push costs at most
    two decodes of a short window (the ids of this push and the last, and what still waits), never of the sequence.
    """

    NUM_HELD = 3  # a UTF-8 character has at most 4 bytes, so at most 3 trailing ones are open
    NUM_WINDOW = 64  # ids that may wait for a character to close before they count as bytes of no character

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown_ids: Collection[int] = ()
    ) -> None:
        """`shown_ids` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids.difference(shown_ids) if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_context = 0  # leading ids of the window whose text is all out
        self._num_emitted = 0  # characters of the window's text that are out

    def push(self, token_ids: Sequence[int]) -> str:
        """Add these ids, and return the text that is now certain."""
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
