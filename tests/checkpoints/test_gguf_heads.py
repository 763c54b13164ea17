"""Draft heads in GGUF: a head that is written as llama.cpp's converter does is the head that it was made of, in numbers
that are the gguf package's, and what is not understood is refused in one line."""

from pathlib import Path
from typing import Any

import gguf
import gguf_case
import jax
import pytest
import tiny
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from same_head import assert_same_head

from specserve.checkpoints.load import Target
from specserve.checkpoints.source import find_folder
from specserve.checkpoints.tensors import write_tensors
from specserve.drafters.interface import Head
from specserve.errors import CheckpointError, ConfigError
from specserve.interop import doctor
from specserve.interop.bundled import resolve_head
from specserve.interop.convert import import_head
from specserve.interop.gguf import is_head
from specserve.interop.head import load_head, save_head
from specserve.serve.launch import load_models

BLOCK: dict[str, Any] = {"num_layers": 2, "aux_layers": (0, 2, 4), "block_size": 4, "d_ff": 64, "num_heads": 4}
KEYS = {"target_layers": [1, 3, 5], "block_size": 4, "tokenizer.ggml.mask_token_id": 63}
MARKOV = {"markov_rank": 4, "confidence": "state and token", "foresees_anchor": True, "has_confidence_bias": True}
SELECTOR = {"conv_taps": 2, "conv_group": 4, "selector_rank": 4, "selector_top_k": 5}


def _block(config: Any, changes: dict[str, Any], **settings: Any) -> Head:
    return tiny.random_joint_head(config, 1, changes, **BLOCK, **settings)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle3": (
        lambda config: tiny.random_head(config, 1, aux_layers=(1, 2, 3), d_ff=64),
        {"target_layers": [2, 3, 4], "target_hidden_size": 32},
    ),
    "eagle3-flags": (  # a key of the first files, an embedding of its own, all tokens
        lambda config: tiny.random_head(
            config,
            1,
            aux_layers=(1, 2, 3),
            draft_vocab_size=64,
            has_embedding=True,
            norm_before_residual=True,
            norm_before_fc=True,
        ),
        {"extract_layers": [2, 3, 4], "norm_before_residual": True, "norm_before_fc": True},
    ),
    "dflash": (
        lambda config: _block(config, {}, vocab_size=48, window=6, window_layers=(1,)),
        KEYS | {"attention.sliding_window": 6, "attention.sliding_window_pattern": [False, True]},
    ),
    "dspark": (lambda config: _block(config, MARKOV), KEYS | {"sample_from_anchor": True}),
    "dflash2": (
        lambda config: _block(config, SELECTOR, vocab_size=64),
        KEYS | {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 5},
    ),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _saved(case: str, target: Target, folder: Path) -> Path:
    head = CASES[case][0](target.config)
    params = jax.tree.map(lambda leaf: leaf + 0.01, head.params)  # no bias is nothing but zeros
    save_head(folder, Head(head.drafter, params, head.target_ids), target, dtype="float32", notes={})
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_head_that_it_was_made_of(case: str, tiny_target: Target, tmp_path: Path) -> None:
    made = _saved(case, tiny_target, tmp_path / "made")
    path = gguf_case.write_head(made, tmp_path / "head.gguf", values=CASES[case][1])
    shown = resolve_head(str(path), "--draft")
    expected = load_head(made, tiny_target, dtype="float32")
    assert_same_head(load_head(shown, tiny_target, dtype="float32"), expected)
    assert not [
        each for each in doctor.examine(shown, tiny_target).findings if each.code not in ("t2d-missing", "dtype")
    ]
    import_head(shown, tmp_path / "ours", tiny_target, target_name="tiny")
    assert_same_head(load_head(tmp_path / "ours", tiny_target, dtype="float32"), expected)
    served = load_models(str(tiny_target.folder), str(path), has_tokenizer=False)
    assert served.head is not None
    assert_same_head(served.head, expected)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.BF16])
def test_numbers_of_few_bits_are_the_packages(kind: Kind, tiny_target: Target, tmp_path: Path) -> None:
    made = _saved("eagle3", tiny_target, tmp_path / "made")
    path = gguf_case.write_head(made, tmp_path / "head.gguf", values=CASES["eagle3"][1], kind=kind)
    stored = load_file(made / "model.safetensors")
    for name, tensor in stored.items():
        if name.endswith("_proj.weight") or name in ("fc.weight", "lm_head.weight"):
            stored[name] = gguf.dequantize(gguf.quantize(tensor, kind), kind)
    write_tensors(made / "model.safetensors", stored)
    expected = load_head(made, tiny_target, dtype="float32")
    assert_same_head(load_head(resolve_head(str(path), "--draft"), tiny_target, dtype="float32"), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_layers": None}, "eagle3.extract_layers is None, expected a list"),
        ({"logit_scale": 2.0}, "not known to us, so the head may be another one: eagle3.logit_scale"),
        ({"block_count": 2}, "2 layers; llama.cpp's eagle3 heads have one"),
        ({"embedding_length": None}, "eagle3.embedding_length is missing"),
    ],
)
def test_what_is_not_understood_is_refused(
    changes: dict[str, Any], said: str, tiny_target: Target, tmp_path: Path
) -> None:
    made = _saved("eagle3", tiny_target, tmp_path / "made")
    path = gguf_case.write_head(made, tmp_path / "head.gguf", values=CASES["eagle3"][1] | changes)
    with pytest.raises(CheckpointError, match=said) as refused:
        resolve_head(str(path), "--draft")
    assert "\n" not in str(refused.value)


def test_a_head_is_no_target_and_a_target_drafts_as_it_is(tiny_target: Target, tmp_path: Path) -> None:
    made = _saved("eagle3", tiny_target, tmp_path / "made")
    path = gguf_case.write_head(made, tmp_path / "head.gguf", values=CASES["eagle3"][1])
    with pytest.raises(CheckpointError, match="is 'eagle3'; of GGUF files llama"):
        find_folder(str(path), "--target")
    gguf_case.write(tiny_target.folder, tmp_path / "target.gguf")
    assert is_head(path)
    assert not is_head(tmp_path / "target.gguf"), "as a draft it is a language model"
    with pytest.raises(ConfigError, match=r"--draft 'a/b\.gguf': no such file"):
        resolve_head("a/b.gguf", "--draft")
