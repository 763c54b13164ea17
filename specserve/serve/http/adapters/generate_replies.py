"""The replies of SGLang's POST /generate: every answer is an object, in a stream with all that has come so far."""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.serve.http.adapters.generate_bodies import GenerateBody
from specserve.serve.http.openai.logprobs import TokenTexts, finite
from specserve.serve.http.openai.replies import Answer, Json, Usage, event
from specserve.serve.requests.request import TokenLogprobs

_LONG = 512  # tokens of an answer, from which on spelling them all again would hold the event loop


@dataclass
class _Told:
    """The content of one answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class GenerateFormat:
    """Spells the answers to one body of /generate."""

    def __init__(self, body: GenerateBody, texts: TokenTexts) -> None:
        self._body = body
        self._texts = texts
        self._id = body.rid or uuid.uuid4().hex
        self._start_time = time.monotonic()
        self._told: dict[int, _Told] = {}
        self._most = 0  # tokens of an answer so far

    @property
    def is_long(self) -> bool:
        """Return whether the next event may be long, as every one tells all of its answer again."""
        return self._body.return_logprob or self._most >= _LONG

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Any:  # noqa: ARG002
        spelled = [self._spell(answer) for answer in answers]
        return spelled if self._body.is_batch else spelled[0]

    def begin(self, start: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        return ()

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        index = {"index": answer.index} if self._body.is_batch else {}
        yield event(self._spell(answer) | index, is_long=self.is_long)

    def end(self, usage: Usage) -> Iterable[bytes]:  # noqa: ARG002
        yield event("[DONE]")

    def failure(self, error: Json) -> Iterable[bytes]:
        return event(error), event("[DONE]")

    def _spell(self, answer: Answer) -> Json:
        told = self._told.setdefault(answer.index, _Told())
        told.text += answer.part.content
        told.token_ids += answer.token_ids
        told.logprobs += answer.logprobs
        self._most = max(self._most, len(told.token_ids))
        meta: Json = {
            "id": self._id if not self._body.is_batch else f"{self._id}-{answer.index}",
            "finish_reason": _finish_reason(answer, told),
            "prompt_tokens": len(answer.prompt_ids),
            "completion_tokens": len(told.token_ids),
        }
        if answer.stats is not None:
            meta["cached_tokens"] = answer.stats.num_cached_tokens
            meta["spec_verify_ct"] = answer.stats.num_steps
            meta["e2e_latency"] = time.monotonic() - self._start_time
        if self._body.return_logprob:
            meta |= self._logprobs("output", told.logprobs)
        if self._body.return_logprob and answer.prompt:
            start = self._body.logprob_start_len
            items = [token.logprobs or TokenLogprobs(token.token_id, 0.0, ()) for token in answer.prompt]
            meta |= self._logprobs("input", items[start:], has_first=start == 0)
        return {"text": told.text, "output_ids": list(told.token_ids), "meta_info": meta}

    def _logprobs(self, kind: str, items: Sequence[TokenLogprobs], *, has_first: bool = False) -> Json:
        """Return log-probability, token id and text of each token. `has_first`: the first token begins the prompt, and
        has none."""
        rows = [self._row(item.token_id, item.logprob) for item in items]
        if has_first and rows:
            rows[0][0] = None
        said: Json = {f"{kind}_token_logprobs": rows}
        if self._body.top_logprobs_num:
            said[f"{kind}_top_logprobs"] = [[self._row(*top) for top in item.top] or None for item in items]
        return said

    def _row(self, token_id: int, logprob: float) -> list[Any]:
        return [finite(logprob), token_id, self._texts[token_id] if self._body.return_text_in_logprobs else None]


def _finish_reason(answer: Answer, told: _Told) -> Json | None:
    if answer.finish_reason is None:
        return None
    if answer.finish_reason == "length":
        return {"type": "length", "length": len(told.token_ids)}
    last = told.token_ids[-1] if told.token_ids else None
    return {"type": "stop", "matched": last if answer.stop_reason is None else answer.stop_reason}
