"""The chat template of a model folder: messages, tools and variables -> text. Differences between templates are found
out by rendering probes. Knows nothing of token ids, but that transformers' tokenizer is what holds and runs the
template."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from specserve.errors import ConfigError, RequestError

THINKING_SWITCH = "enable_thinking"  # the variable that turns reasoning on and off in templates of hybrid models
# All such variables, and what a template that reads one has. Messages too may have a `thinking`.
_SWITCHES = {THINKING_SWITCH: (THINKING_SWITCH,), "thinking": ("if thinking", "not thinking")}
THINK, END_THINK = "<think>", "</think>"
REASONING_NAMES = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # a message's reasoning, by template
_VARIABLES = frozenset({"documents"})  # parameters of transformers that reach the template
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "zqprobe"  # a word that no template writes of itself
_PROBE_CALL = {"id": "1", "type": "function", "function": {"name": _PROBE, "arguments": {_PROBE: 1}}}

Messages = Sequence[Mapping[str, Any]]


def thinking_switch(mentions: Callable[[str], bool]) -> str | None:
    """Return the variable that turns reasoning on and off, None where there is none. `mentions` is that of the
    template."""
    return next((name for name, signs in _SWITCHES.items() if any(map(mentions, signs))), None)


class ChatTemplate:
    """The chat template of one model folder. Threads may share it for everything but `apply`: transformers tracks
    generation tags in the template itself."""

    def __init__(self, backend: Any, kwargs: Mapping[str, Any]) -> None:
        """`backend` is a transformers tokenizer; every chat that sets no others gets `kwargs` as template variables."""
        self._backend = backend
        self.kwargs = dict(kwargs)
        options = inspect.signature(backend.apply_chat_template).parameters
        self._reserved_names = frozenset(options).union(["messages"]) - _VARIABLES

    @property
    def exists(self) -> bool:
        return bool(self._backend.chat_template)

    def mentions(self, word: str) -> bool:
        """Return whether the template's source holds `word`: a variable it reads, a tag it knows."""
        return any(word in source for source in self._sources)

    def reads_variable(self, name: str) -> bool:
        """Return whether the template's source holds `name` as a word of its own."""
        return any(re.search(rf"\b{re.escape(name)}\b", source) for source in self._sources)

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises ConfigError for a variable that cannot be set or that the template does not read."""
        for name in kwargs:
            if name in self._reserved_names:
                raise ConfigError(f"template_kwargs cannot set {name}: the name is reserved")
            if not self.reads_variable(name):
                raise ConfigError(f"template_kwargs sets {name}, which the target's chat template does not read")

    def has_generation_tags(self, tools: Messages | None) -> bool:
        """Return whether `{% generation %}` tags mark the assistant's words in a chat with these tools."""
        return self.exists and bool(_GENERATION_TAG.search(self._backend.get_chat_template(tools=tools)))

    @property
    def reads_tools(self) -> bool:
        """Return whether the template writes down the tools that it is given."""
        return self._writes_tools

    @property
    def reads_reasoning(self) -> bool:
        """Return whether the template knows reasoning: in a field of its own, or in tags within the content."""
        return self._reads_reasoning_apart or self.mentions(END_THINK)

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Messages | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat, up to where the assistant's answer begins; or up to where the text of its last message
        ends, with `continue_final_message` and without `add_generation_prompt`. Raises RequestError when the model has
        no chat template, the template rejects the messages, or a variable has a reserved name."""
        messages, variables = self.prepare(messages, tools, template_kwargs)
        return self.write(
            messages,
            variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def prepare(
        self, messages: Messages, tools: Messages | None, template_kwargs: Mapping[str, Any] | None
    ) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
        """Return the arguments of `write`: the messages, with tool calls and the last one's reasoning in the form in
        which this template writes them, and its variables. Raises RequestError for reserved names."""
        variables = self._variables(tools, template_kwargs)
        taken = list(messages)
        if any(turn.get("tool_calls") for turn in messages) and self._splices_arguments:
            taken = [_with_argument_text(turn) if turn.get("tool_calls") else turn for turn in messages]
        reasoning = next((turn[name] for turn in taken[-1:] for name in REASONING_NAMES if turn.get(name)), "")
        if reasoning and not self._reads_reasoning_apart and self.mentions(END_THINK):
            # Templates such as DeepSeek R1's know it within the content alone, and leave it out of earlier answers.
            content = f"{THINK}\n{reasoning}\n{END_THINK}\n\n{taken[-1].get('content') or ''}"
            taken[-1] = {**taken[-1], "content": content}
        return taken, variables

    def write(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """The text of prepared messages. Raises RequestError as `apply` does."""
        return self.apply(
            messages,
            variables,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def apply(self, messages: Messages, variables: Mapping[str, Any], **options: Any) -> Any:
        """Call transformers' `apply_chat_template` with prepared messages and these options. Raises RequestError when
        the model has no chat template, or the template rejects the messages."""
        if not self.exists:
            raise RequestError("this model has no chat template; send a plain prompt instead", param="messages")
        try:
            return self._backend.apply_chat_template(list(messages), **variables, **options)
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"the chat template cannot render these messages: {error}", param="messages") from error

    def _variables(self, tools: Messages | None, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the variables that the template is given beside messages."""
        if reserved := sorted(self._reserved_names.intersection(template_kwargs or ())):
            raise RequestError(
                f"chat_template_kwargs cannot set {', '.join(reserved)}: the name is reserved",
                param="chat_template_kwargs",
            )
        return {**self.kwargs, **(template_kwargs or {}), "tools": list(tools or ()) or None}

    @cached_property
    def _sources(self) -> tuple[str, ...]:
        """The chat templates of the model, of which some have another one for chats with tools."""
        template = self._backend.chat_template or ()
        if isinstance(template, str):
            return (template,)
        return tuple(dict(template).values())

    @cached_property
    def _writes_tools(self) -> bool:
        tool = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}}
        return self._writes_probe([{"role": "user", "content": "1"}], [{"type": "function", "function": tool}])

    @cached_property
    def _reads_reasoning_apart(self) -> bool:
        answer = {"role": "assistant", "content": "1", **dict.fromkeys(REASONING_NAMES, _PROBE)}
        return self._writes_probe([{"role": "user", "content": "1"}, answer])

    @cached_property
    def _splices_arguments(self) -> bool:
        """Return whether the template adds a call's arguments to its text as they are, as DeepSeek's do, where others
        write a mapping as JSON or item by item."""
        chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}]
        return not self._writes_probe(chat) and self._writes_probe([chat[0], _with_argument_text(chat[1])])

    def _writes_probe(self, messages: Messages, tools: Messages | None = None) -> bool:
        try:
            return _PROBE in self.write(messages, self._variables(tools, None))
        except RequestError:
            return False


def _with_argument_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with the arguments of its calls as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
