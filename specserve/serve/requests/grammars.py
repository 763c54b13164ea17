"""Grammars that answers must follow, as token masks: JSON schemas, regular expressions, choices and Lark grammars.

llguidance does the parsing: it knows which tokens may come next, in tens of microseconds. This file bounds what a
client can make it do, and walks a proposed tree with it. Knows nothing of HTTP.
"""

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specserve.errors import CapacityError, RequestError
from specserve.serve.requests.grammar_trial import GrammarTrial, compiled, words
from specserve.serve.requests.request import GrammarSpec, TokenMask
from specserve.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 256 * 1024
NUM_KEPT = 64  # grammars that are compiled and kept, those used last; and as many that were refused
MAX_KEPT_CHARS = 2 * 2**20  # of their texts together
logger = logging.getLogger(__name__)
_trial = functools.lru_cache(maxsize=4)(GrammarTrial)  # of a tokenizer, for all engines that have it


class Grammars:
    """The grammars of one model's tokenizer. Threads may share it; compiling lets other threads run."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is that of the model, which may be padded beyond the tokenizer's. Without a tokenizer every
        grammar is refused."""
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._matchers, self._refusals = _Kept(), _Kept()  # matchers that no sequence has advanced; reasons
        self._compiling = threading.Lock()  # one after another: a request that waits may have the same

    def knows(self, spec: GrammarSpec) -> bool:
        """Return whether `compile` takes or refuses the grammar at once: it waits for no other, and compiles none."""
        return len(spec.text) > MAX_GRAMMAR_CHARS or spec in self._matchers or spec in self._refusals

    def compile(self, spec: GrammarSpec) -> Callable[[], TokenMask]:
        """Make a function that gives each sequence a mask of its own. Raises RequestError with the parser's own
        words, and CapacityError where no grammar can be tried now."""
        matcher = self._find(spec)
        if matcher is None:
            with self._compiling:
                matcher = self._find(spec) or self._compile(spec)
        return lambda: GrammarMask(matcher.deep_copy(), self._vocab_size)

    def _find(self, spec: GrammarSpec) -> Any:
        """The matcher of a known grammar, else None. Raises RequestError for one that was refused."""
        if len(spec.text) > MAX_GRAMMAR_CHARS:
            raise _refused(f"has {len(spec.text)} characters, at most {MAX_GRAMMAR_CHARS} are taken")
        if why := self._refusals.get(spec):
            raise _refused(why)
        return self._matchers.get(spec)

    def _compile(self, spec: GrammarSpec) -> Any:
        tokenizer, trial = self._words
        try:
            error = trial.check(spec.kind, spec.text)
        except OSError as failure:
            logger.error("a grammar cannot be tried: %s", failure)
            raise CapacityError(
                "no grammar can be tried now; the server's log has the details. Send the request again later"
            ) from failure
        if error:
            why = f"cannot be used: {_shortened(error)}"
            self._refusals.put(spec, why)
            raise _refused(why)
        matcher = compiled(tokenizer, spec.kind, spec.text)
        self._matchers.put(spec, matcher)
        return matcher

    @functools.cached_property
    def _words(self) -> tuple[Any, GrammarTrial]:
        """The tokenizer as llguidance takes it, here and where grammars are tried: made at the first grammar, for it
        takes up to a second."""
        if self._tokenizer is None:
            raise _refused("needs a tokenizer, and this engine has none; leave it out")
        try:
            asked = self._tokenizer.as_json(), self._vocab_size, tuple(self._eos_ids)
            return words(*asked), _trial(*asked)
        except ValueError as error:
            raise _refused(f"cannot be used with this model's tokenizer: {error}") from error


class _Kept:
    """A memory of the grammars that were used last, at most `NUM_KEPT` and `MAX_KEPT_CHARS` of them, and of what became
    of each. Threads may share it."""

    def __init__(self) -> None:
        self._found: OrderedDict[GrammarSpec, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, spec: GrammarSpec) -> bool:
        with self._lock:
            return spec in self._found

    def get(self, spec: GrammarSpec) -> Any:
        """Return what became of a grammar, None where it is not kept."""
        with self._lock:
            if spec in self._found:
                self._found.move_to_end(spec)
            return self._found.get(spec)

    def put(self, spec: GrammarSpec, found: Any) -> None:
        with self._lock:
            self._found[spec] = found
            while len(self._found) > NUM_KEPT or sum(len(kept.text) for kept in self._found) > MAX_KEPT_CHARS:
                self._found.popitem(last=False)


class GrammarMask:
    """The state of one sequence in its grammar, as a `TokenMask`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._num_bytes = matcher, -(-vocab_size // 8)

    def masks(self, parents: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:
        """Compute the masks. Raises RequestError where the grammar has become too complex to go on behind the first
        node; behind another one no token may come then, so an answer ends there if it comes there."""
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
            bits = states[node].compute_bitmask()
            if not states[node].is_error():
                rows[node] = np.frombuffer(bits, np.uint8, self._num_bytes)
            elif node == 0:
                raise _refused(f"cannot be followed further: {_shortened(states[node].get_error())}")
            else:
                rows[node], states[node] = 0, None
        return rows

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens. A token after the end of the grammar, such as the one that ends the sequence, is
        not part of it."""
        for token_id in token_ids:
            if self._matcher.is_stopped():
                break
            self._matcher.consume_token(token_id)


def _refused(why: str) -> RequestError:
    return RequestError(f"the grammar {why}", param="grammar")


def _shortened(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= 300 else text[:300] + "..."
