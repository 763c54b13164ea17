"""Laws of packing: no token is lost or moved between documents, and little of a row is padding."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.data import pydoc
from specserve.data.conversations import Conversation, Message
from specserve.data.documents import Document, tokenize
from specserve.data.packing import pack, stack
from specserve.errors import DataError

SEQ_LEN = 16


def make_documents(lengths: list[int]) -> list[Document]:
    """Documents with distinct tokens, so that each can be recognised in a row."""
    stops = np.cumsum([0, *lengths])
    return [
        Document(np.arange(low, high, dtype=np.int32), np.arange(low, high) % 3 == 0) for low, high in pairwise(stops)
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, SEQ_LEN + 4), max_size=60))
def test_packing_keeps_every_document_whole(lengths):
    documents = make_documents(lengths)
    rows = pack(documents, SEQ_LEN)
    found = {}
    for row in range(len(rows)):
        for number in range(1, rows.document_ids[row].max() + 1):
            (slots,) = np.nonzero(rows.document_ids[row] == number)
            assert np.array_equal(slots, np.arange(slots[0], slots[0] + len(slots)))
            assert np.array_equal(rows.position_ids[row, slots], np.arange(len(slots)))
            found[rows.token_ids[row, slots[0]]] = (rows.token_ids[row, slots], rows.loss_mask[row, slots])
    assert len(found) == len(documents)
    for document in documents:
        token_ids, loss_mask = found[document.token_ids[0]]
        assert np.array_equal(token_ids, document.token_ids[:SEQ_LEN])
        assert np.array_equal(loss_mask, document.loss_mask[:SEQ_LEN])
    is_padding = rows.document_ids == 0
    assert not rows.loss_mask[is_padding].any()
    assert not rows.token_ids[is_padding].any()
    assert rows.num_truncated_tokens == sum(max(0, length - SEQ_LEN) for length in lengths)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=60))
def test_packing_is_first_fit_decreasing(lengths):
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        row = next((i for i, room in enumerate(rooms) if room >= length), None)
        if row is None:
            rooms.append(SEQ_LEN)
            row = len(rooms) - 1
        rooms[row] -= length
    rows = pack(make_documents(lengths), SEQ_LEN)
    assert (rows.document_ids == 0).sum(axis=1).tolist() == rooms
    assert rows.padding_share == pytest.approx(sum(rooms) / (SEQ_LEN * len(rooms)))


def test_tokenize_counts_what_it_cuts_and_drops(pydoc_tokenizer):
    tokenizer = pydoc_tokenizer

    def ask(question: str, answer: str) -> Conversation:
        return Conversation((Message("user", question), Message("assistant", answer)), "", "here")

    plain = Conversation((Message("text", "some text"),), "", "here")
    result = tokenize([ask("q", "a"), ask("q " * 50, "a"), ask("q", "a " * 50), plain], tokenizer, 40)
    assert (len(result.documents), result.counts["dropped"], result.counts["truncated"]) == (3, 1, 2)
    short, cut, whole = result.documents
    assert len(cut) == 40
    assert tokenizer.decode(short.token_ids[short.loss_mask].tolist(), skip_special_tokens=False) == "a<|im_end|>"
    assert whole.token_ids.tolist() == [*tokenizer.encode("some text"), tokenizer.eos_token_id]
    assert whole.loss_mask.all()
    with pytest.raises(DataError, match="none of 1 conversations has a loss-bearing"):
        tokenize([ask("q " * 50, "a")], tokenizer, 40)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=9), min_size=1, max_size=4))
def test_stacked_sources_are_each_packed_alone(lengths):
    parts = [pack(make_documents(part), SEQ_LEN) for part in lengths]
    rows = stack(parts, range(1, 1 + len(parts)))
    assert rows.weights == tuple(range(1, 1 + len(parts)))
    for start, part in zip(rows.source_starts, parts, strict=True):
        for name in ("token_ids", "loss_mask", "document_ids", "position_ids"):
            assert np.array_equal(getattr(rows, name)[start : start + len(part)], getattr(part, name))
    assert len(rows) == sum(map(len, parts))


def test_little_is_padding_on_lengths_like_sharegpts():
    """Lengths with the published quantiles of ShareGPT in tokens (5 to 2,700; quartiles 609, 1504, 2012)."""
    rng = np.random.default_rng(0)
    quantiles, values = (0, 0.25, 0.5, 0.75, 0.9, 0.99, 1), (5, 609, 1504, 2012, 2221, 2709, 6000)
    lengths = np.interp(rng.random(2000), quantiles, values).astype(int)
    for seq_len in (2048, 4096):
        rows = pack(make_documents(np.minimum(lengths, seq_len).tolist()), seq_len)
        assert rows.padding_share < 0.03


def test_little_is_padding_on_pydoc(pydoc_tokenizer):
    documents = tokenize(pydoc.build("train")[::64], pydoc_tokenizer, 256).documents
    assert pack(documents, 256).padding_share < 0.03
