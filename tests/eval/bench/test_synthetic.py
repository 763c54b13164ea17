"""`bench --random-weights`: a target of random numbers has the shapes, the dtypes and the formats of a loaded one."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

from specserve.checkpoints.load import Quantization, load_target
from specserve.checkpoints.tensors import write_json
from specserve.cli.main import app
from specserve.errors import ConfigError
from specserve.eval.bench.synthetic import bench_models, random_target
from specserve.eval.settings import BenchRun, LatencyRun
from specserve.mesh import SERVING_AXES, parse_mesh
from specserve.plan.serving import planned_head

RAW = tiny.TARGET | {"num_hidden_layers": 2, "torch_dtype": "bfloat16"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config.json and nothing else."""
    write_json(tmp_path / "config.json", RAW)
    return tmp_path


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_random_target_is_like_a_loaded_one(folder: Path, quantization: Quantization, is_tied: bool) -> None:
    (folder / "loaded").mkdir()
    tiny.write_target(folder / "loaded", RAW | {"tie_word_embeddings": is_tied}, seed=0)
    write_json(folder / "config.json", RAW | {"tie_word_embeddings": is_tied})
    drawn = random_target(str(folder), quantization=quantization)
    loaded = load_target(folder / "loaded", dtype="float32", quantization=quantization, is_served=True)
    assert drawn.config == loaded.config
    assert jax.tree.structure(drawn.params) == jax.tree.structure(loaded.params)
    for mine, other in zip(jax.tree.leaves(drawn.params), jax.tree.leaves(loaded.params), strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        if quantization == "none":
            assert (mine.astype(jnp.bfloat16).astype(mine.dtype) == mine).all(), "numbers of the checkpoint's dtype"
    layers = [np.asarray(layer.mlp.down) for layer in random_target(str(folder)).params.layers]  # type: ignore[union-attr]
    assert layers[0].std() == pytest.approx(layers[1].std(), rel=0.1)
    assert (layers[0] != layers[1]).mean() > 0.9, "each layer is drawn anew"


def test_a_preset_needs_no_hub_and_a_mesh_cuts_what_is_drawn(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"deepseek-v3: 671,026,419,200 parameters take .* GB"):
        random_target("deepseek-v3")
    mesh = parse_mesh("tensor=2", SERVING_AXES)
    cut, whole = random_target(str(folder), mesh=mesh), random_target(str(folder))
    [half] = {each.data.shape for each in cut.params.layers[0].mlp.up.addressable_shards}  # type: ignore[union-attr]
    assert half == (RAW["hidden_size"], RAW["intermediate_size"] // 2)
    for mine, other in zip(jax.tree.leaves(cut.params), jax.tree.leaves(whole.params), strict=True):
        assert (mine == other).all()


def test_what_goes_with_it(folder: Path) -> None:
    """A head that `train` would begin with; random prompts, and no answer that anybody might take for one."""
    models = bench_models(BenchRun(target=str(folder), bench="random", random_weights=True))
    assert models.tokenizer is None
    assert models.draft is not None
    assert models.draft.name == "eagle3, random weights", "nobody is to take it for the bundled one"
    assert models.head is not None
    assert models.head.drafter == planned_head(str(folder), "eagle3", models.target.config)
    assert len(models.head.target_ids) == models.head.drafter.draft_vocab_size
    with pytest.raises(ConfigError, match="--bench pydoc asks in words: --bench random"):
        bench_models(LatencyRun(target=str(folder), random_weights=True))
    with pytest.raises(ConfigError, match="--random-weights has none: give int8"):
        bench_models(LatencyRun(target=str(folder), bench="random", random_weights=True, quantization="stored"))
    for command in ("eval", "serve", "verify"):
        result = CliRunner().invoke(app, [*command.split(), "--target", str(folder), "--random-weights"])
        assert result.exit_code == 2, command
        assert "--random-weights" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "bench latency --input-len 6 --output-len 4 --batch-size 1 --num-iters 1 --num-iters-warmup 1",
        "bench engine --input-len 6 --max-tokens 4 --max-model-len 64 --concurrency 1 --temperature 0 --rounds 1 "
        "--requests 1 --arms chain:1 --no-coupling",
    ],
)
def test_a_benchmark_runs_without_weights(
    folder: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [*command.split(), "--target", str(folder), "--random-weights", "--bench", "random"]
    words += ["--speculation", "chain:1"] if "latency" in command else []
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "report.json")])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "chain:1" in result.output
    if "engine" in command:
        facts = json.loads((tmp_path / "report.json").read_text())
        assert (facts["target"], facts["draft"]) == (f"{folder}, random weights", "eagle3, random weights")
