"""What bears loss in chats of many families: token by token, against texts that were marked by hand.

tests/goldens/chat has, for each, a template of our own with the family's structure and special tokens, and cases:
messages, the text that the template makes of them with what the assistant itself says in «», and its tokens by one
tiny vocabulary. Run this file, with tests/support on PYTHONPATH, to write the tokens again after a marked text has
changed.
"""

import json
from itertools import pairwise
from typing import Any

import pytest
from chats import (
    CALLING_TEMPLATES,
    FAMILIES,
    FOLDER,
    HEAD,
    NAMES,
    PYDOC,
    TAIL,
    TOOL_CHAT,
    chat,
    load,
    vocabulary,
    with_template,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.chat_template import REASONING_NAMES, thinking_switch
from specserve.data.chat_masks import encode_chat
from specserve.errors import DataError
from specserve.tokenizer import Tokenizer

CASES = {f"{name}: {case['case']}": (name, case) for name in NAMES for case in FAMILIES[name]["cases"]}
TOKENIZERS = {name: load(name) for name in NAMES}
CONTENT = st.text(st.sampled_from(" \nab{<é中#"), max_size=6)


def expected(case: dict[str, Any]) -> tuple[str, list[int], list[bool]]:
    """Text, token ids and loss mask of a marked text, by nothing but the vocabulary."""
    text, spans = "", []
    for i, piece in enumerate(case["marked"].replace("»", "«").split("«")):
        spans.append((len(text), len(text) + len(piece), i % 2 == 1))
        text += piece
    encoding = vocabulary().encode(text, add_special_tokens=False)
    mask = [any(a < stop and b > start and says for start, stop, says in spans) for a, b in encoding.offsets]
    return text, encoding.ids, mask


def runs(case: dict[str, Any]) -> list[list[Any]]:
    """`["says" or "template", token, token, ...]` for each run of tokens that bear loss, or do not."""
    text, _, mask = expected(case)
    found: list[list[Any]] = []
    for (start, stop), bit in zip(vocabulary().encode(text, add_special_tokens=False).offsets, mask, strict=True):
        kind = "says" if bit else "template"
        if not found or found[-1][0] != kind:
            found.append([kind])
        found[-1].append(text[start:stop])
    return found


@pytest.mark.parametrize("key", CASES)
def test_what_bears_loss(key):
    name, case = CASES[key]
    tokenizer, kwargs = TOKENIZERS[name], case.get("template_kwargs")
    token_ids, loss_mask = encode_chat(tokenizer, case["messages"], tools=case.get("tools"), template_kwargs=kwargs)
    _, expected_ids, expected_mask = expected(case)
    assert runs(case) == case["tokens"], "run this file to write the tokens again"
    assert expected_ids == case["token_ids"]
    shown = [
        f"{'+' if bit else ' '}{tokenizer.decode([i], skip_special_tokens=False)!r}"
        for i, bit in zip(token_ids, loss_mask, strict=True)
    ]
    expected_shown = [
        f"{'+' if bit else ' '}{tokenizer.decode([i], skip_special_tokens=False)!r}"
        for i, bit in zip(expected_ids, expected_mask, strict=True)
    ]
    assert shown == expected_shown
    assert token_ids == expected_ids


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(st.lists(st.tuples(CONTENT, CONTENT, CONTENT), min_size=1, max_size=3), st.booleans())
def test_nothing_that_is_asked_bears_loss_and_every_answer_does(name, turns, has_thought):
    tokenizer = TOKENIZERS[name]
    messages = []
    for question, thought, answer in turns:
        said = f"<think>\n{thought}X\n</think>\n\n{answer}Z" if has_thought else f"{answer}Z"
        messages += [{"role": "user", "content": f"{question}Q"}, {"role": "assistant", "content": said}]
    token_ids, loss_mask = encode_chat(tokenizer, messages)
    for bears in (True, False):
        pieces = [i for i, bit in zip(token_ids, loss_mask, strict=True) if bit == bears]
        text = tokenizer.decode(pieces, skip_special_tokens=False)
        assert text.count("Z") == (len(turns) if bears else 0)
        assert text.count("Q") == (0 if bears else len(turns))
        assert text.count("X") <= (len(turns) if bears else 0)
        assert not bears or not has_thought or "X" in text  # the last answer's, at least


@pytest.mark.parametrize("name", NAMES)
def test_no_chat_has_a_second_bos(name):
    tokenizer = TOKENIZERS[name]
    bos = tokenizer.bos_token_id
    for case in FAMILIES[name]["cases"]:
        token_ids, _ = encode_chat(tokenizer, case["messages"], tools=case.get("tools"))
        assert bos is None or token_ids.count(bos) == 1
    if FAMILIES[name]["adds_bos"]:
        assert tokenizer.encode("hi")[0] == bos  # the tokenizer would have


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_learned_from_where_its_prompt_ends(name):
    """The tokens that bear loss continue exactly the prompt that the server would have sent."""
    tokenizer = TOKENIZERS[name]
    for case in FAMILIES[name]["cases"]:
        *asked, answer = case["messages"]
        is_forgotten = any("thinking" in message or "reasoning_content" in message for message in asked)
        if "</think>" in answer["content"] or "reasoning_content" in answer or is_forgotten:
            continue
        kwargs = case.get("template_kwargs") or {}
        if switch := thinking_switch(tokenizer.template.mentions):
            kwargs = {switch: False}  # the mode whose answers have no reasoning
        tools = case.get("tools")
        token_ids, loss_mask = encode_chat(tokenizer, case["messages"], tools=tools, template_kwargs=kwargs)
        prompt = tokenizer.render_chat(asked, tools=tools, template_kwargs=kwargs)
        if name == "deepseek-r1" and asked[-1]["role"] != "tool":
            prompt = prompt[:-2]  # its prompts begin reasoning, which this answer does not have
        assert token_ids[: len(prompt)] == prompt
        assert all(loss_mask[len(prompt) : -1])
        assert not loss_mask[len(prompt) - 1]


@pytest.mark.parametrize("name", [*NAMES, "with generation tags"])
@pytest.mark.parametrize("answer", ["\nab", "\n\n\nab", " ab", "  \n ab", "\tab"])
def test_no_token_holds_the_end_of_a_prompt_and_the_beginning_of_its_answer(name, answer):
    """Whatever an answer begins with: newline after newline is one token in most vocabularies."""
    tokenizer = PYDOC if name == "with generation tags" else TOKENIZERS[name]
    switch = thinking_switch(tokenizer.template.mentions)
    kwargs = {switch: False} if switch else {}
    prompt = tokenizer.render_chat(chat("Q"), template_kwargs=kwargs)
    if tokenizer.decode(prompt).rstrip().endswith("<think>"):  # the prompt begins reasoning, which this answer has not
        return
    for turns in (1, 2):
        token_ids, loss_mask = encode_chat(tokenizer, chat(*["Q", answer] * turns), template_kwargs=kwargs)
        starts = [i for i, bits in enumerate(pairwise(loss_mask), start=1) if bits == (False, True)]
        assert len(starts) == turns
        assert token_ids[starts[-1] - 1] == prompt[-1]
        assert turns > 1 or token_ids[: starts[-1]] == prompt


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", [None, True, False])
@pytest.mark.parametrize(
    "answer", [{"content": "<think>\nX\n</think>\n\nZ"}, {"content": "Z", "reasoning_content": "X"}, {"content": "Z"}]
)
def test_reasoning_is_learned_behind_a_prompt_that_asks_for_it(name, mode, answer):
    """The prompt is one that the server sends, to a model that reasons where the answer does, whatever the settings of
    the data ask for. A template may know no reasoning: then the answer alone is learned."""
    tokenizer = TOKENIZERS[name]
    switch = thinking_switch(tokenizer.template.mentions)
    kwargs = {switch: mode} if switch and mode is not None else {}
    token_ids, loss_mask = encode_chat(tokenizer, [*chat("Q"), {"role": "assistant", **answer}], template_kwargs=kwargs)
    said = tokenizer.decode([i for i, bit in zip(token_ids, loss_mask, strict=True) if bit], skip_special_tokens=False)
    written = tokenizer.decode(token_ids[: loss_mask.index(True)], skip_special_tokens=False)
    prompt = tokenizer.render_chat(chat("Q"), template_kwargs={switch: True} if switch else {})
    has_reasoning = "X" in str(answer)
    assert "Z" in said
    assert not has_reasoning or not tokenizer.template.reads_reasoning or "X" in said
    if has_reasoning and "X" in said:
        assert written.rstrip("\n") == tokenizer.decode(prompt, skip_special_tokens=False).rstrip("\n")
        assert (written + said).count("<think>") <= 1


def test_special_tokens_without_a_name_are_special():
    tokenizer = TOKENIZERS["gemma-3"]
    [end] = tokenizer.encode("<end_of_turn>", add_special_tokens=False)
    assert end in tokenizer.special_token_ids
    assert tokenizer.decode([end]) == ""


# Like Qwen3's: reasoning is shown for the last answer only, so earlier turns are rendered otherwise later on.
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}{{ m.content }}{% else %}{{ m.content.split('#')[-1] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def spans(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[str]:
    """The text of each run of loss-bearing tokens."""
    token_ids, loss_mask = encode_chat(tokenizer, messages)
    runs: list[list[int]] = []
    for i, (token_id, bit) in enumerate(zip(token_ids, loss_mask, strict=True)):
        if bit and (i == 0 or not loss_mask[i - 1]):
            runs.append([])
        if bit:
            runs[-1].append(token_id)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("first", ["user", "assistant"])
@settings(max_examples=60, deadline=None)
@given(contents=st.lists(st.text(st.sampled_from(" \nab{<é中#"), max_size=8), min_size=2, max_size=5))
def test_loss_mask_is_the_same_with_and_without_generation_tags(first, contents):
    messages = chat(*contents, first=first)
    assert encode_chat(UNTAGGED, messages) == encode_chat(PYDOC, messages)


UNTAGGED = with_template(
    PYDOC._backend.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
)


def test_loss_mask_covers_answers_and_their_end_of_turn():
    system = {"role": "system", "content": "Be brief."}
    for tokenizer in (PYDOC, UNTAGGED):
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
def test_answers_that_cannot_be_distinguished_from_the_rest_are_refused(template):
    with pytest.raises(DataError, match="generation tags"):
        encode_chat(with_template(template), chat("one", "first", "two", "second"))


def test_prompt_plus_answer_is_the_whole_chat():
    question, answer = chat("What does `a.b` do?", "It returns 1.")
    whole, loss_mask = encode_chat(PYDOC, [question, answer])
    prompt = PYDOC.render_chat([question])
    assert whole[: len(prompt)] == prompt
    assert loss_mask.index(True) == len(prompt)


@pytest.mark.parametrize("body", CALLING_TEMPLATES.values(), ids=CALLING_TEMPLATES)
def test_calls_and_reasoning_bear_loss_and_results_and_tools_do_not(body):
    """In whatever form the template writes a call: what is learned is what it writes for the turn."""
    tokenizer = with_template(HEAD + body + TAIL)
    named = [
        {**m, **dict.fromkeys(REASONING_NAMES, m["reasoning_content"])} if "reasoning_content" in m else m
        for m in TOOL_CHAT
    ]
    token_ids, loss_mask = encode_chat(tokenizer, named, tools=[{"name": "add"}])
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
    for template in (PYDOC._backend.chat_template, HEAD + "{{ m.content }}<|im_end|>\n" + TAIL):
        tokenizer = with_template(template)
        with pytest.raises(DataError, match="does not write the tool call of 'add'"):
            encode_chat(tokenizer, TOOL_CHAT[:2], tools=[{"name": "add"}])


if __name__ == "__main__":
    for name, family in FAMILIES.items():
        lines = [f'"{key}": {json.dumps(family[key], ensure_ascii=False)}' for key in family if key != "cases"]
        cases = []
        for case in family["cases"]:
            case["token_ids"], case["tokens"] = expected(case)[1], runs(case)
            fields = []
            for key, value in case.items():
                if key in ("messages", "tokens"):
                    rows = ",\n      ".join(json.dumps(row, ensure_ascii=False) for row in value)
                    fields.append(f'"{key}": [\n      {rows}\n    ]')
                else:
                    fields.append(f'"{key}": {json.dumps(value, ensure_ascii=False)}')
            cases.append("  {\n    " + ",\n    ".join(fields) + "\n  }")
        body = ",\n".join([*lines, '"cases": [\n' + ",\n".join(cases) + "\n]"])
        (FOLDER / f"{name}.json").write_text("{\n" + body + "\n}\n")
