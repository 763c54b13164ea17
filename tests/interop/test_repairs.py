"""Slips of files that no file shows, for the kinds beside EAGLE-3 (`test_trial` has that): each has a repair that
undoes it, and running the head finds which one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import carried
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rounding import UNIT, assert_within
from safetensors.numpy import load_file

from specserve.checkpoints.load import Target
from specserve.data.dataset import Prompt
from specserve.drafters.interface import Head
from specserve.drafters.learning import Rows
from specserve.eval import trial
from specserve.eval.trial import DEPTH, Texts, find_misreading
from specserve.interop import doctor
from specserve.interop.convert import export_head
from specserve.interop.eagle3 import dialects
from specserve.interop.findings import Copy, Dialect
from specserve.interop.formats import format_named, format_of
from specserve.interop.head import head_files, load_head, save_head, write_head
from specserve.interop.keys import without

Plant = Callable[[dict[str, Any], dict[str, np.ndarray]], object]
BLOCKS = {"num_layers": 2, "aux_layers": (1, 2, 3), "block_size": 4, "mask_token": 61, "vocab_size": 64}
ROWS, PROMPT, LENGTH = 32, 8, 44


def own(**changes: Any) -> Plant:
    return lambda raw, _tensors: raw["dflash_config"].update(changes)


def top(**changes: Any) -> Plant:
    return lambda raw, _tensors: raw.update(changes)


def swap(one: str, other: str) -> Plant:
    return lambda _raw, tensors: tensors.update({one: tensors[other], other: tensors[one]})


def change(name: str, how: Callable[[np.ndarray], np.ndarray]) -> Plant:
    return lambda _raw, tensors: tensors.update({name: np.ascontiguousarray(how(tensors[name]))})


def thirds(order: list[int]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda weight: weight.reshape(len(weight), 3, -1)[:, order].reshape(weight.shape)


def halves(weight: np.ndarray) -> np.ndarray:
    return np.roll(weight, weight.shape[1] // 2, axis=1)


LAYER = "model.layers.5"
SLIPS: list[Any] = [  # kind of head, what the repair says, and the slip
    ("blocks", "layers [1, 2, 3]", own(target_layer_ids=[2, 3, 4])),
    ("blocks", "in the order 1, 3, 2", change("fc.weight", thirds([0, 2, 1]))),
    ("blocks", "its whole block", top(is_causal=True)),
    ("blocks", "hold token 61", own(mask_token_id=1)),
    ("blocks", "the anchor's own slot foresees nothing", top(sample_from_anchor=True)),
    ("blocks", "hidden_norm.weight and norm.weight", swap("hidden_norm.weight", "norm.weight")),
    ("blocks of speculators", "layers [1, 2, 3]", top(aux_hidden_state_layer_ids=[1, 2, 3])),
    ("causal blocks", "before it alone", top(is_causal=False)),
    ("windows", "windows are of 6 tokens", top(sliding_window=7)),
    ("masked slots", "hold token 63", top(mask_token_id=2, ptd_token_id=2)),
    ("masked slots", "in the order low, high, middle", change("fc.weight", thirds([0, 2, 1]))),
    (
        "masked slots",
        "post_attention_layernorm and norm stand",
        swap("layers.0.post_attention_layernorm.weight", "norm.weight"),
    ),
    (
        "carried layer",
        "enorm.weight and model.layers.5.hnorm.weight",
        swap(f"{LAYER}.enorm.weight", f"{LAYER}.hnorm.weight"),
    ),
    ("carried layer", "takes the hidden state first", change(f"{LAYER}.eh_proj.weight", halves)),
    (
        "carried layer",
        "differences from one",
        lambda _raw, tensors: [
            tensors.update({f"{LAYER}.{name}.weight": tensors[f"{LAYER}.{name}.weight"] - 1})
            for name in ("enorm", "hnorm", "shared_head.norm")
        ],
    ),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Whose tokenizer has a mask."""
    folder = tmp_path_factory.mktemp("target")
    target, _ = carried.models(folder, carried.SMALL | {"num_hidden_layers": 5})
    added = {"61": {"content": "<|MASK|>"}, "60": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return target


def _head(kind: str, target: Target) -> Head:
    if kind == "carried layer":
        head = tiny.random_carried_layer(target.config, seed=1)
    elif kind == "masked slots":
        head = tiny.random_masked_head(target.config, seed=1)
    else:
        more = {"causal blocks": {"causal": "all"}, "windows": {"window": 6}}.get(kind, {})
        head = tiny.random_block_head(target.config, seed=1, **BLOCKS, **more)
    rng = np.random.default_rng(7)  # every part is to matter, norms too

    def stir(x: jax.Array) -> jax.Array:
        return jnp.asarray(x + (0.5 if x.ndim == 1 else 0.1) * rng.standard_normal(x.shape), x.dtype)

    return Head(head.drafter, jax.tree.map(stir, head.params), head.target_ids)


def _write(kind: str, target: Target, folder: Path) -> None:
    save_head(folder, _head(kind, target), target, dtype="float32", notes={})
    if kind == "blocks of speculators":
        export_head(folder, folder.parent / "exported", target, target_name="tiny", dialect="speculators")
        shutil.rmtree(folder)
        (folder.parent / "exported").rename(folder)


@pytest.fixture
def slipped(tmp_path: Path, target: Target, kind: str, plant: Plant) -> tuple[Path, Path, Copy]:
    """The folders of a head as it was made and with the slip, and the slipped files."""
    _write(kind, target, tmp_path / "made")
    raw = json.loads((tmp_path / "made" / "config.json").read_text())
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    plant(raw, tensors)
    (tmp_path / "slipped").mkdir()
    write_head(tmp_path / "slipped", tensors, raw, {})
    return tmp_path / "made", tmp_path / "slipped", Copy(raw, tensors)


def _assert_same(folder: Path, other: Path, target: Target) -> None:
    repaired, made = (load_head(each, target, dtype="float32") for each in (folder, other))
    assert repaired.drafter == made.drafter
    for leaf, same in zip(jax.tree.leaves(repaired.params), jax.tree.leaves(made.params), strict=True):
        # at most one was taken away and added again, and both round: by a unit of |x - 1|, and of |x|
        assert_within(leaf, same, UNIT * (1 + 2 * np.abs(same)))


@pytest.mark.parametrize(("kind", "description", "plant"), SLIPS)
def test_a_repair_undoes_each_slip(slipped: tuple[Path, Path, Copy], target: Target, description: str) -> None:
    made, folder, copy = slipped
    assert not doctor.examine(folder, target).errors, "no file shows it"
    [repair] = [each for each in format_named(copy.raw).repairs(folder, target) if description in each.what]
    repair.fix(copy)
    write_head(folder, copy.tensors, copy.raw, {})
    _assert_same(folder, made, target)


_draft_everywhere = jax.jit(lambda *args: trial._draft.__wrapped__(*args), static_argnums=0)  # traced anew


def _texts(head: Head, target: Target, monkeypatch: pytest.MonkeyPatch) -> Texts:
    """Texts in which one token in three is any, and the head drafts the two after it, as if the target had said so: the
    second draft shows what the first does not, such as a masked slot. A token depends on those before it alone, so that
    writing the drafts down ends."""
    ids, drafter = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH)).astype(np.int32), head.drafter
    for _ in range(LENGTH):
        prompts = [Prompt("any", row[:PROMPT].tolist()) for row in ids]
        texts = Texts(target, prompts, [row[PROMPT:].tolist() for row in ids])
        shape = texts._token_ids.shape
        rows = Rows(
            token_ids=jnp.asarray(texts._token_ids),
            loss_mask=jnp.ones(shape, bool),
            document_ids=jnp.ones(shape, jnp.int32),
            position_ids=jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape),
            seeds=jnp.arange(shape[0], dtype=jnp.uint32),
        )
        aux = jnp.concatenate([texts._state(i) for i in drafter.aux_layers], axis=-1)
        args = head.params, target.params, jnp.asarray(head.target_ids), rows, aux
        with monkeypatch.context() as patch:
            patch.setattr(trial, "ANCHOR_EVERY", 1)  # after every token
            found, positions, bears = jax.device_get(_draft_everywhere(drafter, *args))
        said, roots = ids.copy(), positions[0]
        is_root = bears & (roots >= PROMPT) & (roots % 3 == 0) & (roots + DEPTH < LENGTH)
        for row, column in np.argwhere(is_root):
            said[row, positions[:, row, column] + 1] = found[:, row, column]
        if np.array_equal(said, ids):
            return texts
        ids = said
    raise AssertionError("the head's drafts depend on what follows")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "description", "plant"), SLIPS)
def test_running_the_head_finds_the_slip(
    slipped: tuple[Path, Path, Copy], target: Target, description: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder, copy = slipped
    texts = _texts(load_head(made, target, dtype="float32"), target, monkeypatch)
    nothing, num_tried = find_misreading(made, texts, dtype="float32")
    assert nothing is None
    assert num_tried > 4
    found, _ = find_misreading(folder, texts, dtype="float32")
    assert found is not None
    assert description in found.what, found
    assert found.fix is not None
    found.fix(copy)
    write_head(folder, copy.tensors, copy.raw, {})
    _assert_same(folder, made, target)


def test_the_layer_of_a_whole_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """Nobody has converted it, and to change a copy would be to copy the target."""
    target, _ = carried.models(tmp_path, carried.SMALL)
    assert format_of(tmp_path).repairs(tmp_path, target) == []


@pytest.mark.parametrize("key", [dialects.TAP_IDS, dialects.OUTPUT_TAPS, ""])
@pytest.mark.parametrize("dialect", ["sglang", "vllm", "speculators"])
def test_other_taps_are_written_where_the_files_state_them(tmp_path: Path, target: Target, dialect: Dialect, key: str):
    """So that no two keys disagree afterwards."""
    head = tiny.random_head(target.config, 1, aux_layers=(1, 2, 4))
    tensors, raw = head_files(head, target, dtype="float32", dialect=dialect, target_name="tiny")
    first = dialects.COUNTED_FROM[dialect] if key == dialects.TAP_IDS else 0
    raw = without(raw, [dialects.TAP_IDS]) | ({key: [i + first for i in (1, 2, 4)]} if key else {})
    write_head(tmp_path, tensors, raw, {})
    found = [each for each in format_of(tmp_path).repairs(tmp_path, target) if "the taps are" in each.what]
    assert found
    for repair in found:
        copy = Copy.of(tmp_path)
        repair.fix(copy)
        stated = dialects.KEYS.read(copy.raw, "config.json")
        assert not stated.contradictions()
        assert f"{[*dialects.read_taps(stated, frozenset(copy.tensors))]}" in repair.what
