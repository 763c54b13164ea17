"""`specserve train --dry-run`: what is printed, and that nothing is loaded or written for it."""

import os
from pathlib import Path

import pytest
import yaml
from machines import LAPTOP
from typer.testing import CliRunner

from specserve.cli import plan_view
from specserve.cli.main import app
from specserve.devices import DEVICES, REFERENCE, Device
from specserve.models.presets import PRESETS
from specserve.train.run import recipe as settings
from specserve.train.run.recipe import recipe


@pytest.fixture(autouse=True)
def _on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is one of the table, unless a test says otherwise."""
    _be(monkeypatch, REFERENCE)


def _be(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    for module in (plan_view, settings):
        monkeypatch.setattr(module, "this_device", lambda: device)


def dry_run(*arguments: str, columns: int = 100) -> str:
    result = CliRunner().invoke(app, ["train", "--dry-run", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("columns", [80, 140])
def test_a_plan_is_printed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe("qwen3-8b"))
    text = dry_run("--config", str(file), "--lr", "2e-4", columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "lr: 0.0002" in text
    assert "8,190,735,360" in text
    assert "16.38 GB   bfloat16" in text
    for what in (
        "moments",
        "rollout",
        "loss",
        "workspace",
        "useful",
        "executed",
        "positions/s",
        "16,384 positions",
    ):
        assert what in text
    for device in DEVICES:
        assert device.name in text
    assert os.listdir(tmp_path) == [file.name]  # no output folder, no cache


def assert_shows_its_recipe(name: str) -> None:
    shown = dry_run("--target", name, columns=200)
    settings = yaml.safe_load(shown[shown.index("target:") : shown.index("Models")])
    for section, brought in yaml.safe_load(recipe(name)).items():
        found = settings[section]
        assert (found | brought if isinstance(brought, dict) else brought) == found
    for text in ("The plan", "perfectblend", "of the target itself", "on each device", "expected tau about"):
        assert text in " ".join(shown.split())


def test_a_name_alone_is_planned_by_its_recipe() -> None:
    for name in ("qwen3-8b", "gpt-oss-20b"):
        assert_shows_its_recipe(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_name_is_planned_by_its_recipe(name: str) -> None:
    assert_shows_its_recipe(name)


def test_what_does_not_fit_is_shown_and_is_no_error() -> None:
    text = dry_run("--target", "llama-3.3-70b", "--mesh", "")
    assert all("too few" in line for line in text.splitlines() if line.strip().startswith(("A100", "TPU")))
    assert "one device" in text


def test_a_plan_is_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is measured has its own hours, and a run of its size; what is too large for it is planned for others,
    and said to be."""
    _be(monkeypatch, LAPTOP)
    small = " ".join(dry_run("--target", "qwen3-0.6b", "--budget", "2d", columns=200).split())
    assert "on a laptop" in small
    assert "of 16.00 GB on each device" in small
    assert "makes little sense" not in small
    large = " ".join(dry_run("--target", "qwen3-8b", columns=200).split())
    assert "on 1 x H100 80 GB" in large
    assert "makes little sense on this machine: 300 steps of 512 positions" in large


def test_a_capture_is_planned_without_the_target() -> None:
    text = dry_run("--target", "qwen3-8b", "--capture", "features", "--moments", "host", "--capture-format", "int4")
    assert "the embedding alone" in text
    assert "6,239 bytes on disk for each position of the data, 5.25 times smaller" in " ".join(text.split())
    assert "of moments in the host's memory" in " ".join(text.split())
