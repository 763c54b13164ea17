"""A language model as a draft, alone: it proposes what it would say itself, in the target's tokens, whatever part of a
sequence it has not read. What holds for every kind of draft is in tests/serve/lossless/test_every_kind.py."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_folder
import tokenizers
from engines import (
    Ask,
    Dice,
    Fixed,
    Inbox,
    Reference,
    compile_programs,
    greedy,
    make_engine,
    make_runner,
    run,
    serving,
    submit,
)
from spread import target_of
from transformers import PreTrainedTokenizerFast

from specserve.checkpoints.load import Target, load_target
from specserve.drafters.interface import Head
from specserve.drafters.language_model.drafter import LanguageModel
from specserve.drafters.registry import check_trained
from specserve.drafters.speculation import parse_speculation
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.language_model.vocabulary import SharedTokens, least_shared, share_tokens
from specserve.serve.launch import load_models
from specserve.serve.launch import make_engine as make_server
from specserve.serve.requests.request import SamplingParams, SpeculationStats
from specserve.serve.settings import ServeRun
from specserve.tokenizer import Tokenizer

OTHERS = 16  # tokens that a draft has and the target lacks
FEW_PAGES = 14  # of 40 that four sequences would grow to


def under_other_ids(target: Target) -> Head:
    """The target as its own draft, whose tokens have other ids; and more tokens, of which it would always say one."""
    size = target.config.vocab_size
    place, others = np.split(np.random.default_rng(0).permutation(size + OTHERS).astype(np.int32), [size])
    target_ids = np.full(size + OTHERS, -1, np.int32)
    target_ids[place] = np.arange(size)

    def spread(rows: jax.Array) -> jax.Array:
        return jnp.zeros((size + OTHERS, rows.shape[1]), rows.dtype).at[place].set(rows)

    params, config = target.params, dataclasses.replace(target.config, vocab_size=size + OTHERS)
    assert isinstance(params.head, jax.Array)
    head = spread(params.head.T).at[others].set(100.0).at[others[0]].set(-100.0).T
    params = dataclasses.replace(params, embedding=spread(params.embedding), head=head)
    return Head(LanguageModel(config), params, target_ids, place)


@pytest.mark.parametrize("model", ["dense", pytest.param("latents", marks=pytest.mark.slow)])
def test_a_target_that_drafts_for_itself_accepts_everything(
    model: str, shallow_target: Target, kept: Path | None
) -> None:
    """Greedy and hot, under other ids: after chains and plain steps in any order, of prompts of all lengths beside each
    other, after pages had to be given up, and after a hit of pages whose text was an answer."""
    target = shallow_target if model == "dense" else target_of(model)
    head = under_other_ids(target)
    runner = make_runner(target, head, "chain:3", "chain:2", "off", folder=kept)
    compile_programs(runner)
    reference, rng = Reference(target, kept), np.random.default_rng(1)
    with reference.engine:
        asks = [reference.any_ask(rng, length, i % 2 == 1) for i, length in enumerate((1, 40, 17, 33, 8, 26))]
        with serving(make_engine(runner, Dice(0, leaves_draft=False), num_pages=FEW_PAGES)) as engine:
            inboxes = run(engine, asks)
            assert engine.stats().num_preemptions > 0
            begun = dataclasses.replace(asks[2], prompt=(*asks[2].prompt, *inboxes[2].token_ids[:24]))
            for ask in (asks[2], begun):
                asks.append(ask)
                inboxes += run(engine, [ask])
            for ask, inbox in zip(asks, inboxes, strict=True):
                reference.check(ask, inbox)
                *drafts, _last = _stats(inbox).drafts  # the end of the answer may cut that
                assert {proposed for proposed, _ in drafts} <= {2, 3}
                assert len(drafts) > 2
                assert all(accepted == proposed for proposed, accepted in drafts)
            assert _stats(inboxes[-1]).num_cached_tokens > len(asks[2].prompt)


def _stats(inbox: Inbox) -> SpeculationStats:
    stats = inbox.wait().stats
    assert stats is not None
    return stats


Greedy = Callable[[Sequence[int], int], list[int]]  # a prefix, and how many tokens follow


def _ours(_folder: Path, model: Target) -> Greedy:
    def follow(prefix: Sequence[int], number: int) -> list[int]:
        text = list(prefix)
        for _ in range(number):
            text.append(int(tiny.target_logits(model, text)[-1].argmax()))
        return text[len(prefix) :]

    return follow


def _theirs(folder: Path, _model: Target) -> Greedy:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def follow(prefix: Sequence[int], number: int) -> list[int]:
        options: dict[str, Any] = {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False}
        with torch.no_grad():
            return model.generate(torch.tensor([[*prefix]]), **options)[0, len(prefix) :].tolist()

    return follow


@pytest.mark.parametrize("by", [_ours, pytest.param(_theirs, marks=pytest.mark.oracle)])
def test_it_proposes_what_it_would_say(
    tmp_path: Path, shallow_target: Target, kept: Path | None, by: Callable[[Path, Target], Greedy]
) -> None:
    """Greedily, from the same tokens; of another model than the target, in two chunks of a prompt and far behind."""
    raw = tiny.TARGET | {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 16, "eos_token_id": None}
    tiny.write_target(tmp_path, raw, seed=3)
    model = load_target(tmp_path, dtype="float32")
    head = Head(LanguageModel(model.config), model.params, np.arange(64, dtype=np.int32))
    runner, follow = make_runner(shallow_target, head, "chain:3", folder=kept), by(tmp_path, model)
    compile_programs(runner)
    prompt = np.random.default_rng(2).integers(3, 64, 21).tolist()
    with serving(make_engine(runner, Fixed(parse_speculation("chain:3")))) as engine:
        inbox = submit(engine, Ask(tuple(prompt), greedy(24, ignore_eos=True, return_tree=True)))[1]
        inbox.wait()
    text, num_steps = [*prompt], 0
    for delta in inbox.deltas:
        if delta.tree is not None:
            root, *drafts = delta.tree.token_ids
            assert root == text[-1]
            assert drafts == follow(text, 3)
            num_steps += 1
        text += delta.token_ids
    assert num_steps > 10


QWEN = chats.load("qwen2.5")
PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁what": 256, "A": 257, "what": 258, "</s>": 259}


def _pieces() -> Tokenizer:
    """A tokenizer that marks spaces as SentencePiece does, with a token for each byte beside its letters."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(PIECES, [], byte_fallback=True))
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence(parts)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def _share(target: Tokenizer, draft: Tokenizer, more: int = 0, more_of_draft: int = 0) -> SharedTokens:
    sizes = {"vocab_size": target.vocab_size + more, "draft_vocab_size": draft.vocab_size + more_of_draft}
    return share_tokens(target, draft, **sizes, where="draft")


@pytest.mark.parametrize(("more", "more_of_draft"), [(0, 0), (5, 0), (0, 5), (3, 5)])
def test_the_same_tokenizer_needs_no_table_however_rows_are_padded(more: int, more_of_draft: int) -> None:
    shared, size = _share(QWEN, QWEN, more, more_of_draft), QWEN.vocab_size
    same = size + min(more, more_of_draft)
    assert shared.target_ids.tolist() == [*range(same), *[-1] * (more_of_draft - min(more, more_of_draft))]
    if more <= more_of_draft:
        assert shared.draft_ids is None
    else:
        assert shared.draft_ids is not None
        assert shared.draft_ids.tolist() == [*range(same), *[QWEN.eos_token_id] * (more - more_of_draft)]


@pytest.mark.parametrize("names", [("pydoc", "qwen"), ("qwen", "pydoc"), ("pieces", "pydoc"), ("pydoc", "pieces")])
def test_other_tokenizers_share_the_tokens_of_the_same_text(names: tuple[str, str]) -> None:
    """A token that is proposed has one partner, with the same bytes; and one that the draft lacks is read as the end of
    its own spelling of it."""
    all_of = {"pydoc": chats.PYDOC, "qwen": QWEN, "pieces": _pieces()}
    target, draft = (all_of[name] for name in names)
    shared = _share(target, draft, 2, 3)
    assert shared.draft_ids is not None
    pairs = [(its, own) for own, its in enumerate(shared.target_ids.tolist()) if its >= 0]
    assert len({its for its, _ in pairs}) == len(pairs) >= least_shared(target.vocab_size)
    assert f"{len(pairs):,} of its {draft.vocab_size:,} tokens" in shared.what
    texts, own_texts = _texts(target), _texts(draft)
    ends = {(target.eos_token_id, draft.eos_token_id)}
    assert all(texts[its] == own_texts[own] or (its, own) in ends for its, own in pairs)
    assert dict(pairs).items() <= dict(enumerate(shared.draft_ids.tolist())).items()
    common = {*texts} & {*own_texts} - {b"\xff"}  # no text has that
    assert common <= {texts[its] for its, _ in pairs}
    lacking = [i for i, text in enumerate(texts) if text not in own_texts and i not in dict(ends)]
    assert lacking
    for token_id in lacking:
        assert texts[token_id].endswith(own_texts[shared.draft_ids[token_id]]), texts[token_id]
    assert shared.draft_ids[-2:].tolist() == [draft.eos_token_id] * 2
    if names == ("pydoc", "pieces"):  # a letter is read as a letter, and not as a byte
        assert shared.draft_ids[target.encode("A")].tolist() == [PIECES["A"]]


def _texts(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token, by how byte-level vocabularies and those of SentencePiece write them."""
    names = {token_id: name for name, token_id in tokenizer.vocabulary().items()}
    is_of_pieces = "<0x00>" in tokenizer.vocabulary()
    special, letters = tokenizer.special_token_ids, {letter: byte for byte, letter in _LETTERS.items()}

    def text(token_id: int, name: str) -> bytes:
        if token_id in special or is_of_pieces:
            return bytes([int(name[3:-1], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()
        return bytes(letters[letter] for letter in name)

    return [text(token_id, names[token_id]) for token_id in range(tokenizer.vocab_size)]


# GPT-2's letters for bytes: those that print are themselves, the others come after them in order
_PRINT = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = {byte: chr(byte) for byte in _PRINT}
_LETTERS |= {byte: chr(256 + i) for i, byte in enumerate(sorted({*range(256)} - {*_PRINT}))}


def test_a_tokenizer_with_next_to_nothing_in_common_is_refused() -> None:
    """As many as are asked for are enough."""
    words = [chats.PYDOC._backend.convert_ids_to_tokens(i) for i in range(1000, 1000 + least_shared(8192))]

    def with_words(number: int) -> Tokenizer:
        names = [*words[:number], *(f"{word}\u0120\u0120" for word in words)]
        backend = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, []))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))

    assert (_share(chats.PYDOC, with_words(len(words))).target_ids >= 0).sum() == len(words)
    with pytest.raises(CheckpointError, match=r"draft: 89 of its 179 tokens .* fewer than 90"):
        _share(chats.PYDOC, with_words(len(words) - 1))


def test_a_folder_of_another_tokenizer_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As it is, with nothing but a folder: tokens are those of plain decoding, and the log says what is shared."""
    target = tiny_folder.write_folder(tmp_path / "target")
    draft = tmp_path / "draft"
    draft.mkdir()
    tiny.write_target(draft, tiny.TARGET | {"vocab_size": 8192, "hidden_size": 16, "num_hidden_layers": 1}, seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chats.BUNDLED_FOLDER / name, draft)
    caplog.set_level("INFO")
    models = load_models(str(target), str(draft))
    assert models.head is not None
    assert models.draft is not None
    assert (models.head.drafter.name, models.draft.name) == ("language-model", "draft")
    assert "314 of its 8,192 tokens" in caplog.text
    server = ServeRun(speculation="tree:2x2x4", max_slots=2, max_model_len=64, constrained=False, prefix_cache=False)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    hot = SamplingParams(max_tokens=20, temperature=1.5, seed=1, ignore_eos=True)
    with make_server(models, server, lambda *_: None) as engine:
        found = {}
        for way in ("tree:2x2x4", "off"):
            engine.set_speculation(way)
            found[way] = [done.token_ids for done in engine.generate([[5, 9, 300], [8] * 20], [params, hot])]
    assert found["tree:2x2x4"] == found["off"]


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    """A model whose states cannot go back, one whose tokens nobody can compare; and to make a head of a model."""
    target = tiny_folder.write_folder(tmp_path / "target")
    bare = tmp_path / "bare"
    bare.mkdir()
    tiny.write_target(bare, tiny.TARGET, seed=1)
    with pytest.raises(CheckpointError, match="bare: no tokenizer files"):
        load_models(str(target), str(bare))
    recurrent = json.loads((chats.FOLDER.parent / "qwen3-next" / "config.json").read_text())
    tiny.write_target(bare, recurrent | {"num_nextn_predict_layers": 0}, seed=1)
    with pytest.raises(ConfigError, match="a qwen3_next has layers that keep a recurrent state"):
        load_models(str(target), str(bare))
    with pytest.raises(
        ConfigError, match=r"--drafter language-model: that is a language model, .* of the kinds eagle3"
    ):
        check_trained("language-model", "--drafter language-model")
