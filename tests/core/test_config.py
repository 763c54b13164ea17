"""Laws of settings: what is written reads back, what is unknown or wrong is named, flags follow from the schema."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pydantic
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.dataclasses import dataclass
from typer.testing import CliRunner

from specserve.cli.options import cli_parameters, flags_from
from specserve.config import RULES, leaves, resolve, setting, to_yaml
from specserve.errors import ConfigError


@dataclass(frozen=True, config=RULES)
class Model:
    layers: tuple[pydantic.NonNegativeInt, ...] = setting((1, 2), help="tapped layers")
    decay: float = setting(0.0, help="of weights")
    names: tuple[str, ...] = setting((), help="names")
    draft: str = setting("", help="a name")


@dataclass(frozen=True, config=RULES)
class Train:
    lr: float = setting(8e-4, help="peak rate", gt=0, le=1)
    max_steps: int = setting(10, help="how long", ge=0)
    resume: bool = setting(False, help="go on")
    optimizer: Literal["adamw", "muon", "off"] = setting("adamw", help="which")
    model: Model = pydantic.Field(default_factory=Model)


@dataclass(frozen=True, config=RULES)
class Run:
    output: str = setting("ckpt", help="where to")
    level: Literal["low", "high"] = setting("low", help="how much")
    train: Train = pydantic.Field(default_factory=Train)


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    ["none", "null", "1", "~", "yes"]
)
configs = st.builds(
    Run,
    output=texts,
    level=st.sampled_from(["low", "high"]),
    train=st.builds(
        Train,
        lr=st.floats(0, 1, exclude_min=True),
        max_steps=st.integers(0, 2**70),
        resume=st.booleans(),
        optimizer=st.sampled_from(["adamw", "muon", "off"]),
        model=st.builds(
            Model,
            decay=st.floats(allow_nan=False, allow_infinity=False),
            layers=st.lists(st.integers(0, 99), max_size=3).map(tuple),
            names=st.lists(texts, max_size=3).map(tuple),
            draft=texts,
        ),
    ),
)


@settings(max_examples=200, deadline=None)
@given(config=configs)
def test_yaml_reads_back_to_the_same_settings(config, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "run.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert resolve(Run, file=file) == config


def test_later_layers_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("output: from-yaml\ntrain: {lr: 1e-4, max_steps: 1, model: {layers: [3]}}\n")
    assert resolve(Run) == Run()
    run = resolve(
        Run,
        file=file,
        overrides=["train.lr=3e-4", "train.max_steps=2", "train.model.layers=4, 5"],
        flags={"train.max_steps": 3, "train.resume": True, "train.optimizer": None},
    )
    model = Model(layers=(4, 5))
    assert run == Run("from-yaml", "low", Train(lr=3e-4, max_steps=3, resume=True, model=model))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lrr: 1}", "there is no setting train.lrr; did you mean train.lr?"),
        ("train: {max-steps: 1}", "did you mean train.max_steps?"),
        ("lr: 1", "there is no setting lr; did you mean train.lr?"),
        ("zzz: {}", "there is no setting zzz; the settings are output, level, train.lr"),
        ("train: 3", "train is a section"),
        ("train: {lr: 0}", "train.lr must be a number > 0 and <= 1, got '0'"),
        ("train: {lr: .nan}", "train.lr must be a number > 0 and <= 1, got '.nan'"),
        ("train: {model: {decay: .inf}}", "train.model.decay must be a number, got '.inf'"),
        ("train: {model: {layers: '1,b'}}", "train.model.layers must be a list, each an integer >= 0, got '1,b'"),
        ("train: {max_steps: 2.5}", "train.max_steps must be an integer >= 0, got '2.5'"),
        ("train: {max_steps: true}", "train.max_steps must be an integer >= 0, got 'true'"),
        ("train: {resume: 2}", "train.resume must be true or false, got '2'"),
        ("train: {optimizer: sgd}", "train.optimizer must be one of adamw, muon, off, got 'sgd'"),
        ("train: {model: {layers: [1, -1]}}", "layers must be a list, each an integer >= 0, got ['1', '-1']"),
        ("train: {model: {draft: }}", "train.model.draft must be text, got None"),
        ("level: mid", "level must be one of low, high, got 'mid'"),
        ("output: null", "output must be text, got None"),
        ("level: low\nlevel: high", "'level' is set twice"),
        ("- 1", "expected settings as"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_with_what_was_expected(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(Run, file=file, flags={"train.lr": 0.5})  # an overruled bad value is still bad
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_bad_overrides_and_flags_say_where_they_stand():
    for overrides, flags, message in [
        (["train.lr"], {}, "override 'train.lr': expected name=value"),
        (["train=1"], {}, "override 'train=1': train is a section, not a setting; it has train.lr"),
        (["train.lr=fast"], {}, "override 'train.lr=fast': train.lr must be a number > 0 and <= 1, got 'fast'"),
        ([], {"train.lr": 2.0}, "flag --lr: train.lr must be a number > 0 and <= 1, got 2.0"),
        ([], {"train.steps": 2.0}, "there is no setting train.steps; did you mean train.max_steps?"),
    ]:
        with pytest.raises(ConfigError) as caught:
            resolve(Run, overrides=overrides, flags=flags)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read"):
        resolve(Run, file=Path("none.yaml"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a, b]", ("a", "b")),
        ("a,b", ("a", "b")),
        ("a:train[:5%]", ("a:train[:5%]",)),
        ("[a:train[:5%]]", ("a:train[:5%]",)),
        ("", ()),
        ("[]", ()),
    ],
)
def test_brackets_around_a_typed_list_may_be_left_out(text, expected):
    assert resolve(Run, overrides=[f"train.model.names={text}"]).train.model.names == expected


def test_a_setting_without_default_must_be_given():
    @dataclass(frozen=True, config=RULES)
    class Needy:
        target: str = setting(help="which model")

    assert resolve(Needy, flags={"target": "x"}).target == "x"
    with pytest.raises(ConfigError, match=r"^--target \(target\) must be given: which model"):
        resolve(Needy)


def test_command_line_flags_follow_from_the_schema():
    seen = []

    def command(**arguments: object) -> None:
        seen.append(resolve(Run, flags=flags_from(arguments)))

    command.__signature__ = inspect.Signature(cli_parameters(Run))  # type: ignore[attr-defined]
    app = typer.Typer()
    app.command()(command)
    runner = CliRunner()
    line = "--output o --lr 3e-4 --max-steps 7 --resume --optimizer muon --layers 3,4 --draft none"
    for arguments in ("", line, line.replace("--layers 3,4", "--layers 3 --layers 4")):
        result = runner.invoke(app, arguments.split())
        assert result.exit_code == 0, result.output
    model = Model(layers=(3, 4), draft="none")
    given = Run("o", "low", Train(3e-4, 7, True, "muon", model))
    assert seen == [Run(), given, given], "a list's flag may repeat"
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for leaf in leaves(Run):
        assert leaf.flag in shown
        assert leaf.help in shown
    assert "0.0008" in shown
    assert runner.invoke(app, ["--optimizer", "sgd"]).exit_code == 2


def test_faulty_schemas_are_found_when_they_are_first_used():
    @dataclass(frozen=True, config=RULES)
    class Twice:
        lr: float = setting(1.0, help="collides with train.lr")
        train: Train = pydantic.Field(default_factory=Train)

    @dataclass(frozen=True, config=RULES)
    class OutOfBounds:
        lr: float = setting(0.0, help="rate", gt=0)

    with pytest.raises(AssertionError, match="share --lr"):
        cli_parameters(Twice)
    with pytest.raises(pydantic.ValidationError, match="lr"):
        OutOfBounds()


def test_values_of_python_are_of_the_type_itself():
    given = resolve(Run, arguments={"train.lr": 1, "train.max_steps": "7"})
    assert given == Run(train=Train(lr=1.0, max_steps=7))
    for name, value in (("train.max_steps", True), ("train.resume", 1), ("level", None), ("train.max_steps", 2.0)):
        with pytest.raises(ConfigError, match=f"argument: {name} must be .*, got {value}"):
            resolve(Run, arguments={name: value})


def test_a_file_says_words_as_they_are_written(tmp_path):
    """YAML alone would read `off` as False, and 3e-4 as text."""
    file = tmp_path / "run.yaml"
    file.write_text("train: {lr: 3e-4, optimizer: off, resume: on, model: {draft: 007, names: [no, 1.0]}}\n")
    model = Model(draft="007", names=("no", "1.0"))
    assert resolve(Run, file=file) == Run(train=Train(lr=3e-4, optimizer="off", resume=True, model=model))


def test_importing_config_imports_nothing_heavy():
    heavy = ("typer", "jax", "numpy", "rich")
    code = f"import specserve.config, sys; sys.exit(', '.join(m for m in {heavy} if m in sys.modules) or None)"
    subprocess.run([sys.executable, "-c", code], check=True)
