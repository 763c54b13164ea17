"""The way from the token ids that steps emit to deltas: it finds where a sequence ends, and which of its text is
certain."""

import operator

from specserve.serve.requests.decoder import IncrementalDecoder
from specserve.serve.requests.request import Delta, FinishReason, Request
from specserve.tokenizer import Tokenizer


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
                tokenizer, skip_special_tokens=params.skip_special_tokens, shown_ids=params.shown_special_ids
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
