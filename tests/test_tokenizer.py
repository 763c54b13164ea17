"""Laws of the tokenizer: streamed text is the decoded text, loss masks do not depend on how they are derived."""

from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specserve
from specserve.errors import CheckpointError, ConfigError, DataError, RequestError
from specserve.serve.decoder import IncrementalDecoder
from specserve.tokenizer import REASONING_NAMES, Tokenizer, _import_class

FOLDER = Path(specserve.__file__).parent / "targets" / "pydoc"
TOKENIZER = Tokenizer.load(FOLDER)
BYTE_IDS = [TOKENIZER.encode(char)[0] for char in "é中😀"]  # first bytes of longer characters

# Like Qwen3's: reasoning is shown for the last answer only, so earlier turns are rendered otherwise later on.
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}{{ m.content }}{% else %}{{ m.content.split('#')[-1] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

chunks = st.lists(st.lists(st.integers(0, 8200) | st.sampled_from([*range(256), *BYTE_IDS]), max_size=12), max_size=12)


def with_template(template: str) -> Tokenizer:
    tokenizer = Tokenizer.load(FOLDER)
    tokenizer._backend.chat_template = template
    return tokenizer


def chat(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def spans(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[str]:
    """The text of each run of loss-bearing tokens."""
    token_ids, loss_mask = tokenizer.encode_chat(messages)
    runs: list[list[int]] = []
    for i, (token_id, bit) in enumerate(zip(token_ids, loss_mask, strict=True)):
        if bit and (i == 0 or not loss_mask[i - 1]):
            runs.append([])
        if bit:
            runs[-1].append(token_id)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@settings(max_examples=400, deadline=None)
@given(chunks, st.booleans())
def test_streamed_text_is_the_decoded_text(pieces, skip):
    decoder = IncrementalDecoder(TOKENIZER, skip_special_tokens=skip)
    whole = TOKENIZER.decode([i for piece in pieces for i in piece], skip_special_tokens=skip)
    streamed = ""
    for piece in pieces:
        streamed += decoder.push(piece)
        assert whole.startswith(streamed)
    assert streamed + decoder.finish() == whole


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_streaming_never_emits_half_a_character(text):
    decoder = IncrementalDecoder(TOKENIZER)
    streamed = [decoder.push([token_id]) for token_id in TOKENIZER.encode(text)]
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in streamed)
    assert "".join(streamed) + decoder.finish() == text


def test_streaming_survives_pieces_that_always_end_inside_a_character():
    for text in ("中" * 60, "é" * 60, "😀" * 60):
        token_ids = TOKENIZER.encode(text)  # one per byte
        num_bytes = len(token_ids) // len(text)
        decoder = IncrementalDecoder(TOKENIZER)
        cuts = [0, *range(1, len(token_ids), num_bytes), len(token_ids)]
        streamed = [decoder.push(token_ids[low:high]) for low, high in pairwise(cuts)]
        assert "\ufffd" not in "".join(streamed)
        assert "".join(streamed) + decoder.finish() == text


def test_streaming_of_a_tokenizer_that_falls_back_to_bytes():
    """There (Llama, Gemma) an open character makes every byte token before it unreadable, too, until it closes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581a": 256, "<unk>": 257}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    token_ids = [256, *"😀😀é中".encode(), 256, 256, *"中".encode()]
    for size in (1, 2, 3, 5):
        decoder = IncrementalDecoder(tokenizer)
        streamed = [decoder.push(token_ids[low : low + size]) for low in range(0, len(token_ids), size)]
        assert "".join(streamed) + decoder.finish() == "a😀😀é中 a a中" == tokenizer.decode(token_ids)


@pytest.mark.parametrize("token_id", [TOKENIZER.encode("中")[0], TOKENIZER.encode("a")[0]])
def test_cost_of_a_push_does_not_grow(token_id, monkeypatch):
    num_decoded = 0
    decode = Tokenizer.decode

    def counting(self, token_ids, **options):
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(self, token_ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    decoder = IncrementalDecoder(TOKENIZER)
    costs = []
    for _ in range(1000):  # of a lone lead byte: no clean end ever comes
        before = num_decoded
        decoder.push([token_id])
        costs.append(num_decoded - before)
    assert sum(costs) < 2 * IncrementalDecoder.NUM_WINDOW * len(costs)
    assert max(costs) < 3 * IncrementalDecoder.NUM_WINDOW


@pytest.mark.parametrize("first", ["user", "assistant"])
@settings(max_examples=60, deadline=None)
@given(contents=st.lists(st.text(st.sampled_from(" \nab{<é中#"), max_size=8), min_size=2, max_size=5))
def test_loss_mask_is_the_same_with_and_without_generation_tags(first, contents):
    messages = chat(*contents, first=first)
    assert UNTAGGED.encode_chat(messages) == TOKENIZER.encode_chat(messages)


UNTAGGED = with_template(
    TOKENIZER._backend.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
)


def test_loss_mask_covers_answers_and_their_end_of_turn():
    system = {"role": "system", "content": "Be brief."}
    for tokenizer in (TOKENIZER, UNTAGGED):
        assert spans(tokenizer, [system, *chat("hi", "yo", "again", "no.\n")]) == ["yo<|im_end|>", "no.\n<|im_end|>"]


def test_loss_mask_when_the_template_drops_earlier_reasoning():
    messages = chat("one", "think#1st", "two", "think#2nd")
    assert spans(with_template(FORGETFUL_TEMPLATE), messages) == ["1st<|im_end|>", "think#2nd<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages | reverse %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "{{ messages | length }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content | upper }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    ],
    ids=["backwards", "counts its messages", "no end of turn"],
)
def test_answers_that_cannot_be_told_from_the_rest_are_refused(template):
    with pytest.raises(DataError, match="generation tags"):
        with_template(template).encode_chat(chat("one", "first", "two", "second"))


def test_rendered_chat_has_one_bos_even_if_the_tokenizer_adds_one():
    tokenizer = with_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer._backend.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer.encode("hi") == [0, *TOKENIZER.encode("hi")]
    assert tokenizer.render_chat(chat("hi")) == tokenizer.encode("hi")


def test_prompt_plus_answer_is_the_whole_chat():
    question, answer = chat("What does `a.b` do?", "It returns 1.")
    whole, loss_mask = TOKENIZER.encode_chat([question, answer])
    prompt = TOKENIZER.render_chat([question])
    assert whole[: len(prompt)] == prompt
    assert loss_mask.index(True) == len(prompt)


def test_draft_vocabulary_pins_everything_the_template_writes():
    pinned = TOKENIZER.template_token_ids()
    content = TOKENIZER.encode("zebra")
    whole, _ = TOKENIZER.encode_chat([{"role": role, "content": "zebra"} for role in ("system", "user", "assistant")])
    assert set(whole) - set(content) <= pinned
    assert {0, 1, 2} <= pinned
    assert not set(content) & pinned


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "result"},
    {"role": "assistant", "content": "two", "reasoning_content": "so"},
]
_HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
_TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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


@pytest.mark.parametrize("body", CALLING_TEMPLATES.values(), ids=CALLING_TEMPLATES)
def test_calls_and_reasoning_bear_loss_and_results_and_tools_do_not(body):
    """In whatever form the template writes a call: what is learned is what it writes for the turn."""
    tokenizer = with_template(_HEAD + body + _TAIL)
    named = [
        {**m, **dict.fromkeys(REASONING_NAMES, m["reasoning_content"])} if "reasoning_content" in m else m
        for m in TOOL_CHAT
    ]
    token_ids, loss_mask = tokenizer.encode_chat(named, tools=[{"name": "add"}])
    said = "".join(
        tokenizer.decode([i], skip_special_tokens=False) if bit else "\0"
        for i, bit in zip(token_ids, loss_mask, strict=True)
    )
    turns = [turn for turn in said.split("\0") if turn]
    assert turns == ['<think>hm</think>add{"a": 1}add{"a": 1}<|im_end|>', "<think>so</think>two<|im_end|>"]
    whole = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert whole.startswith('{"name": "add"}<|im_start|>user\none<|im_end|>')
    assert "result" in whole
    for i, turn in zip((1, 3), turns, strict=True):
        prompt = tokenizer.render_chat(named[:i], tools=[{"name": "add"}])
        assert whole.startswith(tokenizer.decode(prompt, skip_special_tokens=False) + turn)


def test_a_call_that_the_template_does_not_write_is_refused():
    for template in (TOKENIZER._backend.chat_template, _HEAD + "{{ m.content }}<|im_end|>\n" + _TAIL):
        tokenizer = with_template(template)
        with pytest.raises(DataError, match="does not write the tool call of 'add'"):
            tokenizer.encode_chat(TOOL_CHAT[:2], tools=[{"name": "add"}])


def test_what_a_template_reads():
    tokenizer = with_template(_HEAD + CALLING_TEMPLATES["as JSON"] + "{{ enable_thinking }}" + _TAIL)
    assert tokenizer.reads_tools
    assert tokenizer.reads_reasoning
    assert (tokenizer.reads_variable("enable_thinking"), tokenizer.reads_variable("thinking")) == (True, False)
    assert (TOKENIZER.reads_tools, TOKENIZER.reads_reasoning) == (False, False)
    assert not with_template("").reads_tools


def test_a_chats_own_variables_win_over_those_of_the_tokenizer():
    backend = with_template("{{ a }}{{ b }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")._backend
    tokenizer = Tokenizer(backend, template_kwargs={"a": 1, "b": 2})
    assert tokenizer.decode(tokenizer.render_chat(chat("x"))) == "12x"
    assert tokenizer.decode(tokenizer.render_chat(chat("x"), template_kwargs={"b": 3})) == "13x"
    tokenizer.check_template_kwargs({"a": 1})
    for name in ("tools", "tokenize", "c"):
        with pytest.raises(ConfigError, match=name):
            tokenizer.check_template_kwargs({name: 1})
    with pytest.raises(DataError, match="cannot set tokenize"):
        tokenizer.encode_chat(chat("x", "y"), template_kwargs={"tokenize": False})


def test_bad_inputs_are_named():
    with pytest.raises(RequestError, match="U\\+D800 at character 1"):
        TOKENIZER.encode("a\ud800")
    for messages in ([], [{"role": "user"}], [{"role": "user", "content": 3}], [{"role": "user", "content": ["x"]}]):
        with pytest.raises(RequestError) as caught:
            TOKENIZER.render_chat(messages)
        assert caught.value.param == "messages"
    with pytest.raises(DataError):
        TOKENIZER.encode_chat([{"role": "user"}])
    for name in ("chat_template", "tokenize", "messages", "conversation"):
        with pytest.raises(RequestError, match=name):
            TOKENIZER.render_chat(chat("hi"), template_kwargs={name: "x"})
    with pytest.raises(RequestError, match="no chat template"):
        with_template("").render_chat(chat("hi"))
    with pytest.raises(CheckpointError, match="no such folder"):
        Tokenizer.load(FOLDER / "nowhere")
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        Tokenizer.load(Path(__file__).parent)


def test_a_folder_that_has_nothing_but_its_json_is_read_by_the_generic_class(tmp_path):
    """The class that AutoTokenizer finds, without importing that; every other folder is for AutoTokenizer."""

    generic = type(AutoTokenizer.from_pretrained(str(FOLDER), local_files_only=True))
    assert _import_class(FOLDER) is generic
    for text in (
        "{",
        "[]",
        "{}",
        '{"tokenizer_class": "Qwen2Tokenizer"}',
        '{"tokenizer_class": "TokenizersBackend", "auto_map": {}}',
    ):
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert _import_class(tmp_path) is AutoTokenizer
    assert _import_class(tmp_path / "nowhere") is AutoTokenizer
