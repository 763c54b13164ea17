"""Tokenizers of many families: one tiny vocabulary, and templates of our own with the families' structure."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "goldens" / "chat"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
FAMILIES: dict[str, dict[str, Any]] = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in NAMES}


def vocabulary() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def load(name: str) -> Tokenizer:
    """The family's tokenizer, as `Tokenizer.load` would make it of a model folder."""
    family, backend = FAMILIES[name], vocabulary()
    if family["adds_bos"]:
        bos = family["bos_token"]
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    named = {key: family[key] for key in ("bos_token", "eos_token") if family[key]}
    ends = [backend.get_vocab()[token] for token in family["ends"]]
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    fast.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return Tokenizer(fast, ends)


PYDOC = Tokenizer.load(BUNDLED_FOLDER)


def with_template(template: str) -> Tokenizer:
    tokenizer = Tokenizer.load(BUNDLED_FOLDER)
    tokenizer._backend.chat_template = template
    return tokenizer


def chat(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "result"},
    {"role": "assistant", "content": "two", "reasoning_content": "so"},
]
HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLING_TEMPLATES = {
    "as JSON": "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n",
    "item by item": "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name ~ '{' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k | tojson ~ ': ' ~ v }}{% endfor %}{{ '}' }}{% endfor %}"
    "<|im_end|>\n",
    "spliced in": "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}<|im_end|>\n",
}
CALLING_TEMPLATES["with tags"] = (
    "{% if m.role == 'assistant' %}{% generation %}" + CALLING_TEMPLATES["as JSON"] + "{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
)
