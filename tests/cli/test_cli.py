"""The command line as users type it: it answers at once, and what is wrong is said in one line with the fix."""

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax.sharding import Mesh

from specserve import host
from specserve.cli import serve, train
from specserve.cli.lazy import LazyGroup
from specserve.cli.main import BenchCommands, DataCommands, PlanCommands, Root, main
from specserve.cli.options import show_error
from specserve.errors import CheckpointError, ConfigError, DataError
from specserve.serve import engines
from specserve.serve.launch import Models
from specserve.train.run.folder import SETTINGS_FILE
from specserve.train.settings import TrainRun
from specserve.train.trainer import Doing, Progress


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specserve.cli.main", *arguments],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is wrong with a command line: what the command says on stderr, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(host, "is_compiling", lambda: False)  # else it would end this process
    monkeypatch.setattr(serve, "bind_listener", lambda _host, _port: None)  # the end of a process gives it back

    def say(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["specserve", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        return capsys.readouterr().err

    return say


HEAVY = ["jax", "numpy", "transformers"]


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], [*HEAVY, "pydantic", "yaml"]),
        (["data", "--help"], [*HEAVY, "specserve.config"]),
        (["train", "--help"], HEAVY),
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str], unneeded: list[str]) -> None:
    code = (
        "import sys; from specserve.cli.main import app; app(sys.argv[2:], standalone_mode=False); "
        "sys.exit(', '.join(m for m in sys.argv[1].split() if m in sys.modules) or None)"
    )
    subprocess.run([sys.executable, "-c", code, " ".join(unneeded), *arguments], check=True)


@pytest.mark.slow  # seconds of imports
def test_serving_imports_nothing_that_it_does_not_need() -> None:
    """Each takes tens of megabytes for as long as a server lives."""
    unneeded = ["datasets", "pyarrow", "pandas", "torch", "optax", "orbax", "gguf", "ray", "httpx", "openai"]
    code = (
        "import sys, specserve.cli.serve; from specserve.tokenizer import Tokenizer; "
        "from specserve.checkpoints.source import BUNDLED_FOLDER; Tokenizer.load(BUNDLED_FOLDER); "
        "sys.exit(', '.join(m for m in sys.argv[1].split() if m in sys.modules) or None)"
    )
    subprocess.run([sys.executable, "-c", code, " ".join(unneeded)], check=True)


def test_the_options_of_train_that_people_use_first_come_first() -> None:
    command = Root.lazy["train"].load("train")
    first = [option.opts[0] for option in command.params if not option.rich_help_panel]
    expected = "--target --source --regenerate --output --budget --max-steps --mesh --resume --dry-run --config"
    assert first[:10] == expected.split()


@pytest.mark.parametrize("group", [Root, BenchCommands, PlanCommands, DataCommands])
def test_every_command_is_where_the_table_says(group: type[LazyGroup]) -> None:
    for name, lazy in group.lazy.items():
        assert lazy.load(name).name == name
        module, _, function = lazy.body.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "--set", "train.leraning_rate=1"), "train.leraning_rate"),
        (("train", "--lr", "-1"), "train.lr"),
        (("train", "--target", "qwen3-8x"), "qwen3-8b"),
        (("serve", "--draft", "./nowhere"), "specserve train"),
        (("serve", "--speculation", "chain:0"), "chain:0"),
        (("eval", "--bench", "missing.jsonl"), "missing.jsonl"),
        (("plan", "serve"), "--devices (devices) must be given: kind and number of chips"),
        (("chat", "--url", "http://localhost:1", "--speculation", "off"), "--speculation, or --url"),
        (("serve", "--speculation", "tuned"), "speculation 'tuned' is not understood; expected off; chain:K"),
    ],
)
def test_wrong_input_is_one_line_that_names_the_fix(
    say: Callable[..., str], arguments: tuple[str, ...], expected: str
) -> None:
    said = say(*arguments)
    assert said.startswith("error: ")
    assert expected in said
    assert "Traceback" not in said


def test_brackets_in_a_path_or_an_advice_are_said_as_they_are(say: Callable[..., str]) -> None:
    """They are no markup of the terminal's."""
    said = say("train", "--output", "out[/y]", "--resume")
    assert said.startswith("error:")
    assert "out[/y]" in said


def test_the_advice_to_install_an_extra_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(ConfigError("not installed; pip install 'specserve[wandb]'"))
    assert capsys.readouterr().err == "error: not installed; pip install 'specserve[wandb]'\n"


def test_the_command_that_goes_on_with_a_run_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one line however narrow the output, and whatever the folder is called."""
    last = Progress(7, 1.0, 0.5, 0, ending="stopped by SIGTERM")
    stopped = SimpleNamespace(train=lambda _observers: last, doing=Doing("step 7"))
    monkeypatch.setattr(train, "prepare", lambda *_: stopped)
    monkeypatch.setattr(train, "_read", lambda _target, _data: ())
    monkeypatch.setenv("COLUMNS", "40")
    output = tmp_path / "a [b] folder"
    train._train(TrainRun(output=str(output)))
    command = capsys.readouterr().out.splitlines()[-1].partition("go on with ")[2]
    assert shlex.split(command) == ["specserve", "train", "--config", str(output / SETTINGS_FILE), "--resume"]


def test_the_plan_comes_before_any_download(
    say: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ""

    def resolve(name: str, **_: bool) -> None:
        nonlocal said
        said += " ".join(capsys.readouterr().out.split())
        for words in ("The plan", "conversations of perfectblend", "for the target's download", "expected tau"):
            assert words in said
        raise CheckpointError(f"no {name} here")

    monkeypatch.setattr(train, "resolve_target", resolve)
    assert say("train", "--target", "qwen3-8b") == "error: no qwen3-8b here\n"


def test_a_bench_that_comes_with_the_target_may_be_missing_and_a_named_one_may_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(bench: str, _limit: int) -> None:
        raise DataError(f"{bench} is not there")

    monkeypatch.setattr(train, "load_questions", load)
    assert not train._is_there("mt-bench", "")
    assert "will not be measured on mt-bench: mt-bench is not there" in caplog.text
    with pytest.raises(DataError, match=r"my\.jsonl is not there"):
        train._is_there("my.jsonl", "")
    assert not train._is_there("my.jsonl", "adapter"), "only a server has an adapter beside its target"
    assert "will not be measured on my.jsonl: a server with --lora" in caplog.text


def test_the_head_is_measured_with_the_target_as_it_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quantization, and the parts of the mesh that cut the weights: on one device they may not fit."""
    loaded: list[tuple[object, ...]] = []

    def load_models(target: str, draft: str, *, quantization: str, mesh: Mesh | None, **_others: object) -> Models:
        loaded.append((target, draft, quantization, mesh and {axis: n for axis, n in mesh.shape.items() if n > 1}))
        raise ConfigError("enough")

    monkeypatch.setattr(engines, "load_models", load_models)
    run = TrainRun(target="t", output="o", quantization="int8", mesh="data=2,sequence=2,tensor=2")
    for each in (run, replace(run, mesh="data=4"), replace(run, coordinator="auto")):
        train._measure(each, "pydoc")
    assert loaded == [("t", "o", "int8", {"tensor": 2}), ("t", "o", "int8", None), ("t", "o", "int8", None)]


def test_unreachable_hub_names_the_folder_for_the_weights(tmp_path: Path) -> None:
    done = run("train", "--target", "qwen3-8b", cwd=tmp_path, HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 2
    warning, error = done.stderr.splitlines()
    assert "the target asks its own questions" in warning
    assert error.startswith("error: ")
    assert "Qwen/Qwen3-8B" in done.stderr
    assert "--target models/Qwen3-8B" in done.stderr
    assert "Traceback" not in done.stderr
