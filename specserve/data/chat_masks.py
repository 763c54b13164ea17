"""Chats -> token ids and loss masks: which tokens of a rendered chat are the assistant's own.

Where the template marks them with `{% generation %}` tags, transformers finds them. Elsewhere the spans are found by
rendering the chat again up to, and with other words in, each of the assistant's messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

from specserve.chat_template import END_THINK, REASONING_NAMES, THINK, Messages, thinking_switch
from specserve.errors import DataError, RequestError
from specserve.tokenizer import Tokenizer

_PLACEHOLDER = "\ue000"  # a private character: no answer holds it
_USE_TAGS = "mark the answers with generation tags"


def encode_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    tools: Messages | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a whole chat and its loss mask: True for what the assistant itself writes in this
    rendering. `tools` and `template_kwargs` are as in `Tokenizer.render_chat`.

    An answer begins where the generation prompt ends, and ends with the token that ends the turn, also where that is
    the next role's. Where a template leaves the reasoning out of earlier answers, the answer alone is learned; where it
    does so even for the last one, that one is kept whole, as it was generated, in a chat that asks for reasoning
    whatever `template_kwargs` say: no model reasons behind a prompt that asks for none. Raises DataError for messages
    that the template rejects, whose answers cannot be found in it, or whose tool calls the template does not write.
    """
    template = tokenizer.template
    try:
        messages, variables = template.prepare(messages, tools, template_kwargs)
        variables |= _thinking_mode(tokenizer, messages)
        if template.has_generation_tags(variables["tools"]):
            text, spans = _tagged_spans(tokenizer, messages, variables)
        else:
            text, spans = _Untagged(tokenizer, messages, variables).spans()
    except RequestError as error:
        raise DataError(str(error)) from error
    token_ids, loss_mask = _end_turns(tokenizer, *_encode(tokenizer, text, spans))
    _check_calls(tokenizer, messages, token_ids, loss_mask)
    return token_ids, loss_mask


def _thinking_mode(tokenizer: Tokenizer, messages: Messages) -> dict[str, bool]:
    """Return the variable with which a hybrid model is asked to reason, where the last answer has reasoning."""
    switch, last = thinking_switch(tokenizer.template.mentions), messages[-1]
    has_reasoning = END_THINK in str(last.get("content")) or any(last.get(name) for name in REASONING_NAMES)
    return {switch: True} if switch and last["role"] == "assistant" and has_reasoning else {}


Spans = Sequence[tuple[int, int]]  # [start, stop) of characters that the assistant wrote


def _encode(tokenizer: Tokenizer, text: str, spans: Spans) -> tuple[list[int], list[bool]]:
    """Return the token ids of a text and which of them lie in the spans. A prompt is encoded before its answer is
    there, so no token holds the end of one and the beginning of the other, as a header's newline and that of an answer
    would: the text is encoded in two there. Where the parts alone are other text, such a token bears no loss."""
    token_ids, offsets = tokenizer.encode_with_offsets(text)
    crossed = [start for start, _ in spans if any(low < start < high for low, high in offsets)]
    if crossed:
        edges = [0, *crossed, len(text)]
        parts = [(low, *tokenizer.encode_with_offsets(text[low:high])) for low, high in pairwise(edges)]
        in_parts = [token_id for _, ids, _ in parts for token_id in ids]
        if tokenizer.decode(in_parts, skip_special_tokens=False) == tokenizer.decode(
            token_ids, skip_special_tokens=False
        ):
            token_ids, crossed = in_parts, []
            offsets = [(begin + low, begin + high) for begin, _, places in parts for low, high in places]
    is_said = [any(low < stop and high > start for start, stop in spans) for low, high in offsets]
    is_crossing = [any(low < start < high for start in crossed) for low, high in offsets]
    return token_ids, [said and not crossing for said, crossing in zip(is_said, is_crossing, strict=True)]


def _tagged_spans(
    tokenizer: Tokenizer, messages: Messages, variables: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat, and the spans that its template's tags mark in it. transformers marks whole tokens; an
    answer begins behind the header that the prompt for it ends with."""
    template = tokenizer.template
    text = template.write(messages, variables)
    encoded = template.apply(
        messages,
        variables,
        return_assistant_tokens_mask=True,
        return_dict=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    offsets, spans = encoded["offset_mapping"], list[tuple[int, int]]()
    header = _header(tokenizer, [{"role": "user", "content": "1"}], variables)
    for first, stop in _runs([bool(bit) for bit in encoded["assistant_masks"]]):
        low, high = offsets[first]
        start = next((at for at in range(low + 1, high) if header and text.endswith(header, 0, at)), low)
        spans.append((start, offsets[stop - 1][1]))
    return text, spans


def _header(tokenizer: Tokenizer, asked: Messages, variables: Mapping[str, Any]) -> str:
    r"""Return what the template writes before an answer (`<|im_start|>assistant\n` in ChatML)."""
    write = tokenizer.template.write
    return write(asked, variables, add_generation_prompt=True)[len(write(asked, variables)) :]


class _Untagged:
    """A chat as a template without generation tags renders it. Places are indices of characters of `text`."""

    def __init__(self, tokenizer: Tokenizer, messages: Messages, variables: Mapping[str, Any]) -> None:
        """Render the chat as `ChatTemplate.prepare` gives it."""
        self.tokenizer, self.messages, self.variables = tokenizer, messages, variables
        self.text = self._write(messages)

    def spans(self) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, in which the last answer has its reasoning, and the answers' spans in it. A message's span
        is what rendering it adds to the text. Raises DataError or RequestError."""
        text, spans, end = self.text, list[tuple[int, int]](), 0
        for i, message in enumerate(self.messages):
            if message["role"] == "assistant":
                start = self._start(i, after=end)
                end = self._stop(i, start)
                spans.append((start, end))
        if self.messages[-1]["role"] == "assistant":
            text, spans[-1] = self._keep_reasoning(spans[-1])
        return text, spans

    def _write(self, messages: Messages, *, add_generation_prompt: bool = False, **mode: bool) -> str:
        variables = {**self.variables, **mode}
        return self.tokenizer.template.write(messages, variables, add_generation_prompt=add_generation_prompt)

    def _start(self, i: int, after: int) -> int:
        """Return where the assistant begins message `i`; its answer before ends at `after`."""
        asked = self.messages[:i] or [{"role": "user", "content": "1"}]
        header, before = self._header(asked).partition(THINK)[0], self._write(asked)
        if not i or not self.text.startswith(before):
            # Nothing can be rendered before the first message, and earlier turns may be rendered otherwise by now. The
            # answer is then behind the first header after what was said last.
            said = self._end_of_content(i - 1) if i else 0
            at = self.text.find(header, max(after, said))
            if not header or at < 0 or (i and header in self.text[after:at]):
                raise DataError(f"the chat template rewrites earlier turns; {_USE_TAGS}")
            before = self.text[:at]
        if len(before) < after:
            raise DataError(f"the chat template moves earlier answers; {_USE_TAGS}")
        return len(before) + self._header_length(self.text[len(before) :], asked)

    def _stop(self, i: int, start: int) -> int:
        """Return where message `i`, which begins at `start`, ends."""
        text, upto = self.text, self._write(self.messages[: i + 1])
        if text.startswith(upto):
            return len(upto)
        # It is rendered otherwise than when it was the last: without its reasoning, with another end. It ends with
        # the first special token behind its content; a tool call has none, and ends as it did.
        said = self._end_of_content(i)
        ends = self.tokenizer.special_tokens_in(text[max(said, start) :])
        if said < start:
            ends = sorted(self.tokenizer.special_tokens_in(upto[start:]), key=upto.rfind)[-1:]
        places = [text.find(token, max(said, start)) + len(token) for token in ends if token in text[start:]]
        if not places:
            raise DataError(f"the chat template has no end-of-turn token; {_USE_TAGS}")
        return min(places)

    def _end_of_content(self, i: int) -> int:
        """Return where the content of message `i` ends: the text after it stays the same when the content changes."""
        turns = self.messages
        changed = self._write([*turns[:i], {**turns[i], "content": _PLACEHOLDER}, *turns[i + 1 :]])
        return len(self.text) - _common_length(self.text[::-1], changed[::-1])

    def _header_length(self, rest: str, asked: Messages) -> int:
        """Return how much of `rest`, which begins with an answer to what was asked, the generation prompt writes.

        A hybrid model's empty reasoning was written by the prompt that asks for none; what a prompt writes to begin
        reasoning was left out with it.
        """
        modes: list[dict[str, bool]] = [{}]
        if switch := thinking_switch(self.tokenizer.template.mentions):
            modes += [{switch: True}, {switch: False}]
        headers = [self._header(asked, **mode) for mode in modes]
        for candidates in (headers, [header.partition(THINK)[0] for header in headers]):
            if lengths := [len(header) for header in candidates if rest.startswith(header)]:
                return max(lengths)
        return _common_length(headers[0], rest)

    def _header(self, asked: Messages, **mode: bool) -> str:
        return _header(self.tokenizer, asked, {**self.variables, **mode})

    def _keep_reasoning(self, span: tuple[int, int]) -> tuple[str, tuple[int, int]]:
        """Return the chat and the span of its last answer, with the reasoning that the template would leave out
        of it."""
        text, last = self.text, self.messages[-1]
        reasoning, tag, answer = str(last.get("content", "")).rpartition(END_THINK)
        if not tag or END_THINK in text[slice(*span)] or len(self.messages) == 1:
            return text, span
        prompt = self._write(self.messages[:-1], add_generation_prompt=True)
        if prompt.rstrip().endswith(THINK):  # the prompt begins it
            reasoning = reasoning.partition(THINK)[2] or reasoning
            reasoning = reasoning.removeprefix(prompt[len(prompt.rstrip()) :])
        space = answer[: len(answer) - len(answer.lstrip())]
        whole = prompt + reasoning + tag + space + text[span[0] :].lstrip()
        return whole, (len(prompt), len(whole) - (len(text) - span[1]))


def _end_turns(
    tokenizer: Tokenizer, token_ids: Sequence[int], loss_mask: Sequence[bool]
) -> tuple[list[int], list[bool]]:
    """End each answer with the token that ends the turn. The text after that token is the template's (a newline, in
    ChatML). A next role's token that ends the turn (GLM) belongs to the answer, also behind the last one."""
    ids, mask = list(token_ids), list(loss_mask)
    for start, stop in _runs(loss_mask):
        last = max((t for t in range(start, stop) if ids[t] in tokenizer.special_token_ids), default=None)
        if last is not None and not tokenizer.decode(ids[last + 1 : stop], skip_special_tokens=False).strip():
            mask[last + 1 : stop] = [False] * (stop - last - 1)
        elif stop < len(ids):
            mask[stop] = ids[stop] in tokenizer.end_ids
        elif (end_id := _last_end_id(tokenizer)) is not None:
            ids.append(end_id)
            mask.append(True)
    return ids, mask


@lru_cache(maxsize=8)  # probes of the template, which every chat would make again
def _last_end_id(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a turn, where the template writes it after an answer only when something follows.
    Otherwise return None."""
    probe = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
    template = tokenizer.template
    try:
        text, upto = template.write(probe, template.kwargs), template.write(probe[:2], template.kwargs)
    except RequestError:
        return None
    if not text.startswith(upto):
        return None
    following = tokenizer.encode(text[len(upto) :], add_special_tokens=False)[:1]
    return next((token_id for token_id in following if token_id in tokenizer.end_ids), None)


def _check_calls(tokenizer: Tokenizer, messages: Messages, token_ids: Sequence[int], loss_mask: Sequence[bool]) -> None:
    """Raises DataError where a tool call is not among what the assistant says, because the rest would be trained on
    without it."""
    names = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
    if not names:
        return
    said = tokenizer.decode([i for i, bit in zip(token_ids, loss_mask, strict=True) if bit], skip_special_tokens=False)
    if lost := [name for name in names if name not in said]:
        raise DataError(f"the chat template does not write the tool call of {lost[0]!r:.60}")


def _runs(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of True."""
    for bit, run in groupby(range(len(mask)), lambda t: mask[t]):
        if bit:
            places = list(run)
            yield places[0], places[-1] + 1


def _common_length(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
