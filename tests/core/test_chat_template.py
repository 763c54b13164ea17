"""Laws of the chat template: what it reads, what it refuses, and what it writes for every chat."""

import numpy as np
import pytest
from chats import CALLING_TEMPLATES, HEAD, PYDOC, TAIL, chat, with_template
from tokenizers.processors import TemplateProcessing

from specserve.data.chat_masks import encode_chat
from specserve.errors import ConfigError, DataError, RequestError
from specserve.tokenizer import Tokenizer
from specserve.train.run.prepare import draft_vocab


def test_rendered_chat_has_one_bos_even_if_the_tokenizer_adds_one():
    tokenizer = with_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer._backend.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer.encode("hi") == [0, *PYDOC.encode("hi")]
    assert tokenizer.render_chat(chat("hi")) == tokenizer.encode("hi")


def test_draft_vocabulary_pins_everything_the_template_writes():
    pinned = PYDOC.template_token_ids()
    content = PYDOC.encode("zebra")
    whole, _ = encode_chat(PYDOC, [{"role": role, "content": "zebra"} for role in ("system", "user", "assistant")])
    assert set(whole) - set(content) <= pinned
    assert {0, 1, 2} <= pinned
    assert not set(content) & pinned


def test_draft_vocabulary_can_write_every_character():
    """Also one that the data has never seen, as long as single bytes leave room for frequent tokens."""
    counts = np.zeros(PYDOC.vocab_size, np.int64)
    rare = {token_id for char in "é中😀\x07" for token_id in PYDOC.encode(char)}
    assert len(PYDOC.byte_token_ids()) == 256
    assert rare <= PYDOC.byte_token_ids()
    assert rare <= set(draft_vocab(counts, PYDOC, (2,), 1024).tolist())
    small = set(draft_vocab(counts, PYDOC, (2,), 300).tolist())
    assert PYDOC.template_token_ids() <= small
    assert len(small) == 300


def test_what_a_template_reads():
    template = with_template(HEAD + CALLING_TEMPLATES["as JSON"] + "{{ enable_thinking }}" + TAIL).template
    assert template.reads_tools
    assert template.reads_reasoning
    assert (template.reads_variable("enable_thinking"), template.reads_variable("thinking")) == (True, False)
    assert (PYDOC.template.reads_tools, PYDOC.template.reads_reasoning) == (False, False)
    assert not with_template("").template.reads_tools


def test_a_chats_own_variables_win_over_those_of_the_tokenizer():
    backend = with_template("{{ a }}{{ b }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")._backend
    tokenizer = Tokenizer(backend, template_kwargs={"a": 1, "b": 2})
    assert tokenizer.decode(tokenizer.render_chat(chat("x"))) == "12x"
    assert tokenizer.decode(tokenizer.render_chat(chat("x"), template_kwargs={"b": 3})) == "13x"
    tokenizer.template.check_kwargs({"a": 1})
    for name in ("tools", "tokenize", "c"):
        with pytest.raises(ConfigError, match=name):
            tokenizer.template.check_kwargs({name: 1})
    with pytest.raises(DataError, match="cannot set tokenize"):
        encode_chat(tokenizer, chat("x", "y"), template_kwargs={"tokenize": False})


def test_chats_that_cannot_be_rendered_are_refused():
    for messages in ([], [{"role": "user"}], [{"role": "user", "content": 3}], [{"role": "user", "content": ["x"]}]):
        with pytest.raises(RequestError) as caught:
            PYDOC.render_chat(messages)
        assert caught.value.param == "messages"
    with pytest.raises(DataError):
        encode_chat(PYDOC, [{"role": "user"}])
    for name in ("chat_template", "tokenize", "messages", "conversation"):
        with pytest.raises(RequestError, match=name):
            PYDOC.render_chat(chat("hi"), template_kwargs={name: "x"})
    with pytest.raises(RequestError, match="no chat template"):
        with_template("").render_chat(chat("hi"))
