"""Laws of the tokenizer: streamed text is the decoded text, and a folder is read by the class it names."""

import json
import os
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import pytest
import tokenizers
from chats import PYDOC
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.errors import CheckpointError, RequestError
from specserve.serve.requests.output import IncrementalDecoder
from specserve.tokenizer import GENERIC_CLASS, Tokenizer, _import_class, read_end_ids

BYTE_IDS = [PYDOC.encode(char)[0] for char in "é中😀"]  # first bytes of longer characters


def _fallback() -> Tokenizer:
    """Return a tokenizer that spells characters which it does not know in bytes, as Llama 2's and Mistral's do."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581a": 256, "<unk>": 257, "a": 258, "<s>": 259}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>"))


FALLBACK = _fallback()
chunks = st.lists(st.lists(st.integers(0, 8200) | st.sampled_from([*range(256), *BYTE_IDS]), max_size=12), max_size=12)


@settings(max_examples=400, deadline=None)
@given(chunks, st.booleans())
def test_streamed_text_is_the_decoded_text(pieces, skip):
    decoder = IncrementalDecoder(PYDOC, skip_special_tokens=skip)
    ids = [i for piece in pieces for i in piece]
    whole = PYDOC.decode(ids, skip_special_tokens=skip)
    assert whole == PYDOC._backend.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    streamed = ""
    for piece in pieces:
        streamed += decoder.push(piece)
        assert whole.startswith(streamed)
    assert streamed + decoder.finish() == whole


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_streaming_never_emits_half_a_character(text):
    decoder = IncrementalDecoder(PYDOC)
    streamed = [decoder.push([token_id]) for token_id in PYDOC.encode(text)]
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in streamed)
    assert "".join(streamed) + decoder.finish() == text


def test_streaming_survives_pieces_that_always_end_inside_a_character():
    for text in ("中" * 60, "é" * 60, "😀" * 60):
        token_ids = PYDOC.encode(text)  # one per byte
        num_bytes = len(token_ids) // len(text)
        decoder = IncrementalDecoder(PYDOC)
        cuts = [0, *range(1, len(token_ids), num_bytes), len(token_ids)]
        streamed = [decoder.push(token_ids[low:high]) for low, high in pairwise(cuts)]
        assert "\ufffd" not in "".join(streamed)
        assert "".join(streamed) + decoder.finish() == text


def test_streaming_of_a_tokenizer_that_falls_back_to_bytes():
    """There (Llama, Gemma) an open character makes every byte token before it unreadable, too, until it closes."""
    assert FALLBACK.byte_token_ids() == {*range(256)}
    token_ids = [256, *"😀😀é中".encode(), 256, 256, *"中".encode()]
    for size in (1, 2, 3, 5):
        decoder = IncrementalDecoder(FALLBACK)
        streamed = [decoder.push(token_ids[low : low + size]) for low in range(0, len(token_ids), size)]
        assert "".join(streamed) + decoder.finish() == "a😀😀é中 a a中" == FALLBACK.decode(token_ids)


def test_the_tokens_of_single_bytes_are_found_where_some_are_missing() -> None:
    """Of byte fallback any; of a byte-level vocabulary those of bytes that UTF-8 has nowhere."""
    letters = sorted(ByteLevel.alphabet())
    for names, count in (
        ([f"<0x{byte:02X}>" for byte in range(1, 256)], 255),
        ([letter for letter in letters if letter not in "ÀÁõö÷øùúûüýþÿ"], 243),
        (letters[1:], 0),
    ):
        model = tokenizers.models.BPE({name: i for i, name in enumerate([*names, "\u2581x"])}, [])
        backend = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
        assert Tokenizer(backend).byte_token_ids() == {*range(count)}


words = st.lists(st.sampled_from(["\u2581a", "a", "<s>", *map(chr, b"ab \n"), "é", "中", "😀"]), max_size=12)


@settings(max_examples=300, deadline=None)
@given(words, st.lists(words, max_size=6), st.booleans())
def test_an_answer_is_the_text_behind_its_prompt(prompt, pieces, skip):
    """Also where the decoder strips the space before the first token that it sees."""

    def ids(words: list[str]) -> list[int]:
        known = {"\u2581a": [256], "a": [258], "<s>": [259]}
        return [i for word in words for i in known.get(word, list(word.encode()))]

    decoder = IncrementalDecoder(FALLBACK, ids(prompt), skip_special_tokens=skip)
    before = FALLBACK.decode(ids(prompt), skip_special_tokens=skip)
    streamed = before + "".join(decoder.push(ids(piece)) for piece in pieces) + decoder.finish()
    assert streamed == FALLBACK.decode(ids([*prompt, *chain.from_iterable(pieces)]), skip_special_tokens=skip)


NAMED = {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config": {"text_config": {"eos_token_id": 7}}}, (7, 2)),
        ({"config": {"text_config": {"eos_token_id": [7, 9]}, "eos_token_id": 8}}, (8, 7, 9, 2)),
        ({"generation_config": {"eos_token_id": [7, 2]}, "config": {"eos_token_id": -1}}, (7, 2)),
        ({}, (2,)),
        ({"tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, (2,)),
        ({"tokenizer_config": NAMED | {"added_tokens_decoder": {"2": {"content": "<|im_end|>"}}}}, (2,)),
        ({"tokenizer_config": {"eos_token": PYDOC._backend.convert_ids_to_tokens(300)}}, (300,)),
    ],
)
def test_what_ends_a_turn_in_training_ends_it_in_serving(tmp_path, files, ids):
    """Ids of any config, there also of the text model within it, and the EOS of the tokenizer's own files."""
    (tmp_path / "tokenizer.json").write_text((BUNDLED_FOLDER / "tokenizer.json").read_text())
    for name, content in ({"tokenizer_config": NAMED} | files).items():
        generic = {"tokenizer_class": GENERIC_CLASS} if name == "tokenizer_config" else {}
        (tmp_path / f"{name}.json").write_text("\ufeff" * (name == "config") + json.dumps(generic | content))
    assert read_end_ids(tmp_path) == ids
    assert Tokenizer.load(tmp_path).end_ids == set(ids)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": "7"}}')
    with pytest.raises(CheckpointError, match=r'config.json: text_config: eos_token_id: expected an id .* got "7"'):
        read_end_ids(tmp_path)


@pytest.mark.parametrize("token_id", [PYDOC.encode("中")[0], PYDOC.encode("a")[0]])
def test_cost_of_a_push_does_not_grow(token_id, monkeypatch):
    num_decoded = 0
    decode = Tokenizer.decode

    def counting(self, token_ids, **options):
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(self, token_ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    decoder = IncrementalDecoder(PYDOC)
    costs = []
    for _ in range(1000):  # of a lone lead byte: no clean end ever comes
        before = num_decoded
        decoder.push([token_id])
        costs.append(num_decoded - before)
    assert sum(costs) < 2 * IncrementalDecoder.NUM_WINDOW * len(costs)
    assert max(costs) < 3 * IncrementalDecoder.NUM_WINDOW


def test_bad_inputs_are_named():
    with pytest.raises(RequestError, match="U\\+D800 at character 1"):
        PYDOC.encode("a\ud800")
    with pytest.raises(CheckpointError, match="no such folder"):
        Tokenizer.load(BUNDLED_FOLDER / "nowhere")
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        Tokenizer.load(Path(__file__).parent)


def test_a_final_message_that_is_continued_ends_the_prompt():
    chat = [{"role": "user", "content": "hi"}]
    prompt = PYDOC.render_chat(chat)
    begun = [*chat, {"role": "assistant", "content": "so be"}]
    continued = PYDOC.render_chat(begun, add_generation_prompt=False, continue_final_message=True)
    assert continued == prompt + PYDOC.encode("so be", add_special_tokens=False)
    [mark] = PYDOC.special_tokens_in(PYDOC.decode(prompt, skip_special_tokens=False))[:1]
    assert PYDOC.encode(mark, add_special_tokens=False) == [PYDOC.token_id(mark)]
    assert PYDOC.token_id("so be") is None
    info = json.loads(json.dumps(PYDOC.info()))
    assert PYDOC.token_id(info["eos_token"]) == PYDOC.eos_token_id
    assert info["chat_template"]


def test_a_folder_that_has_nothing_but_its_json_is_read_by_the_generic_class(tmp_path):
    """The class that AutoTokenizer finds, without importing that; every other folder is for AutoTokenizer."""

    generic = type(AutoTokenizer.from_pretrained(str(BUNDLED_FOLDER), local_files_only=True))
    assert _import_class(BUNDLED_FOLDER) is generic
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


def test_files_that_begin_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    for path in BUNDLED_FOLDER.iterdir():
        if path.suffix in (".json", ".jinja"):
            text = path.read_text()
            (tmp_path / path.name).write_text(text, "utf-8-sig")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(json.loads((BUNDLED_FOLDER / "tokenizer_config.json").read_text()) | {"tokenizer_class": "X"}),
        "utf-8-sig",
    )
    chat = [{"role": "user", "content": "What is a list?"}]
    assert Tokenizer.load(tmp_path).render_chat(chat) == PYDOC.render_chat(chat)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_command_reads_tokenizers_without_torch_and_a_library_leaves_it_alone(tmp_path: Path, is_own: bool) -> None:
    """Of a PyTorch that is installed, which here only says that it was imported: in a command not by transformers,
    which otherwise would do so, and by others afterwards."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch was imported')")
    (tmp_path / "torch-9.0.dist-info").mkdir()
    (tmp_path / "torch-9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.0\n")
    script = f"""
from pathlib import Path
from specserve import host
from specserve.tokenizer import _import_class
{"host.own_process()" if is_own else ""}
try:
    print(_import_class(Path({str(tmp_path)!r})))
except ImportError:
    pass
import torch
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "torch was imported" in ran.stderr, ran.stderr
    assert ("AutoTokenizer" in ran.stdout) == is_own
