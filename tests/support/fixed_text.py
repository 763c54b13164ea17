"""A server whose model writes the text that a test sets, in the format that a chat template shows."""

import itertools
import json
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fakes import FakeEngine, FakeTemplate, FakeTokenizer

from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.requests.request import Delta, FinishReason, Request, TokenLogprobs
from specserve.serve.settings import ServeRun

HERMES = "tools <tool_call> <think> </think> enable_thinking"
STEP = 3  # bytes

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Genève", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Genève", "days": 2}
ANSWER = "It will be fine."
THOUGHT = "<think>\nThey want weather.\n</think>\n\n"


class FixedTextEngine(FakeEngine):
    """Writes `says`, three bytes a step; with `answers`, a call where there are tools and no result of one yet, and an
    object where the answer must follow a grammar."""

    def __init__(self, template: str = HERMES) -> None:
        self.says = ""
        self.answers = False
        super().__init__()
        self.tokenizer = FakeTokenizer()
        self.tokenizer.template = FakeTemplate(template)

    def _step(self, request: Request, num_emitted: int) -> Delta:
        if request.is_cancelled:
            return super()._step(request, num_emitted)
        prompt = bytes(request.prompt_ids)
        is_call = b'"function"' in prompt and b"<tool>" not in prompt
        answer = CALL if is_call else json.dumps(ARGUMENTS) if request.params.grammar else ANSWER
        text = (THOUGHT + answer if self.answers else self.says).encode()
        end = min(num_emitted + STEP, len(text), request.max_new_tokens)
        reason = FinishReason.STOP if end == len(text) else None
        reason = FinishReason.LENGTH if end == request.max_new_tokens and end < len(text) else reason
        before, after = (text[:i].decode(errors="ignore") for i in (num_emitted, end))
        asked = request.params.logprobs is not None
        logprobs = tuple(TokenLogprobs(i, -1.0, ()) for i in text[num_emitted:end]) if asked else ()
        stats = self._stats_of(request) if reason else None
        ends = [len(text[:i].decode(errors="ignore")) for i in range(num_emitted, end + 1)]
        return Delta(
            tuple(text[num_emitted:end]),
            after[len(before) :],
            reason,
            stats=stats,
            logprobs=logprobs,
            num_accepted=0 if request.params.speculation == 0 else min(STEP - 1, end - num_emitted),
            num_chars=tuple(itertools.starmap(operator.sub, zip(ends[1:], ends, strict=False))),
        )


@contextmanager
def serving(template: str = HERMES, **options: Any) -> Iterator[tuple[FixedTextEngine, str]]:
    """The engine, and the URL of a server over it."""
    with FixedTextEngine(template) as engine:
        server = HttpServer(create_app(engine, run=ServeRun(**options)), port=0)
        server.start()
        try:
            yield engine, f"{server.url}/v1"
        finally:
            server.stop()
