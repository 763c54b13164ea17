"""A conversation with a server over /v1/chat/completions: its messages, and what speculation did for an answer."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from specserve.drafters.speculation import parse_speculation
from specserve.eval.client import Client, RefusedError
from specserve.speculative.acceptance import Acceptance


@dataclass(frozen=True)
class Token:
    """A piece of an answer: one token where the server separates them, else whatever came in one event."""

    text: str
    depth: int  # 0 is the target's own draw, d a draft token that was accepted at depth d of its tree
    is_reasoning: bool = False


@dataclass
class AnswerSoFar:
    """The facts about an answer so far: its tokens, their depths, and its acceptance."""

    depths: list[int] = field(default_factory=list)  # of its tokens; empty where the server does not report them
    acceptance: Acceptance = field(default_factory=Acceptance)  # of the steps that are whole
    num_pieces: int = 0  # tokens where the server separates them
    finish: str = ""  # the finish_reason
    _num_open: int = 0  # draft tokens of a step whose own token is still to come
    _first_time: float = 0.0
    _last_time: float = 0.0

    def take(self, depths: Sequence[int], num_pieces: int) -> None:
        """Count the next pieces. A step emits draft tokens of depths 1, 2, ... and then a token of the target's own, of
        depth 0. The first token of an answer comes from prefill, which is no step. After it, depths 1, 2, 0, 0 are two
        steps that accepted 2 and 0 draft tokens."""
        for depth in depths:
            if depth == 0 and self.depths:
                self._count(self._num_open + 1)
            self._num_open = depth
            self.depths.append(depth)
        self.num_pieces += num_pieces
        self._last_time = time.monotonic()
        self._first_time = self._first_time or self._last_time

    def end(self) -> None:
        """End the answer. Its last step may have been cut off behind a draft token."""
        if self._num_open:
            self._count(self._num_open)
            self._num_open = 0

    def _count(self, num_emitted: int) -> None:
        depth = max(self._num_open, len(self.acceptance.accepted_per_depth))
        self.acceptance = self.acceptance.after_step(self._num_open, depth=depth, num_emitted=num_emitted)

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens per second after the first token. None where the server does not separate tokens, or there is
        one alone."""
        seconds, later = self._last_time - self._first_time, len(self.depths) - 1
        if later < 1 or seconds <= 0:
            return None
        return later / seconds


class ServerChat:
    """Messages with one server, which is asked for tokens and their depths where it is one of ours."""

    def __init__(self, client: Client, *, system: str = "", max_tokens: int = 512, temperature: float = 0.0) -> None:
        """Ask the server what it is. Raises UnreachableError and RefusedError."""
        self._client = client
        self._start = [{"role": "system", "content": system}] if system else []
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self.model = str(client.json("/v1/models")["data"][0]["id"])
        self._bound: int | None = None  # draft tokens that a step may accept for us
        self._is_ours = self._reported_speculation() is not None
        self.messages: list[dict[str, str]] = list(self._start)
        self.answer = AnswerSoFar()

    @property
    def speculation(self) -> str | None:
        """The server's way to speculate, and the bound on it for our own requests. None where the server does
        not report it."""
        own = self._reported_speculation()
        if own is None or self._bound is None:
            return own
        return f"{own}, of which {self._bound} draft tokens at most"

    def _reported_speculation(self) -> str | None:
        try:
            return str(self._client.json("/v1/speculation")["speculation"])
        except (RefusedError, KeyError, TypeError):
            return None

    def speculate(self, way: str) -> None:
        """Have the server speculate in another way. Where it lets nobody change that, a chain or "off" bounds the draft
        tokens of our own requests. Raises ConfigError and RefusedError."""
        tree = None if way == "auto" else parse_speculation(way)
        try:
            self._client.json("/v1/speculation", {"speculation": way})
            self._bound = None
        except RefusedError as error:
            if error.status != 403 or not (way == "off" or (tree and tree.top_k == 1)):
                raise
            self._bound = tree.depth if tree else 0

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = list(self._start)

    def ask(self, message: str) -> Iterator[Token]:
        """Send a message and yield the answer as it comes. Both become part of the conversation with the first piece
        of the answer, and stay part of it where the iteration is given up later."""
        self.answer = AnswerSoFar()
        asked = {"role": "user", "content": message}
        body: dict[str, Any] = {
            **self._options,
            "model": self.model,
            "messages": [*self.messages, asked],
            "stream": True,
        }
        if self._is_ours:
            body["return_draft_depths"] = True
            if self._bound is not None:
                body["speculation"] = self._bound
        content: list[str] = []
        try:
            with closing(self._client.events("/v1/chat/completions", body)) as events:
                for event in events:
                    for choice in event.get("choices", ()):
                        yield from self._tokens(choice, content)
        finally:
            if self.answer.num_pieces:
                self.messages += [asked, {"role": "assistant", "content": "".join(content)}]

    def _tokens(self, choice: dict[str, Any], content: list[str]) -> Iterator[Token]:
        delta, origins = choice.get("delta") or {}, choice.get("draft_depths") or {}
        text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
        content.append(text)
        depths: list[int] = origins.get("depths", [])
        if origins:
            pairs = zip(origins["tokens"], depths, strict=True)
            found = [Token(piece, depth, is_reasoning=bool(reasoning)) for piece, depth in pairs]
        elif self._is_ours:  # its text comes with its tokens
            found = []
        else:
            found = [Token(reasoning, 0, is_reasoning=True), Token(text, 0)]
            found = [token for token in found if token.text]
        if found:
            self.answer.take(depths, len(found))
        if choice.get("finish_reason"):
            self.answer.finish = choice["finish_reason"]
            self.answer.end()
        yield from found
