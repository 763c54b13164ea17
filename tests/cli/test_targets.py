"""`specserve targets` and the recipes: they say the same, and a recipe is settings that a run takes."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from specserve import config
from specserve.checkpoints.load import Target
from specserve.checkpoints.source import BUNDLED, BUNDLED_FOLDER, BUNDLED_HEADS
from specserve.cli.main import app
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.interop.bundled import BUNDLED_HEAD
from specserve.models.presets import PRESETS, HeadSize
from specserve.train.head import new_drafter
from specserve.train.settings import TrainRun

NAMES = [BUNDLED, *PRESETS]


def listed(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, ["targets", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(listed("--json"))}


def test_a_recipe_trains_the_head_that_is_listed(rows: dict[str, dict], pydoc_target: Target, tmp_path: Path) -> None:
    """It is settings that a run takes, repeats no default, and says what the list says."""
    assert list(rows) == NAMES
    defaults = {leaf.name: leaf.default for leaf in config.leaves(TrainRun)}
    for name in NAMES:
        file = tmp_path / f"{name}.yaml"
        file.write_text(listed(name, "--recipe"))
        run = config.resolve(TrainRun, file=file)
        assert run.target == name
        assert parse_speculation(run.eval.speculation[0]) is not None
        assert run.train.max_steps
        target = Target(PRESETS[name].config(), None, (), Path()) if name in PRESETS else pydoc_target
        head = new_drafter(run.drafter, run.draft, target.config, run.draft.vocab_size)
        shape = {"d_model": head.d_model, "d_ff": head.facts()["d_ff"], "vocab_size": head.draft_vocab_size}
        assert rows[name]["head"] == shape, name
        if name in PRESETS:
            assert PRESETS[name].head_size() == HeadSize(**rows[name]["head"])
            assert {key: getattr(run.draft, key) for key in PRESETS[name].draft} == PRESETS[name].draft
        for section, value in yaml.safe_load(file.read_text()).items():
            for key, inner in value.items() if isinstance(value, dict) else [("", value)]:
                leaf = f"{section}.{key}".rstrip(".")
                assert inner != defaults[leaf] or leaf == "target", f"{name}: {leaf} is the default"


@pytest.mark.parametrize("arguments", [("--recipe",), ("nobody", "--recipe"), ("nobody",)])
def test_a_name_without_a_recipe_is_an_error(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["targets", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "specserve targets" in str(result.exception)


def test_the_bundled_target_is_listed_as_it_ships(rows: dict[str, dict]) -> None:
    row, head = rows[BUNDLED], json.loads((BUNDLED_HEADS[BUNDLED_HEAD] / "config.json").read_text())
    assert row["hub_id"] is None
    weights = (BUNDLED_FOLDER / "model.safetensors").stat().st_size
    assert row["bf16_bytes"] == pytest.approx(weights, rel=0.001)  # the file has a header, too
    assert row["head"]["vocab_size"] == head["draft_vocab_size"]


@pytest.mark.parametrize("columns", [80, 200])
def test_nothing_is_cut_in_a_terminal(columns: int, rows: dict[str, dict]) -> None:
    text = listed(columns=columns)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    for row in rows.values():
        line = next(line for line in lines if line.startswith(f"{row['name']} "))
        assert row["family"] in line
        owner, _, own = (row["hub_id"] or "").partition("/")
        assert f"{owner}/{own}" in text or {f"{owner}/", own} <= {line.split(" ")[0] for line in lines}, "in two lines"
    assert "30.5B  3.35B active" in text if columns == 200 else "3.35B active" in text
