"""`bench quantization`: the floats lose nothing to themselves, figures are those of NumPy over logits, damage shows."""

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import rounding
import tiny
from safetensors.numpy import load_file
from typer.testing import CliRunner

from specserve.checkpoints.load import Quantization, load_target
from specserve.cli.main import app
from specserve.eval.bench.quantization import QuantizationLoss, measure_losses
from specserve.eval.settings import QuantizationRun
from specserve.serve.launch import Models

PROMPTS = [[5, 9, 40, 3], [7, 7, 21], [11, 60, 2, 8, 30]]
RUN = QuantizationRun(quantization=("int8", "int4"), speculation="chain:2", max_tokens=24, max_model_len=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a target with a tied output head, which has few bits where a CPU serves. Its distributions have peaks, so that
    what rounding of weights does to them is more than what rounding of sums does."""
    folder = tmp_path_factory.mktemp("target")
    tiny.write_target(folder, tiny.TARGET | {"num_hidden_layers": 2, "tie_word_embeddings": True}, seed=0)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 6
    tiny.write_tensors(folder / "model.safetensors", tensors)
    return folder


def _models(folder: Path, quantization: Quantization, damage: float = 1.0) -> Models:
    target = load_target(folder, dtype="float32", quantization=quantization, is_served=True)
    if quantization == "int4":
        first, *others = target.params.layers
        down = first.mlp.down
        down = dataclasses.replace(down, scale=down.scale * damage)
        first = dataclasses.replace(first, mlp=dataclasses.replace(first.mlp, down=down))
        target = dataclasses.replace(target, params=dataclasses.replace(target.params, layers=(first, *others)))
    return Models("tiny", target, tiny.random_head(target.config, seed=1), None, quantization=quantization)


@pytest.fixture(scope="module")
def losses(folder: Path) -> list[QuantizationLoss]:
    return measure_losses(RUN, functools.partial(_models, folder), PROMPTS)


def _log_probs(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_figures_are_those_of_numpy_over_logits(folder: Path, losses: list[QuantizationLoss]) -> None:
    """Over the floats' greedy answers, with the logits of one plain forward over each whole text, of the target as a
    head is trained against it: what is trained is what is served."""
    floats = load_target(folder, dtype="float32")
    texts = [list(prompt) for prompt in PROMPTS]
    for text, prompt, size in zip(texts, PROMPTS, losses[0].sizes, strict=True):
        while len(text) < len(prompt) + size:
            text.append(int(tiny.target_logits(floats, text)[-1].argmax()))
    assert losses[0].sizes[0] > 1
    for loss in losses[1:]:
        other = load_target(folder, dtype="float32", quantization=loss.quantization, is_looped=True)  # type: ignore[arg-type]
        expected, noises = [], []
        for text, prompt in zip(texts, PROMPTS, strict=True):
            rows, ids = slice(len(prompt) - 1, len(text) - 1), np.array(text[len(prompt) :])[:, None]
            p, q = (_log_probs(tiny.target_logits(each, text)[rows]) for each in (floats, other))
            gain = np.take_along_axis(q - p, ids, axis=1)[:, 0]
            kl = (np.exp(p) * (p - q)).sum(axis=-1)
            expected.append([kl, gain, p.argmax(-1) == q.argmax(-1)])
            noise = sum(tiny.tolerance(each, text)[rows, 0] for each in (floats, other))
            own = 4 * rounding.UNIT * np.abs([p, q]).max()  # two roundings of each log-probability
            steep = np.abs(np.exp(q) - np.exp(p)) + np.exp(p) * np.abs(p - q - kl[:, None])  # KL's derivatives
            noises.append([noise * steep.sum(axis=-1) + own, 2 * noise + own])
        kl, gain, is_same_top = map(np.concatenate, zip(*expected, strict=True))
        kl_noise, gain_noise = map(np.concatenate, zip(*noises, strict=True))
        assert kl_noise.mean() < 0.05 * kl.mean(), "the fixture proves nothing"
        rounding.assert_within(loss.kl, kl, kl_noise, f"{loss.quantization}: KL")
        rounding.assert_within(loss.gain, gain, gain_noise, f"{loss.quantization}: gain")
        np.testing.assert_array_equal(loss.is_same_top, is_same_top)
        rounding.assert_within(loss.to_json()["kl"], kl.mean(), kl_noise.mean())
        assert loss.kl_interval is not None
        assert loss.kl_interval.low < kl.mean() < loss.kl_interval.high


def test_the_floats_lose_nothing_and_damage_shows(folder: Path, losses: list[QuantizationLoss]) -> None:
    own, _, four = losses
    assert not own.kl.any()
    assert not own.gain.any()
    assert own.is_same_top.all()
    assert own.equal == own.sizes
    assert own.num_same == len(PROMPTS)
    assert own.perplexity_ratio == 1
    assert four.tau is not None
    run = dataclasses.replace(RUN, quantization=("int4",))
    [_, damaged] = measure_losses(run, functools.partial(_models, folder, damage=2.0), PROMPTS)
    assert damaged.kl.mean() > four.kl.mean()
    assert jnp.isfinite(damaged.kl).all()


@pytest.mark.slow
def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    output = tmp_path / "losses.json"
    sizes = ["--limit", "2", "--max-tokens", "6", "--max-model-len", "512", "--concurrency", "2"]
    line = ["bench", "quantization", "--quantization", "int4", "--output", str(output), *sizes]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())["losses"]
    assert [each["quantization"] for each in found] == ["none", "int4"]
    assert found[0]["kl"] == 0
    assert found[1]["kl"] > 0
    assert f"{found[1]['perplexity_ratio']:.4f}" in result.output
