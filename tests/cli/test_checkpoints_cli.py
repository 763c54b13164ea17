"""`specserve export`, `import` and `inspect` as they are typed: what they write serves, what they say fits a terminal,
and their exit status says whether something is wrong."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from specserve.checkpoints.source import BUNDLED_FOLDER, BUNDLED_HEADS
from specserve.cli.main import app
from specserve.errors import CheckpointError, ConfigError, SpecServeError

BUNDLED_EAGLE3 = BUNDLED_HEADS["pydoc-eagle3"]  # every engine's layout can hold it
BITS = np.dtype(ml_dtypes.bfloat16)  # safetensors finds it once it is registered


def run(*arguments: object, columns: int = 80) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": str(columns)})


def refused(*arguments: object) -> SpecServeError:
    error = run(*arguments).exception
    assert isinstance(error, SpecServeError)
    return error


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    """The shipped head with two defects that can be repaired."""
    folder = tmp_path / "sick"
    shutil.copytree(BUNDLED_EAGLE3, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 2048}))
    return folder


@pytest.mark.parametrize("flavour", ["sglang", "vllm", "speculators", "sglang-jax"])
def test_the_shipped_head_goes_out_and_comes_back(tmp_path: Path, flavour: str) -> None:
    """Nothing but the two folders is needed: the head's notes know its target, there and back."""
    out = run("export", BUNDLED_EAGLE3, "--to", flavour, "--output", tmp_path / "out")
    assert out.exit_code == 0, out.output
    assert ("sglang-jax does not compute fc_norm" in out.output) == (flavour == "sglang-jax")
    assert run("inspect", tmp_path / "out").exit_code == 0
    back = run("import", tmp_path / "out", "--output", tmp_path / "back")
    assert back.exit_code == 0, back.output
    assert f"specserve serve --draft {tmp_path / 'back'}" in back.output.replace("\n", "")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (BUNDLED_EAGLE3, tmp_path / "back")]
    assert configs[0] == configs[1]
    ours, theirs = load_file(BUNDLED_EAGLE3 / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        np.testing.assert_array_equal(value.view(np.uint8), theirs[name].view(np.uint8))


def test_a_head_goes_out_stretched_for_longer_texts(tmp_path: Path) -> None:
    """By YaRN, in the keys of Model-Optimizer; once, with both sizes, and no head that is the target's own layer."""
    ways = "--rope-factor", "8", "--rope-length", "512"
    out = run("export", BUNDLED_EAGLE3, "--to", "vllm", "--output", tmp_path / "out", *ways)
    assert out.exit_code == 0, out.output
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    assert expected.items() <= raw["rope_scaling"].items()
    assert expected.items() <= raw["rope_parameters"].items()
    for folder, given, words in (
        (tmp_path / "out", ways, "turns by yarn already"),
        (BUNDLED_HEADS["pydoc-mtp"], ways, "has the rotary settings of its target"),
        (BUNDLED_EAGLE3, ways[:2], "--rope-factor and --rope-length go together"),
    ):
        assert words in str(refused("export", folder, "--to", "vllm", "--output", tmp_path / "other", *given))


def test_a_sick_head_is_reported_and_repaired(sick: Path, tmp_path: Path) -> None:
    report = json.loads(run("inspect", sick, "--json").stdout)
    assert [finding["code"] for finding in report["findings"]] == ["absolute-d2t", "max-positions"]
    assert run("inspect", sick).exit_code == 1
    fixed = run("inspect", sick, "--fix", tmp_path / "repaired")
    assert fixed.exit_code == 0, fixed.output
    assert fixed.output.count("changed") == 2
    assert run("inspect", tmp_path / "repaired", "--json").exit_code == 0
    repaired, healthy = tmp_path / "repaired" / "model.safetensors", BUNDLED_EAGLE3 / "model.safetensors"
    np.testing.assert_array_equal(load_file(repaired)["d2t"], load_file(healthy)["d2t"])
    again = run("inspect", sick, "--fix", tmp_path / "repaired")
    assert isinstance(again.exception, CheckpointError), "a folder with files in it is not overwritten"


@pytest.mark.parametrize("columns", [80, 120])
def test_nothing_is_wider_than_the_terminal(sick: Path, tmp_path: Path, columns: int) -> None:
    text = run("inspect", sick, "--fix", tmp_path / "repaired", columns=columns).output
    assert max(map(len, text.splitlines())) <= columns
    for word in ("midlayer.post_attention_layernorm.weight", "768 x 512", "absolute-d2t", "--fix does", "2 errors"):
        assert word in text


def test_brackets_in_a_folder_are_shown_as_they_are(sick: Path, tmp_path: Path) -> None:
    sick = sick.rename(tmp_path / "sick[bold]")
    out = tmp_path / "x[" / "y]"  # "[/y]" closes what nobody opened
    for done, folder in (
        (run("inspect", sick, "--fix", out, columns=500), out),
        (run("import", sick, "--output", out, "--force"), out),
        (run("export", out, "--to", "vllm", "--output", sick / "[/z]"), sick / "[/z]"),
    ):
        assert done.exit_code == 0, done.output
        assert str(folder) in done.output


def test_a_target_that_is_not_here_goes_unchecked_and_that_is_said(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(BUNDLED_EAGLE3, head)
    notes = json.loads((head / "specserve.json").read_text())
    (head / "specserve.json").write_text(json.dumps(notes | {"target": "/gone/target"}))
    done = run("inspect", head, columns=200)
    assert done.exit_code == 0, done.output
    assert "its target, /gone/target, cannot be read here (--target)" in done.output
    assert "/gone/target" in json.loads(run("inspect", head, "--json").stdout)["unchecked"]
    assert "/gone/target" in str(refused("inspect", head, "--target", "/gone/target"))


@pytest.mark.parametrize("brings_embedding", [False, True])
def test_of_a_target_on_the_hub_the_weights_are_fetched_for_its_embedding_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brings_embedding: bool
) -> None:
    asked: list[bool] = []

    def fetch(_hub_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        kept = filter_repo_objects(
            ["model.safetensors"], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        asked.append(any(kept))
        return str(BUNDLED_FOLDER)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    head = BUNDLED_EAGLE3
    if brings_embedding:
        head = tmp_path / "head"
        run("export", BUNDLED_EAGLE3, "--to", "speculators", "--output", head)
    for arguments, is_needed in (
        (("inspect", head), False),
        (("export", head, "--to", "vllm", "--output", tmp_path / "vllm"), False),
        (("export", head, "--to", "speculators", "--output", tmp_path / "speculators"), not brings_embedding),
        (("import", head, "--output", tmp_path / "back"), brings_embedding),
    ):
        asked.clear()
        done = run(*arguments, "--target", "owner/name")
        assert (done.exit_code, asked) == (0, [is_needed]), done.output


def test_what_is_missing_is_named_with_the_way_out(sick: Path, tmp_path: Path) -> None:
    (sick / "specserve.json").unlink()
    error = refused("import", sick, "--output", tmp_path / "out")
    assert isinstance(error, ConfigError)
    assert "--target" in str(error)
    assert "no such folder" in str(refused("inspect", tmp_path / "nowhere"))
    for flags, said in ((("--limit", 3), "--prompts"), (("--max-tokens", 9), "--prompts"), (("--force",), "--fix")):
        assert f"{flags[0]} is for" in str(refused("inspect", sick, *flags))
        assert f"give {said} with it" in str(refused("inspect", sick, *flags))
    unchecked = run("inspect", sick)
    assert unchecked.exit_code == 1
    assert "no target given (--target)" in unchecked.output
    assert run("inspect", sick, "--target", "pydoc").output.count("error ") == 2
    (sick / "model.safetensors").rename(sick / "pytorch_model.bin")
    assert "weights_only=True" in str(refused("import", sick, "--target", "pydoc")), "no pickle is opened here"


def test_a_head_that_cannot_be_loaded_is_not_run_and_that_is_said(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(BUNDLED_EAGLE3, head)
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"fc.weight": np.zeros_like(tensors["fc.weight"])}, head / "model.safetensors")
    done = run("inspect", head, "--prompts", "pydoc", "--limit", 1, "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert [finding["code"] for finding in report["findings"]] == ["all-zero"]
    assert "nothing but zeros: fc.weight" in report["running"]["error"]
    (head / "specserve.json").unlink()
    assert "give it with --target to run it" in str(refused("inspect", head, "--prompts", "pydoc"))


@pytest.mark.slow
def test_the_shipped_head_keeps_what_its_notes_promise() -> None:
    done = run("inspect", BUNDLED_EAGLE3, "--prompts", "pydoc", "--limit", 4, "--max-tokens", 24, "--json")
    assert done.exit_code == 0, done.output
    running = json.loads(done.stdout)["running"]
    assert running["tau"] > 2
    assert (running["speculation"], running["repairs_tried"]) == ("chain:3", 0)


def test_verify_refuses_what_there_is_nothing_to_prove_of() -> None:
    assert "--speculation off: everything is compared with it" in str(refused("verify", "--speculation", "off"))


def test_a_bundled_head_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("inspect", "pydoc-mtp", "--json").exit_code == 0
    assert run("export", "pydoc-eagle3", "--to", "vllm").exit_code == 0
    assert (tmp_path / "pydoc-eagle3-vllm" / "model.safetensors").is_file(), "not beside the bundled one"
    assert "pydoc-eagle3" in str(refused("inspect", "pydoc-eagle33"))
