"""The way from what a client asks to a `Request`: all of it is checked against the model, and all that follows from its
options is computed."""

import functools
import itertools
import random
from collections.abc import Callable, Sequence

from specserve.errors import RequestError
from specserve.serve.engine.options import bad_sequences, check_prompt, check_some_token, check_token_ids
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.grammars import Grammars
from specserve.serve.requests.request import Delta, GrammarSpec, Request, RequestOptions, SamplingParams, TokenMask
from specserve.tokenizer import Tokenizer


class InputProcessor:
    """Makes the requests of one engine. Every method may be called from any thread."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, eos_ids: Sequence[int], num_pages: int) -> None:
        """`num_pages` are those that one sequence may have, at most."""
        self.vocab_size, self.max_model_len = runner.config.target.vocab_size, runner.shapes.max_model_len
        self.grammars = Grammars(tokenizer, self.vocab_size, sorted(eos_ids))
        self._has_constrained, self._page_size = runner.has_constrained, runner.shapes.page_size
        self._keeps_states = bool(runner.shapes.kept_layers)
        self._tokenizer, self._eos_ids, self._num_pages = tokenizer, frozenset(eos_ids), num_pages
        # all choices of a request have the same, and are submitted one after another
        self._bad_sequences = functools.lru_cache(maxsize=64)(functools.partial(bad_sequences, tokenizer=tokenizer))
        self._ids = itertools.count()

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Return how many tokens the sequence may grow by. Raises RequestError, whose param names what does not fit,
        or CapacityError where its grammar cannot be tried now."""
        if params.n != 1:
            raise RequestError("the engine takes one sequence at a time; submit params.choices()", param="n")
        if params.hidden_states and not self._keeps_states:
            raise RequestError(
                "this server returns no hidden states: it was started without --hidden-states", param="hidden_states"
            )
        self._mask_maker(params.grammar)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none", param="stop")
        max_new_tokens = check_prompt(prompt_ids, params.max_tokens, self.max_model_len, self.vocab_size)
        check_token_ids(params, self.vocab_size)
        check_some_token(params, self._stop_ids(params), self._bad_sequences(params.bad_words), self.vocab_size)
        if params.max_tokens is not None:
            max_new_tokens = params.max_tokens
        pages = -(-(len(prompt_ids) + max_new_tokens - 1) // self._page_size)
        if pages > self._num_pages:
            raise RequestError(
                f"prompt and answer need {pages} cache pages, the server has {self._num_pages} for a sequence; lower "
                "max_tokens or start the server with a larger cache",
                param="max_tokens",
            )
        return max_new_tokens

    def make_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        options: RequestOptions,
        adapter_id: int = -1,
    ) -> Request:
        """Make the request for one sequence. A grammar that is not known is compiled first. Raises what `check`
        raises."""
        request_id = options.get("request_id") or f"seq-{next(self._ids)}"
        token_mask, seed = options.get("token_mask"), params.seed
        if token_mask is not None:
            self._check_constrained("token_mask")
        max_new_tokens = self.check(prompt_ids, params)
        if token_mask is None and (make_mask := self._mask_maker(params.grammar)):
            token_mask = make_mask()
        if seed is None:
            seed = random.getrandbits(63)
        own: RequestOptions = {**options, "request_id": request_id, "token_mask": token_mask}
        return Request(
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_new_tokens=max_new_tokens,
            seed=seed,
            on_delta=on_delta,
            stop_ids=self._stop_ids(params),
            bad_sequences=self._bad_sequences(params.bad_words),
            adapter_id=adapter_id,
            **own,
        )

    def _mask_maker(self, grammar: GrammarSpec | None) -> Callable[[], TokenMask] | None:
        """Return what makes the masks of a grammar, None where there is none, or where it cannot be used and need not
        be. Raises what `check` raises."""
        if grammar is None:
            return None
        try:
            self._check_constrained("grammar")
            return self.grammars.compile(grammar)
        except RequestError:
            if grammar.is_needed:
                raise
            return None

    def _check_constrained(self, param: str) -> None:
        if not self._has_constrained:
            raise RequestError(f"{param}: this engine was started with constrained=False", param=param)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._eos_ids
