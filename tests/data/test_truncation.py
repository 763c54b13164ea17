"""Laws of fitting documents into a length: answers stay whole, and no token goes missing unsaid."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.data.chat_masks import encode_chat
from specserve.data.conversations import Conversation, Message
from specserve.data.documents import Document, tokenize, tokenize_part, turn_end
from specserve.tokenizer import Tokenizer

SIZES = st.lists(st.integers(0, 12), min_size=2, max_size=8)


def chat(sizes: list[int]) -> Conversation:
    """Turns of so many letters, each a token of its own beside the template's."""
    roles = ("user", "assistant")
    messages = tuple(Message(roles[i % 2], "x#" * (size + 1)) for i, size in enumerate(sizes))
    return Conversation(messages, "", "here")


def answers(document: Document) -> list[list[int]]:
    """The token ids of each run that bears loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.loss_mask, [0]])))
    return [document.token_ids[a:b].tolist() for a, b in edges.reshape(-1, 2)]


@settings(max_examples=150)
@given(sizes=SIZES, max_len=st.integers(2, 120))
def test_a_chat_keeps_the_answers_that_fit_and_no_part_of_another(sizes, max_len, pydoc_tokenizer):
    conversation = chat(sizes)
    token_ids, loss_mask = encode_chat(pydoc_tokenizer, conversation.as_dicts())
    whole = Document(np.array(token_ids), np.array(loss_mask))
    fitting = [answer for answer, end in zip(answers(whole), ends(whole), strict=True) if end <= max_len]
    result = tokenize_part([conversation], pydoc_tokenizer, max_len)
    kept = sum(map(len, result.documents))
    assert kept + result.counts["truncated tokens"] + result.counts["dropped tokens"] == len(token_ids)
    assert result.counts["truncated"] == (len(token_ids) > max_len)
    if not result.documents:
        assert result.counts["dropped"] == 1
        assert not any(loss_mask[1:max_len])
        return
    [document] = result.documents
    assert document.token_ids.tolist() == token_ids[: len(document)]
    if fitting:
        assert answers(document) == fitting
        assert result.counts["cut inside"] == 0
        assert len(document) == len(token_ids) or document.loss_mask[-1]
    else:
        assert len(document) == max_len
        assert result.counts["cut inside"] == 1
        assert result.counts["tokens cut inside"] == result.counts["truncated tokens"] == len(token_ids) - max_len


def ends(document: Document) -> list[int]:
    mask = document.loss_mask.tolist()
    return [t for t, (bit, after) in enumerate(pairwise([*mask, False]), start=1) if bit and not after]


@settings(max_examples=150)
@given(size=st.integers(1, 60), max_len=st.integers(2, 20))
def test_every_token_of_a_plain_document_but_the_first_is_learned_once(size, max_len, pydoc_tokenizer):
    text = Conversation((Message("text", "".join(chr(97 + i % 26) + "#" for i in range(size))),), "", "here")
    whole = [*pydoc_tokenizer.encode(text.messages[0].content), pydoc_tokenizer.eos_token_id]
    result = tokenize_part([text], pydoc_tokenizer, max_len)
    assert all(len(piece) <= max_len for piece in result.documents)
    learned = [i for piece in result.documents for i in piece.token_ids[1:][piece.loss_mask[1:]].tolist()]
    assert learned == whole[1:]
    assert result.num_loss_tokens == len(whole)
    assert result.origins == [0] * len(result.documents)
    assert (result.counts["truncated tokens"], result.counts["split"]) == (0, len(whole) > max_len)


def test_what_is_cut_is_said_per_reason(pydoc_tokenizer, caplog):
    def ask(*contents: str) -> Conversation:
        return Conversation(tuple(Message(("user", "assistant")[i % 2], c) for i, c in enumerate(contents)), "", "here")

    text = Conversation((Message("text", "text " * 60),), "", "here")
    asked = [ask("q", "a", "q " * 60, "a"), ask("q", "a " * 60), ask("q " * 60, "a"), ask("q", "a"), text]
    with caplog.at_level("INFO"):
        tokenize(asked, pydoc_tokenizer, 40)
    assert "3 chats are longer than 40 tokens" in caplog.text
    assert "inside the first answer of 1 chats" in caplog.text
    assert "1 documents of" in caplog.text
    assert "1 plain documents are laid into pieces" in caplog.text


def test_a_plain_document_with_a_bos_gets_no_second_one(pydoc_tokenizer):
    class AddsBos(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0] * add_special_tokens + super().encode(text, add_special_tokens=False)

    tokenizer = AddsBos(pydoc_tokenizer._backend)
    for text in ("text", "<|endoftext|>text"):
        [document] = tokenize([Conversation((Message("text", text),), "", "here")], tokenizer, 40).documents
        assert document.token_ids[:2].tolist() == [0, *pydoc_tokenizer.encode("text")[:1]]


@pytest.mark.parametrize(
    ("mask", "max_len", "length"),
    [
        ("..xx..xx", 8, 8),
        ("..x..x.xx", 8, 6),
        ("..xx..xx", 7, 4),
        ("..xx..xx", 4, 4),
        ("..xx..xx", 3, 3),
        (".......", 3, 3),
        ("xx.xx", 2, 2),
    ],
)
def test_turn_end(mask, max_len, length):
    assert turn_end(np.array([c == "x" for c in mask]), max_len) == length
