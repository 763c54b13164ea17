"""The formats in which models write calls of tools into their answers, one for each family. Each reads answers (see
`reader`); `grammars` has the grammars by which a model must write them, and `probe` chooses the one of a chat template.

A call counts where it is whole enough to have the name of a tool that the request has, and arguments that begin. All
else is content, as it was written.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from specserve.serve.engine.interface import TemplateLike
from specserve.serve.http.formats import named, notated, objects, tagged
from specserve.serve.http.formats.reader import Reader, Reading
from specserve.serve.settings import ToolParser


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class ToolFormat:
    """A format in which calls are written."""

    name: ToolParser | Literal["none"]
    marks: tuple[str, ...]  # strings that may be special tokens
    read: Callable[[Reader], Reading[None]]
    new_id: Callable[[], str] = new_call_id
    usual_sign: str = ""  # templates of models that write the format's usual wording have it
    other_wording: str = ""
    sign: str = ""  # a template that writes tools and no calls, and holds this, is of a model that calls so

    def wording_for(self, template: TemplateLike) -> str:
        """Return which wording of the format `grammars` takes for this template."""
        return self.name if template.mentions(self.usual_sign) else self.other_wording


def _read_content(reader: Reader) -> Reading[None]:
    yield from reader.content_until()


NO_CALLS = ToolFormat("none", (), _read_content)  # of answers that are text alone
GENERIC = ToolFormat("generic", ("<tool_call>", "</tool_call>"), objects.read_hermes)  # as our own prompt shows it

# in the order in which they are tried, where a template shows more than one
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("harmony", named.HARMONY_MARKS, named.read_harmony, sign="<|channel|>"),
    ToolFormat(
        "deepseek",
        named.DEEPSEEK_MARKS,
        named.read_deepseek,
        sign=named.DEEPSEEK_MARKS[0],
        usual_sign="```json",
        other_wording="deepseek bare",
    ),
    ToolFormat(
        "deepseek-dsml",
        ("｜DSML｜",),
        partial(tagged.read_tagged, tagged.DSML),
        sign="｜DSML｜",
        usual_sign="function_calls",
        other_wording="deepseek-dsml v4",
    ),
    ToolFormat("kimi-k2", named.KIMI_MARKS, named.read_kimi, sign=named.KIMI_MARKS[0]),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        objects.read_mistral,
        lambda: uuid.uuid4().hex[:9],  # its templates refuse longer ones
        sign="[TOOL_CALLS]",
        usual_sign="[ARGS]",
        other_wording="mistral list",
    ),
    ToolFormat(
        "glm",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        partial(tagged.read_tagged, tagged.GLM),
        sign="<arg_key>",
    ),
    ToolFormat(
        "qwen3-coder",
        ("<tool_call>", "</tool_call>"),
        partial(tagged.read_tagged, tagged.QWEN_CODER),
        sign="<parameter=",
    ),
    ToolFormat(
        "minimax-m2",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        partial(tagged.read_tagged, tagged.MINIMAX),
        sign="<minimax:tool_call>",
    ),
    ToolFormat(
        "seed",
        ("<seed:tool_call>", "</seed:tool_call>"),
        partial(tagged.read_tagged, tagged.SEED),
        sign="<seed:tool_call>",
    ),
    ToolFormat("functionary", (), partial(tagged.read_tagged, tagged.FUNCTIONARY)),
    ToolFormat("gemma4", notated.GEMMA_MARKS, notated.read_gemma4, sign="<|tool_call>"),
    ToolFormat("lfm2", notated.LFM_MARKS, notated.read_lfm2, sign="<|tool_list_start|>"),
    ToolFormat(
        "phi4",
        ("<|tool_call|>", "<|/tool_call|>"),
        objects.read_phi4,
        sign="<|/tool|>",
        usual_sign="<|tool_call|>",
        other_wording="phi4 functools",
    ),
    ToolFormat(
        "command",
        ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        objects.read_command,
        sign="<|START_ACTION|>",
        usual_sign="<|START_ACTION|>",
        other_wording="command fence",
    ),
    ToolFormat("nemotron", ("<TOOLCALL>", "</TOOLCALL>"), objects.read_nemotron, sign="<TOOLCALL>"),
    ToolFormat("llama3", ("<|python_tag|>",), objects.read_llama3, sign="<|python_tag|>"),
    ToolFormat("hermes", ("<tool_call>", "</tool_call>"), objects.read_hermes, sign="<tool_call>"),
)
