"""What bears loss in chats of many families: token by token, against texts that were marked by hand.

tests/goldens/chat has, for each, a template of our own with the family's structure and special tokens, and cases:
messages, the text that the template makes of them with what the assistant itself says in «», and its tokens by one
tiny vocabulary. Run this file to write the tokens again after a marked text has changed.
"""

import json
from typing import Any

import pytest
from chats import FAMILIES, FOLDER, NAMES, load, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

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
    token_ids, loss_mask = tokenizer.encode_chat(case["messages"], tools=case.get("tools"), template_kwargs=kwargs)
    _, wanted_ids, wanted_mask = expected(case)
    assert runs(case) == case["tokens"], "run this file to write the tokens again"
    assert wanted_ids == case["token_ids"]
    shown = [
        f"{'+' if bit else ' '}{tokenizer.decode([i], skip_special_tokens=False)!r}"
        for i, bit in zip(token_ids, loss_mask, strict=True)
    ]
    wanted = [
        f"{'+' if bit else ' '}{tokenizer.decode([i], skip_special_tokens=False)!r}"
        for i, bit in zip(wanted_ids, wanted_mask, strict=True)
    ]
    assert shown == wanted
    assert token_ids == wanted_ids


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(st.lists(st.tuples(CONTENT, CONTENT, CONTENT), min_size=1, max_size=3), st.booleans())
def test_nothing_that_is_asked_bears_loss_and_every_answer_does(name, turns, has_thought):
    tokenizer = TOKENIZERS[name]
    messages = []
    for question, thought, answer in turns:
        said = f"<think>\n{thought}X\n</think>\n\n{answer}Z" if has_thought else f"{answer}Z"
        messages += [{"role": "user", "content": f"{question}Q"}, {"role": "assistant", "content": said}]
    token_ids, loss_mask = tokenizer.encode_chat(messages)
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
        token_ids, _ = tokenizer.encode_chat(case["messages"], tools=case.get("tools"))
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
        if tokenizer.template_mentions("enable_thinking"):
            kwargs = {"enable_thinking": False}  # the mode whose answers have no reasoning
        tools = case.get("tools")
        token_ids, loss_mask = tokenizer.encode_chat(case["messages"], tools=tools, template_kwargs=kwargs)
        prompt = tokenizer.render_chat(asked, tools=tools, template_kwargs=kwargs)
        if name == "deepseek-r1" and asked[-1]["role"] != "tool":
            prompt = prompt[:-2]  # its prompts begin reasoning, which this answer does not have
        assert token_ids[: len(prompt)] == prompt
        assert all(loss_mask[len(prompt) : -1])
        assert not loss_mask[len(prompt) - 1]


def test_special_tokens_without_a_name_are_special():
    tokenizer = TOKENIZERS["gemma-3"]
    [end] = tokenizer.encode("<end_of_turn>", add_special_tokens=False)
    assert end in tokenizer.special_token_ids
    assert tokenizer.decode([end]) == ""


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
