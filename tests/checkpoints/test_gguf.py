"""GGUF: a file's weights and config are those of the folder that it was made of; its numbers are the gguf package's;
its tokenizer's ids are those of the same vocabulary; what is not understood is refused in one line."""

import dataclasses
import functools
import itertools
import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf_case
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import parity
import pytest
import seeded
import tiny
import tokenizers
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from specserve.checkpoints.configs import find_config
from specserve.checkpoints.form import has_few_bits
from specserve.checkpoints.gguf import weights
from specserve.checkpoints.gguf.blocks import WHOLE_NUMBERS
from specserve.checkpoints.gguf.container import read_gguf
from specserve.checkpoints.gguf.tokenizer import CUTS
from specserve.checkpoints.gguf.weights import QUANTISED, GgufEntry
from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.source import BUNDLED_FOLDER, resolve_target
from specserve.checkpoints.update import other_target
from specserve.errors import CheckpointError, ConfigError, SpecServeError
from specserve.kernels import native
from specserve.kernels.matmul import QuantizedMatrix, dequantize, pack
from specserve.kernels.panels import FOUR_BIT_FORMATS
from specserve.models.families.table import model_config
from specserve.models.params import specs
from specserve.models.rope import Rope, frequencies
from specserve.models.target import target_spec
from specserve.provenance import fingerprint
from specserve.serve.launch import load_models
from specserve.tokenizer import Tokenizer

NAME = "model-of-somebody.gguf"
# whether products read 4 bits, and scales of 16 bits each or in two levels; of others they read 8
PACKED = dict.fromkeys((Kind.Q4_0, Kind.Q4_1), (True, np.float16))
PACKED |= dict.fromkeys((Kind.Q2_K, Kind.Q3_K, Kind.Q4_K), (True, np.uint8))
PACKED |= {Kind.MXFP4: (True, np.float32)}
WRITTEN = (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q4_0, Kind.Q4_1)  # of those that the package writes
PLAIN = {"use_sliding_window": False, "sliding_window": None}
EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
# of tests/goldens, without what the architecture's keys cannot say
CASES: dict[str, dict[str, Any]] = {
    "llama-llama3": {},
    "llama-biased-tied-linear": {},
    "mixtral": {"sliding_window": None},
    "qwen2-tied": PLAIN,
    "qwen2-windows-yarn": PLAIN,
    "qwen2-moe": PLAIN | EXPERTS | {"norm_topk_prob": False},
    "qwen3-tied": PLAIN,
    "qwen3-moe": PLAIN | EXPERTS,
    "phi3": {},
    "phi3-longrope-tied": {},
    "granite-biased-tied": {},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    "seed-oss": {},
    "seed-oss-biased": {},
    "ernie4-5": {},
    "ernie4-5-tied": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "num_hidden_layers": 7},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _folder(case: str, folder: Path, changes: Mapping[str, Any]) -> Path:
    """A model with random weights, which bfloat16 holds as those of published checkpoints."""
    raw = {key: value for key, value in (parity.RAWS[case] | changes).items() if value is not None}
    parts = specs(target_spec(model_config(raw, dtype="float32")))
    shapes = {name: spec.stored_shape for spec in parts for name in spec.names}
    folder.mkdir()
    tiny.write_json(folder / "config.json", raw)
    drawn = {name: seeded.draw(name, shape, 0) for name, shape in shapes.items()}
    rounded = {name: value.astype(ml_dtypes.bfloat16).astype(np.float32) for name, value in drawn.items()}
    tiny.write_tensors(folder / "model.safetensors", rounded)
    return folder


def _as_file(folder: Path, **options: Any) -> Target:
    path = gguf_case.write(folder, folder.parent / NAME, **options)
    return load_target(resolve_target(str(path)).folder, dtype="float32")


def _turns_alike(one: Rope, other: Rope, dim: int) -> None:
    """Both rotary embeddings are the same, but for what rounding the stored divisors to float32 does."""
    for length in (8, 1 << 20):
        a, b = (frequencies(rope.for_length(length), dim) for rope in (one, other))
        np.testing.assert_allclose(a, b, rtol=4 * np.finfo(np.float32).eps)
    np.testing.assert_allclose(one.magnitude, other.magnitude, rtol=np.finfo(np.float32).eps)
    assert (one.rotary_dim, one.is_interleaved) == (other.rotary_dim, other.is_interleaved)


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_folder_that_it_was_made_of(case: str, tmp_path: Path) -> None:
    expected = load_target(_folder(case, tmp_path / "theirs", CASES[case]), dtype="float32")
    found = _as_file(tmp_path / "theirs")
    _turns_alike(found.config.rope, expected.config.rope, expected.config.head_dim)
    assert dataclasses.replace(found.config, rope=expected.config.rope) == expected.config
    assert jax.tree.structure(found.params) == jax.tree.structure(expected.params)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize("case", ["llama-biased-tied-linear", "qwen3-tied", "qwen3-moe"])
def test_logits_are_those_of_the_folder(case: str, tmp_path: Path) -> None:
    expected = load_target(_folder(case, tmp_path / "theirs", CASES[case]), dtype="float32")
    token_ids = seeded.tokens(expected.config.vocab_size, 0).tolist()
    np.testing.assert_array_equal(
        tiny.target_logits(_as_file(tmp_path / "theirs"), token_ids), tiny.target_logits(expected, token_ids)
    )


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
def test_matrices_of_a_type_are_the_packages(kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With rows in turns and experts in one tensor. A folder of what the package makes of them is the same. Whole
    numbers and scales are kept where a type has them."""
    changes = {"hidden_size": 64, "intermediate_size": 32, "sliding_window": None}
    folder = _folder("mixtral", tmp_path / "theirs", changes)
    with caplog.at_level("INFO"):
        found = _as_file(folder, kind=kind)
    assert ("stored in few bits" in caplog.text) == (kind in QUANTISED)
    tensors = load_file(folder / "model.safetensors")
    rounded = {
        name: gguf.dequantize(gguf.quantize(value, kind), kind) if value.ndim > 1 else value
        for name, value in tensors.items()
    }
    tiny.write_tensors(folder / "model.safetensors", rounded)
    jax.tree.map(np.testing.assert_array_equal, found.params, load_target(folder, dtype="float32").params)
    stored = load_target(resolve_target(str(tmp_path / NAME)).folder, dtype="float32", quantization="stored").params
    kept = [leaf for leaf in jax.tree.leaves(stored, is_leaf=_is_matrix) if _is_matrix(leaf)]
    assert len(kept) == (3 * 7 + 1 if kind in WHOLE_NUMBERS else 0)  # the router is small, the embedding looked up
    assert has_few_bits(resolve_target(str(tmp_path / NAME)).folder) == bool(kept)
    restored = jax.tree.map(lambda x: dequantize(x, np.float32) if _is_matrix(x) else x, stored, is_leaf=_is_matrix)
    jax.tree.map(np.testing.assert_array_equal, restored, found.params)


@pytest.mark.parametrize(("kind", "kept"), [(Kind.BF16, "bfloat16"), (Kind.F16, ""), (Kind.F32, ""), (Kind.Q8_0, "")])
def test_keys_and_values_of_a_file_are_kept_as_its_tensors_are_stored(kind: Kind, kept: str, tmp_path: Path) -> None:
    changes = PLAIN | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    folder = _folder("qwen3-tied", tmp_path / "theirs", changes)
    assert _as_file(folder, kind=kind).config.cache_dtype == kept


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_a_tied_head_is_served_as_it_is_stored(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where it is a matrix of its own; the embedding is looked up, and read whole in one go."""
    folder = _folder("qwen3-tied", tmp_path / "theirs", PLAIN | {"hidden_size": 64, "intermediate_size": 32})
    plain_read = GgufEntry.read
    read: list[tuple[int, ...]] = []
    monkeypatch.setattr(GgufEntry, "read", lambda entry, index=(): read.append(entry.shape) or plain_read(entry, index))
    plain = _as_file(folder, kind=kind).params
    assert read.count(plain.embedding.shape) == 1
    load = functools.partial(load_target, resolve_target(str(tmp_path / NAME)).folder, dtype="float32")
    served = load(quantization="stored", is_served=True).params
    assert read.count(plain.embedding.shape) == 2, "the head is whole numbers"
    np.testing.assert_array_equal(served.embedding, plain.embedding)
    assert served.head is not None
    assert _is_matrix(served.head)
    np.testing.assert_array_equal(dequantize(served.head, np.float32), plain.embedding.T)


def _is_matrix(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedMatrix)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_blocks_are_the_packages_wherever_a_slice_begins(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_ROWS", 5)
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng, rows = np.random.default_rng(0), 12
    stored = rng.integers(0, 256, (rows, 3 * num_bytes), np.uint8) & 0xFB  # no scale is infinite
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("first", np.zeros(3, np.float32))  # the data is padded behind it
    writer.add_tensor("x", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor, whole = read_gguf(tmp_path / "x.gguf").tensors["x"], gguf.dequantize(stored, kind)
    entry = GgufEntry(tensor, tensor.shape)
    assert entry.shape == (rows, 3 * block)
    np.testing.assert_array_equal(entry.read(), whole)
    ragged = slice(block + 3, 2 * block + 1)
    np.testing.assert_array_equal(entry.read((slice(5, 8), ragged)), whole[5:8, ragged])
    np.testing.assert_array_equal(entry.read((np.array([7, 2]), ragged)), whole[[7, 2], ragged])
    if matrix := GgufEntry(tensor, tensor.shape, is_product=True).whole_numbers():
        first, parts = block // matrix.block, (matrix.scale, matrix.offset)
        read = [part and part.read((slice(5, 8), slice(first, part.shape[1]))) for part in parts]
        scale, offset = (each if each is None else np.repeat(each, matrix.block, axis=1) for each in read)
        values = matrix.values.read((slice(5, 8), slice(block, 3 * block)))
        restored = values.astype(np.float32) * scale
        np.testing.assert_array_equal(restored if offset is None else restored + offset, whole[5:8, block:])
        if native.is_available():
            packed = _packed(matrix)
            expected = PACKED.get(kind, (False, packed.scale.dtype))
            assert (packed.format in FOUR_BIT_FORMATS, packed.scale.dtype) == expected
    assert (matrix is not None) == (kind in WHOLE_NUMBERS)
    in_turns = GgufEntry(tensor, tensor.shape, num_heads=2)  # of six rows: 0 2 4 1 3 5
    np.testing.assert_array_equal(in_turns.read((slice(1, 8), ragged)), whole[[2, 4, 1, 3, 5, 6, 8], ragged])


def _packed(matrix: Any) -> Any:
    """As a server on a CPU keeps it."""
    values, scale, offset = (
        part and jnp.asarray(part.read(tuple(slice(0, size) for size in part.shape)).T)
        for part in (matrix.values, matrix.scale, matrix.offset)
    )
    return pack(QuantizedMatrix(values, scale, matrix.block, offset))


def test_a_split_file_is_read_whole(tmp_path: Path) -> None:
    folder = _folder("qwen3-tied", tmp_path / "theirs", PLAIN)
    gguf_case.write(folder, tmp_path / "big.gguf", shards=10)
    parts = sorted(tmp_path.glob("big-*.gguf"))
    assert len(parts) > 2
    expected = load_target(folder, dtype="float32").params
    for part in (parts[0], parts[-1]):
        found = load_target(resolve_target(str(part)).folder, dtype="float32").params
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=parts[1].name):
        load_target(resolve_target(str(parts[0])).folder, dtype="float32")


def _vocabulary_of(folder: Path, pre: str) -> dict[str, Any]:
    """The keys of a byte-level vocabulary, with two fillers, and of its folder's special tokens and template."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    tokens = sorted(stored, key=lambda token: stored[token])
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *(f"[PAD{len(tokens) + i}]" for i in range(2))],
        "merges": [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]],
        "token_type": [*types, 5, 5],
        "eos_token_id": stored["<|im_end|>"],
        "bos_token_id": stored["<|endoftext|>"],
        "padding_token_id": stored["<|endoftext|>"],
    }


def _texts(number: int) -> list[str]:
    """Random texts of what tokenizers cut apart."""
    rng, parts = (
        random.Random(0),
        [*"abcXYZ 0129\n\t'sé你😀.,!/-_▁", "  ", "    ", "the ", " and", "\r\n\n", "<|im_end|>"],
    )
    return ["".join(rng.choices(parts, k=rng.randint(1, 40))) for _ in range(number)]


def test_a_served_file_has_the_tokenizer_and_template_of_its_folder(tmp_path: Path) -> None:
    folder = _folder("qwen3-tied", tmp_path / "theirs", PLAIN | {"vocab_size": 8194, "bos_token_id": 0})
    template = (BUNDLED_FOLDER / "chat_template.jinja").read_text()
    vocabulary, values = _vocabulary_of(BUNDLED_FOLDER, "qwen2"), {"tokenizer.chat_template": template}
    path = gguf_case.write(folder, tmp_path / "x.gguf", values=values, vocabulary=vocabulary)
    models = load_models(str(path), "")
    assert models.name == str(path)
    assert models.head is None
    assert models.target.eos_ids == (2, 0)  # <|endoftext|> ends texts too
    assert models.read_tokenizer is not None
    found, expected = models.read_tokenizer(), Tokenizer.load(BUNDLED_FOLDER)
    assert found.info() == expected.info()
    assert found.special_token_ids == expected.special_token_ids
    assert found.vocab_size == expected.vocab_size
    for text in _texts(300):
        assert found.encode(text) == expected.encode(text), text
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    chat = [{"role": "user", "content": "hi"}]
    assert found.render_chat(chat) == expected.render_chat(chat)
    config, where = find_config(str(path))
    assert config == model_config(json.loads(Path(where).read_text()), dtype="bfloat16")
    assert fingerprint(models.target.folder) == models.fingerprint


def test_texts_begin_with_bos_where_the_file_or_its_kind_says_so(tmp_path: Path) -> None:
    folder = _folder("qwen3-tied", tmp_path / "theirs", PLAIN)
    said, unsaid = {"add_bos_token": True}, {"add_bos_token": False}
    cases = (("qwen2", {}, False), ("qwen2", said, True), ("llama-bpe", {}, True), ("llama-bpe", unsaid, False))
    for number, (pre, stated, begins) in enumerate(cases):
        vocabulary = _vocabulary_of(BUNDLED_FOLDER, pre) | stated
        path = gguf_case.write(folder, tmp_path / f"{number}.gguf", vocabulary=vocabulary)
        tokenizer = Tokenizer.load(resolve_target(str(path)).folder)
        assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == begins


@pytest.mark.parametrize("pre", CUTS)
def test_every_expression_keeps_all_of_a_text(pre: str, tmp_path: Path) -> None:
    folder = _folder("qwen3-tied", tmp_path / "theirs", PLAIN)
    path = gguf_case.write(folder, tmp_path / "x.gguf", vocabulary=_vocabulary_of(BUNDLED_FOLDER, pre))
    tokenizer = Tokenizer.load(resolve_target(str(path)).folder)
    for text in _texts(50):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


WORDS = ("▁the", "▁a", "he", "th", "the", "▁t", "re", "er", "▁he", "ab", "ba", "aba", "▁▁")
SCORES = {word: -float(i) for i, word in enumerate(WORDS)}
LETTERS = [*"▁abcdefghijklmnopqrstuvwxyz"]


def _sentence_piece() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS, *LETTERS]
    scores = [0.0] * 259 + [SCORES[word] for word in WORDS] + [-100.0 - i for i in range(len(LETTERS))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(WORDS) + len(LETTERS))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types} | ids


def _merged(text: str) -> list[str]:
    """SentencePiece's merging, written plainly: of neighbours that make a token, those whose token has the highest
    score, the first of them, become one, until there are none. What is no token becomes bytes."""
    parts = list("▁" + text.replace(" ", "▁"))
    while found := [(SCORES[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in SCORES]:
        i = -max(found)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [own for part in parts for own in ([part] if part in SCORES or part in LETTERS else _bytes(part))]


def _bytes(letter: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in letter.encode()]


def test_a_vocabulary_of_scores_merges_as_sentencepiece_does(tmp_path: Path) -> None:
    folder, vocabulary = _folder("qwen3-tied", tmp_path / "theirs", PLAIN), _sentence_piece()
    path = gguf_case.write(folder, tmp_path / "x.gguf", vocabulary=vocabulary)
    tokenizer, rng = Tokenizer.load(resolve_target(str(path)).folder), random.Random(0)
    ids = {token: i for i, token in enumerate(vocabulary["tokens"])}
    for _ in range(500):
        text = "".join(rng.choices([*"aabbthe  rer", "the ", "é", "\n", "😀", "Z"], k=rng.randint(1, 30)))
        found = tokenizer.encode(text)
        assert found == [1, *(ids[part] for part in _merged(text))], text
        assert tokenizer.decode(found) == text


def _written(tmp_path: Path, **options: Any) -> Path:
    return gguf_case.write(_folder("qwen3-tied", tmp_path / "theirs", PLAIN), tmp_path / "x.gguf", **options)


def _refused(path: Path, *words: str) -> None:
    with pytest.raises(SpecServeError) as error:
        load_target(resolve_target(str(path)).folder, dtype="float32")
    message = str(error.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message


def test_a_file_that_was_joined_of_several_is_whole(tmp_path: Path) -> None:
    """llama.cpp's tool then says that it is of no files, and keeps the other keys of a split."""
    count = len(read_gguf(_written(tmp_path)).tensors)
    keys = {"split.count": 0, "split.no": 0, "split.tensors.count": count}
    shutil.rmtree(tmp_path / "theirs")
    assert len(read_gguf(_written(tmp_path, values=keys)).tensors) == count


def test_a_file_is_a_version_of_the_weights_that_serve(tmp_path: Path) -> None:
    path = _written(tmp_path)
    expected = load_target(resolve_target(str(path)).folder, dtype="float32", is_served=True, is_arranged=True)
    served = dataclasses.replace(expected, params=jax.tree.map(jnp.zeros_like, expected.params))
    for given in (path, str(path)):
        found = other_target(served, given, quantization="none", mesh=None)
        jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = _written(tmp_path)
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    for length in (0, 3, 5, *range(8, header, 61), header, len(whole) - 40):
        cut.write_bytes(whole[:length])
        _refused(cut, "not a whole GGUF file")


def test_what_is_no_gguf_of_this_byte_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for content in (b"ggml" + bytes(60), b"GGUF" + bytes([0, 0, 0, 3]) + bytes(60), b"GGUF\1\0\0\0" + bytes(60)):
        path.write_bytes(content)
        _refused(path, "not a whole GGUF file")
    with pytest.raises(ConfigError, match="no such file"):
        resolve_target(str(tmp_path / "nowhere.gguf"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"general.architecture": "eagle3"}, ["'eagle3'", "llama", "qwen3moe"]),
        ({"general.architecture": "clip"}, ["'clip'"]),
        ({"qwen3.rope.scaling.type": "spiral"}, ["'spiral'"]),
        ({"qwen3.attention.head_count_kv": [2, 1, 2]}, ["head_count_kv differs between layers"]),
        ({"qwen3.block_count": 2}, ["blk.2.attn_k.weight is not part of this architecture"]),
        ({"split.count": 2}, ["1 of a split's 2 files"]),
        ({"general.alignment": 0}, ["not a whole GGUF file"]),
        ({"qwen3.attention.head_count": 0}, ["make no sense"]),
        ({"qwen3.embedding_length": "wide"}, ["make no sense"]),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, values: dict[str, Any], words: list[str]) -> None:
    path = _written(tmp_path, values=values)
    with pytest.raises(SpecServeError) as error:
        load_target(resolve_target(str(path)).folder, dtype="float32")
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "klingon"}, ["tokenizer.ggml.pre is 'klingon'", "qwen2"]),
        ({"model": "rwkv"}, ["'rwkv'"]),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, ["same token twice"]),
        ({"token_type": [1]}, ["1 types of 96 tokens"]),
        ({"eos_token_id": 96}, ["eos_token_id is 96"]),
        ({"tokens": 7}, ["make no sense"]),
        ({"merges": ["a"]}, ["merges cannot be read"]),
    ],
)
def test_a_vocabulary_that_is_not_understood_is_named(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    _refused(_written(tmp_path, vocabulary=gguf_case.VOCABULARY | changes), *words)


@pytest.mark.parametrize("number", [7, 9])
def test_experts_are_as_many_as_the_file_says(number: int, tmp_path: Path) -> None:
    folder = _folder("qwen3-moe", tmp_path / "theirs", CASES["qwen3-moe"])
    path = gguf_case.write(folder, tmp_path / "x.gguf", values={"qwen3moe.expert_count": number})
    with pytest.raises(CheckpointError, match=r"experts\.2\.gate_proj\.weight has shape"):
        load_target(resolve_target(str(path)).folder, dtype="float32")


def test_keys_that_are_not_read_are_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolve_target(str(_written(tmp_path, values={"qwen3.expert_weights_scale": 2.0, "other.key": 1})))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.endswith("keys that are not read: qwen3.expert_weights_scale")


def test_types_of_numbers_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = _written(tmp_path)
    content = path.read_bytes()
    name = b"blk.1.ffn_down.weight"
    place = content.index(name) + len(name) + 4 + 16  # of its type, behind its rank and its two sizes
    for kind, word in ((Kind.F64, "type F64"), (1000, "type 1000")):
        path.write_bytes(content[:place] + int(kind).to_bytes(4, "little") + content[place + 4 :])
        os.utime(path, ns=(0, int(kind)))  # another file
        _refused(path, name.decode(), word)
