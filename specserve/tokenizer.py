"""Text <-> token ids, for training and serving alike: plain text, chats, loss masks.

A thin wrapper around transformers' tokenizer of a model folder. Knows nothing of models or requests; torch is never
needed, and transformers is imported only when a tokenizer is loaded.
"""

import inspect
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from specserve import host
from specserve.errors import CheckpointError, ConfigError, DataError, RequestError

log = logging.getLogger(__name__)

GENERIC_CLASS = "TokenizersBackend"  # what transformers calls its class for a tokenizer.json alone
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TEMPLATE_VARIABLES = frozenset({"documents"})  # parameters of transformers that reach the template
THINKING_SWITCH = "enable_thinking"  # the variable by which templates of hybrid models are told not to reason
THINK, END_THINK = "<think>", "</think>"
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # what templates call the reasoning of a message
PROBE = "zqprobe"  # a word that no template writes of itself
_PROBE_CALL = {"id": "1", "type": "function", "function": {"name": PROBE, "arguments": {PROBE: 1}}}
PLACEHOLDER = "\ue000"  # a private character: no answer holds it


class Tokenizer:
    """One model folder's tokenizer and chat template.

    Threads may share it for everything but `encode_chat`: transformers tracks generation tags in the template itself.
    """

    def __init__(
        self, backend: Any, end_ids: Collection[int] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """`backend` is a transformers tokenizer, `end_ids` what else than its EOS ends a turn; use `load`."""
        self._backend = backend
        self.template_kwargs = dict(template_kwargs or {})  # of every chat that sets no others
        self._vocab_size = len(backend)
        added = backend.added_tokens_decoder.items()  # special without having a name, as Gemma's <end_of_turn> is
        self._special_ids = frozenset(backend.all_special_ids).union(i for i, token in added if token.special)
        self._end_ids = frozenset(end_ids).union(() if backend.eos_token_id is None else (backend.eos_token_id,))
        options = inspect.signature(backend.apply_chat_template).parameters
        self._reserved_names = frozenset(options).union(["messages"]) - TEMPLATE_VARIABLES

    @classmethod
    def load(cls, folder: Path, template_kwargs: Mapping[str, Any] | None = None) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face model folder; every chat that it renders gets `template_kwargs` where
        it sets no others. Raises CheckpointError, and ConfigError for a variable that cannot be set or that the chat
        template does not read; never looks on the network."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; expected a model folder with a tokenizer.json")
        backend_class = _import_class(folder)
        try:
            # The length check of transformers would only log; lengths are the caller's business.
            backend = backend_class.from_pretrained(str(folder), local_files_only=True, model_max_length=2**62)
        except Exception as error:  # transformers raises whatever its parsers raise
            raise CheckpointError(f"{folder}: cannot read the tokenizer: {error}") from error
        tokenizer = cls(backend, _end_ids(folder), template_kwargs)
        tokenizer.check_template_kwargs(tokenizer.template_kwargs)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer knows, added tokens included. The model's embedding may be padded beyond it."""
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._backend.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._backend.eos_token_id

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out with `skip_special_tokens`."""
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def template_mentions(self, word: str) -> bool:
        """Whether the chat template's source holds `word`: a variable it reads, a tag it knows."""
        return any(word in source for source in self._sources)

    def check_template_kwargs(self, template_kwargs: Mapping[str, Any]) -> None:
        """Raises ConfigError for a variable that cannot be set or that the chat template does not read."""
        for name in template_kwargs:
            if name in self._reserved_names:
                raise ConfigError(f"template_kwargs cannot set {name}: the name is reserved")
            if not self.reads_variable(name):
                raise ConfigError(f"template_kwargs sets {name}, which the target's chat template does not read")

    def reads_variable(self, name: str) -> bool:
        """Whether the chat template's source holds `name` as a word of its own."""
        return any(re.search(rf"\b{re.escape(name)}\b", source) for source in self._sources)

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the chat template writes down the tools that it is given."""
        tool = {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}
        return self._writes_probe([{"role": "user", "content": "1"}], [{"type": "function", "function": tool}])

    @property
    def reads_reasoning(self) -> bool:
        """Whether the chat template knows reasoning: in a field of its own, or in tags within the content."""
        return self._reads_reasoning_apart or self.template_mentions(END_THINK)

    @cached_property
    def _reads_reasoning_apart(self) -> bool:
        answer = {"role": "assistant", "content": "1", **dict.fromkeys(REASONING_NAMES, PROBE)}
        return self._writes_probe([{"role": "user", "content": "1"}, answer])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text. Raises RequestError on a lone surrogate, which no UTF-8 text can hold."""
        _check_unicode(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, byte for byte (no clean-up of spaces); bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins.

        The template writes the special tokens, BOS included, so none are added. The arguments of tool calls are
        mappings; a template that wants them as text gets text. `template_kwargs` become template variables, and win
        over those of `load`; they cannot replace the template. Raises RequestError when the model has no chat template,
        the template rejects the messages, or a variable has a reserved name.
        """
        kwargs = self._variables(tools, template_kwargs)
        messages = self._as_template_takes(messages)
        return self.encode(self._render(messages, add_generation_prompt, kwargs), add_special_tokens=False)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a whole chat and its loss mask: True for what the assistant itself writes in this rendering.
        `tools` and `template_kwargs` are as in `render_chat`.

        That begins where the generation prompt ends, and ends with the token that ends the turn, also where that is
        the next role's. The spans come from the template's `{% generation %}` tags, else from what each assistant
        message adds to the rendered chat. Where a template leaves the reasoning out of earlier answers, the answer
        alone is learned; where it does so even for the last one, that one is kept whole, as it was generated.
        Raises DataError for messages that the template rejects, whose answers cannot be told from the rest, or whose
        tool calls the template does not write.
        """
        try:
            kwargs = self._variables(tools, template_kwargs)
            messages = self._as_template_takes(messages)
            template = self._backend.get_chat_template(tools=kwargs["tools"]) if self.has_chat_template else ""
            if GENERATION_TAG.search(template):
                encoded = self._apply_template(messages, **kwargs, return_assistant_tokens_mask=True, return_dict=True)
                token_ids, loss_mask = encoded["input_ids"], [bool(bit) for bit in encoded["assistant_masks"]]
            else:
                token_ids, loss_mask = self._encode_by_prefixes(messages, kwargs)
        except RequestError as error:
            raise DataError(str(error)) from error
        token_ids, loss_mask = self._end_turns(token_ids, loss_mask)
        self._check_calls(messages, token_ids, loss_mask)
        return token_ids, loss_mask

    def template_token_ids(self) -> frozenset[int]:
        """Every id that a draft vocabulary must hold: special and added tokens, EOS, the template's own text."""
        token_ids = set(self._special_ids) | set(self._backend.get_added_vocab().values())
        probe = [{"role": role, "content": "1"} for role in ("system", "user", "assistant", "user")]
        # Without a system message some templates write a default one; others accept no system message at all.
        for messages in (probe, probe[1:]) if self.has_chat_template else ():
            try:
                token_ids.update(self.render_chat(messages))
            except RequestError as error:
                log.debug("chat template rejects roles %s: %s", [m["role"] for m in messages], error)
        return frozenset(token_ids)

    @cached_property
    def _sources(self) -> tuple[str, ...]:
        """Every chat template of the model: some have another one for chats with tools."""
        template = self._backend.chat_template or ()
        return (template,) if isinstance(template, str) else tuple(dict(template).values())

    def _variables(
        self, tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """All that the template is given beside messages. Raises RequestError for reserved names."""
        if reserved := sorted(self._reserved_names.intersection(template_kwargs or ())):
            raise RequestError(
                f"chat_template_kwargs cannot set {', '.join(reserved)}: the name is reserved",
                param="chat_template_kwargs",
            )
        return {**self.template_kwargs, **(template_kwargs or {}), "tools": list(tools) if tools else None}

    # What templates differ in about tool calls and reasoning.

    def _as_template_takes(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages, with tool calls and the last one's reasoning in the form in which this template writes them."""
        taken = list(messages)
        if any(turn.get("tool_calls") for turn in messages) and self._splices_arguments:
            taken = [_with_argument_text(turn) if turn.get("tool_calls") else turn for turn in messages]
        reasoning = next((taken[-1][name] for name in REASONING_NAMES if taken[-1].get(name)), "") if taken else ""
        if reasoning and not self._reads_reasoning_apart and self.template_mentions(END_THINK):
            # Templates such as DeepSeek R1's know it within the content alone, and leave it out of earlier answers.
            content = f"{THINK}\n{reasoning}\n{END_THINK}\n\n{taken[-1].get('content') or ''}"
            taken[-1] = {**taken[-1], "content": content}
        return taken

    @cached_property
    def _splices_arguments(self) -> bool:
        """Whether the template adds a call's arguments to its text as they are, as DeepSeek's do, where others write a
        mapping as JSON or item by item."""
        chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}]
        return not self._writes_probe(chat) and self._writes_probe([chat[0], _with_argument_text(chat[1])])

    def _writes_probe(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> bool:
        try:
            return PROBE in self._render(messages, False, self._variables(tools, None))
        except RequestError:
            return False

    def _check_calls(
        self, messages: Sequence[Mapping[str, Any]], token_ids: Sequence[int], loss_mask: Sequence[bool]
    ) -> None:
        """Raises DataError where a call is not among what the assistant says: the rest would train on a hole."""
        names = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
        if not names:
            return
        said = self.decode([i for i, bit in zip(token_ids, loss_mask, strict=True) if bit], skip_special_tokens=False)
        if lost := [name for name in names if name not in said]:
            raise DataError(f"the chat template does not write the tool call of {lost[0]!r:.60}")

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, template_kwargs: Mapping[str, Any]
    ) -> str:
        return self._apply_template(
            messages, **template_kwargs, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _apply_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """`apply_chat_template` with every failure of the template turned into a RequestError."""
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; send a plain prompt instead", param="messages")
        try:
            return self._backend.apply_chat_template(list(messages), **options)
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"the chat template cannot render these messages: {error}", param="messages") from error

    # Loss masks of templates without generation tags.

    def _encode_by_prefixes(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> tuple[list[int], list[bool]]:
        """Message i's span is what rendering it adds."""
        text = self._render(messages, False, kwargs)
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._start(text, messages, i, kwargs, spans[-1][1] if spans else 0)
                spans.append((start, self._stop(text, messages, i, kwargs, start)))
        if messages[-1]["role"] == "assistant":
            text, spans[-1] = self._keep_reasoning(text, messages, spans[-1], kwargs)
        encoded = self._backend(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        return encoded["input_ids"], [any(low < b and high > a for a, b in spans) for low, high in offsets]

    def _start(
        self, text: str, messages: Sequence[Mapping[str, Any]], i: int, kwargs: Mapping[str, Any], after: int
    ) -> int:
        """Where in the rendered chat `text` the assistant begins message `i`; its answer before ends at `after`."""
        asked = messages[:i] or [{"role": "user", "content": "1"}]
        header = self._header(asked, kwargs).partition(THINK)[0]
        before = self._render(asked, False, kwargs)
        if not i or not text.startswith(before):
            # Nothing can be rendered before the first message, and earlier turns may be rendered otherwise by now. The
            # answer is then behind the first header after what was said last.
            said = self._end_of_content(text, messages, i - 1, kwargs) if i else 0
            at = text.find(header, max(after, said))
            if not header or at < 0 or (i and header in text[after:at]):
                raise DataError("the chat template rewrites earlier turns; mark the answers with generation tags")
            before = text[:at]
        if len(before) < after:
            raise DataError("the chat template moves earlier answers; mark the answers with generation tags")
        return len(before) + self._header_length(text[len(before) :], asked, kwargs)

    def _stop(
        self, text: str, messages: Sequence[Mapping[str, Any]], i: int, kwargs: Mapping[str, Any], start: int
    ) -> int:
        """Where message `i`, which begins at `start`, ends."""
        upto = self._render(messages[: i + 1], False, kwargs)
        if text.startswith(upto):
            return len(upto)
        # It is rendered otherwise than when it was the last: without its reasoning, with another end. It ends with
        # the first special token behind its content; a tool call has none, and ends as it did.
        said = self._end_of_content(text, messages, i, kwargs)
        ends = self._special_tokens(text[max(said, start) :])
        if said < start:
            ends = sorted(self._special_tokens(upto[start:]), key=upto.rfind)[-1:]
        places = [text.find(token, max(said, start)) + len(token) for token in ends if token in text[start:]]
        if not places:
            raise DataError("the chat template has no end-of-turn token; mark the answers with generation tags")
        return min(places)

    def _end_of_content(
        self, text: str, messages: Sequence[Mapping[str, Any]], i: int, kwargs: Mapping[str, Any]
    ) -> int:
        """Where what message `i` says ends: what follows stays the same when it says something else."""
        changed = self._render(
            [*messages[:i], {**messages[i], "content": PLACEHOLDER}, *messages[i + 1 :]], False, kwargs
        )
        return len(text) - _common_length(text[::-1], changed[::-1])

    def _header_length(self, rest: str, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> int:
        """How much of `rest`, which begins with an answer to `messages`, the generation prompt writes.

        A hybrid model's empty reasoning was written by the prompt that asks for none; what a prompt writes to begin
        reasoning was left out with it.
        """
        modes = [{}, *[{THINKING_SWITCH: on} for on in (True, False) if self.template_mentions(THINKING_SWITCH)]]
        headers = [self._header(messages, {**kwargs, **mode}) for mode in modes]
        for candidates in (headers, [header.partition(THINK)[0] for header in headers]):
            if lengths := [len(header) for header in candidates if rest.startswith(header)]:
                return max(lengths)
        return _common_length(headers[0], rest)

    def _header(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> str:
        """What the template writes before an answer (`<|im_start|>assistant\n` in ChatML)."""
        return self._render(messages, True, kwargs)[len(self._render(messages, False, kwargs)) :]

    def _keep_reasoning(
        self, text: str, messages: Sequence[Mapping[str, Any]], span: tuple[int, int], kwargs: Mapping[str, Any]
    ) -> tuple[str, tuple[int, int]]:
        """The chat and the span of its last answer, with the reasoning that the template would leave out of it."""
        reasoning, tag, answer = str(messages[-1].get("content", "")).rpartition(END_THINK)
        if not tag or END_THINK in text[slice(*span)] or len(messages) == 1:
            return text, span
        prompt = self._render(messages[:-1], True, kwargs)
        if prompt.rstrip().endswith(THINK):  # the prompt begins it
            reasoning = reasoning.partition(THINK)[2] or reasoning
            reasoning = reasoning.removeprefix(prompt[len(prompt.rstrip()) :])
        space = answer[: len(answer) - len(answer.lstrip())]
        whole = prompt + reasoning + tag + space + text[span[0] :].lstrip()
        return whole, (len(prompt), len(whole) - (len(text) - span[1]))

    def _end_turns(self, token_ids: Sequence[int], loss_mask: Sequence[bool]) -> tuple[list[int], list[bool]]:
        """Each answer ends with the token that ends the turn: what stands after it is the template's (a newline, in
        ChatML), and a next role's token that ends it (GLM) is the answer's, also behind the last one."""
        ids, mask = list(token_ids), list(loss_mask)
        for start, stop in _runs(loss_mask):
            last = max((t for t in range(start, stop) if ids[t] in self._special_ids), default=None)
            if last is not None and not self.decode(ids[last + 1 : stop], skip_special_tokens=False).strip():
                mask[last + 1 : stop] = [False] * (stop - last - 1)
            elif stop < len(ids):
                mask[stop] = ids[stop] in self._end_ids
            elif self._last_end_id is not None:
                ids.append(self._last_end_id)
                mask.append(True)
        return ids, mask

    @cached_property
    def _last_end_id(self) -> int | None:
        """What the template writes after an answer only when something follows, if that ends a turn."""
        probe = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
        try:
            kwargs = self.template_kwargs
            text, upto = self._render(probe, False, kwargs), self._render(probe[:2], False, kwargs)
        except RequestError:
            return None
        following = self.encode(text[len(upto) :], add_special_tokens=False) if text.startswith(upto) else []
        return following[0] if following and following[0] in self._end_ids else None

    def _special_tokens(self, text: str) -> list[str]:
        """The special tokens that `text` holds."""
        tokens = self._backend.convert_ids_to_tokens(sorted(self._special_ids))
        return [token for token in tokens if token in text]


def _with_argument_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message, the arguments of its calls as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _import_class(folder: Path) -> Any:
    """The class of transformers that reads a folder's tokenizer, without its advice to install torch: tokenizers do not
    need it. Usually that is AutoTokenizer, which reads the sources of every model for a second when it is imported; a
    folder may say that its tokenizer.json is all there is."""
    logger = logging.getLogger("transformers")
    logger.addFilter(_reject)  # on this logger only: its children still warn, and levels stay as the user set them
    try:
        with host.without_collecting():
            if _is_generic(folder):
                from transformers import PreTrainedTokenizerFast

                return PreTrainedTokenizerFast
            from transformers import AutoTokenizer

            return AutoTokenizer
    finally:
        logger.removeFilter(_reject)


def _is_generic(folder: Path) -> bool:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text())
        return found["tokenizer_class"] == GENERIC_CLASS and "auto_map" not in found
    except (OSError, ValueError, KeyError, TypeError):
        return False  # AutoTokenizer will say what is wrong


def _reject(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def _end_ids(folder: Path) -> set[int]:
    """Every id that ends a turn, by a model folder's configs."""
    found: set[int] = set()
    for path in (folder / "generation_config.json", folder / "config.json"):
        try:
            value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot read the ids that end a turn: {error}") from error
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return found


def _runs(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of True."""
    for bit, run in groupby(range(len(mask)), lambda t: mask[t]):
        if bit:
            places = list(run)
            yield places[0], places[-1] + 1


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            param="prompt",
        ) from error


def _common_length(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
