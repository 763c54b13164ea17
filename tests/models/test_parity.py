"""Target logits equal transformers': from committed goldens without torch, and live where torch is (`-m oracle`)."""

import importlib.util
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

from specserve.checkpoints.load import load_target
from specserve.models.target import forward, fuse_for_cpu, logits

TESTS = Path(__file__).parent.parent
CASES = ("llama-rope3", "llama-biased-tied", "qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied")


def _check_parity(folder: Path) -> None:
    target = load_target(folder, dtype="float32")
    expected = load_file(folder / "expected.safetensors")
    token_ids = jnp.asarray(expected["token_ids"])
    n = token_ids.shape[1]
    positions = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), token_ids.shape)
    taps = tuple(range(target.config.num_layers - 1))
    assert np.abs(expected["logits"]).max() > 1, "a golden of zeros proves nothing"
    layers = np.concatenate([expected[f"layer_{i}"] for i in taps], axis=-1)
    for params in (target.params, fuse_for_cpu(target.params)):
        out = forward(params, target.config, token_ids, positions, tiny.causal(n), aux_layers=taps)
        np.testing.assert_allclose(logits(params, target.config, out.hidden_states), expected["logits"], atol=1e-4)
        np.testing.assert_allclose(np.asarray(out.aux_hidden_states), layers, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers(case: str) -> None:
    _check_parity(TESTS / "goldens" / case)


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_live_transformers(case: str, tmp_path: Path) -> None:
    """Other weights and sizes than the goldens'."""
    goldens = _load_tool()
    assert tuple(goldens.CASES) == CASES, "a golden that no test reads"
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "vocab_size": 200}
    goldens.write_case(tmp_path, case, seed=100, **sizes)
    _check_parity(tmp_path)


def _load_tool() -> ModuleType:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("make_goldens", TESTS.parent / "tools" / "make_goldens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
