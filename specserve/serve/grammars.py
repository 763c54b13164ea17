"""Grammars that answers must follow, as token masks: JSON schemas, regular expressions, choices and Lark grammars.

llguidance does the parsing: it knows which tokens may come next, in tens of microseconds. This file bounds what a
client can make it do, and walks a proposed tree with it. Knows nothing of HTTP.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specserve.errors import RequestError
from specserve.serve.grammar_trial import GrammarTrial, compiled, words
from specserve.serve.request import GrammarSpec, TokenMask
from specserve.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 256 * 1024
NUM_KEPT = 64  # grammars that are compiled and kept, those used last
MAX_KEPT_CHARS = 2 * 2**20  # of their texts together
_trial = functools.lru_cache(maxsize=4)(GrammarTrial)  # of a tokenizer, for all engines that have it


class Grammars:
    """The grammars of one model's tokenizer. Threads may share it; compiling lets other threads run."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is that of the model, which may be padded beyond the tokenizer's."""
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._kept: OrderedDict[GrammarSpec, Any] = OrderedDict()  # matchers that no sequence has advanced
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Callable[[], TokenMask]:
        """Make a function that gives each sequence a mask of its own. Raises RequestError with the parser's own
        words."""
        with self._lock:
            matcher = self._kept.get(spec)
            if matcher is not None:
                self._kept.move_to_end(spec)
        if matcher is None:
            matcher = self._compile(spec)
            with self._lock:
                self._kept[spec] = matcher
                while len(self._kept) > NUM_KEPT or sum(len(kept.text) for kept in self._kept) > MAX_KEPT_CHARS:
                    self._kept.popitem(last=False)
        return lambda: GrammarMask(matcher.deep_copy(), self._vocab_size)

    def _compile(self, spec: GrammarSpec) -> Any:
        if len(spec.text) > MAX_GRAMMAR_CHARS:
            raise _refused(f"has {len(spec.text)} characters, at most {MAX_GRAMMAR_CHARS} are taken")
        tokenizer, trial = self._words
        if error := trial.check(spec.kind, spec.text):
            raise _refused(f"cannot be used: {_shortened(error)}")
        return compiled(tokenizer, spec.kind, spec.text)

    @functools.cached_property
    def _words(self) -> tuple[Any, GrammarTrial]:
        """The tokenizer as llguidance takes it, here and where grammars are tried: made at the first grammar, for it
        takes up to a second."""
        try:
            asked = self._tokenizer.as_json(), self._vocab_size, tuple(self._eos_ids)
            return words(*asked), _trial(*asked)
        except ValueError as error:
            raise _refused(f"cannot be used with this model's tokenizer: {error}") from error


class GrammarMask:
    """The state of one sequence in its grammar, as a `TokenMask`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._num_bytes = matcher, -(-vocab_size // 8)

    def masks(self, parents: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:
        """Compute the masks. Raises RequestError where the grammar has become too complex to go on."""
        rows = np.full((len(parents), self._num_bytes), 255, np.uint8)
        states = [self._matcher] + [None] * (len(parents) - 1)
        for node, (parent, token_id) in enumerate(zip(parents, token_ids, strict=True)):
            if node:
                before = states[parent]
                # behind a token that may not come here nothing is ever drawn, so its row may say anything
                if before is None or before.is_stopped() or not before.validate_tokens([token_id]):
                    continue
                states[node] = before.deep_copy()
                states[node].consume_token(token_id)
            rows[node] = self._row(states[node])
        return rows

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens. A token after the end of the grammar, such as the one that ends the sequence, is
        not part of it."""
        for token_id in token_ids:
            if self._matcher.is_stopped():
                break
            self._matcher.consume_token(token_id)

    def _row(self, matcher: Any) -> np.ndarray:
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(f"cannot be followed further: {_shortened(matcher.get_error())}")
        return np.frombuffer(bits, np.uint8, self._num_bytes)


def _refused(why: str) -> RequestError:
    return RequestError(f"the grammar {why}", param="grammar")


def _shortened(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= 300 else text[:300] + "..."
