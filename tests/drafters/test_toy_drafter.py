"""A drafter is added by an option: the tutorial's own code is trained, served, saved and loaded, and nothing else in
the package names a kind."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy_drafter
from engines import Ask, Fixed, compile_programs, greedy, make_engine, make_runner, run, serving
from tiny_run import metrics, tiny_trainer

import specserve
from specserve import config
from specserve.checkpoints.load import Target
from specserve.drafters import registry
from specserve.drafters.interface import Head
from specserve.drafters.registry import KINDS, DraftSettings
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.eval.settings import BenchRun, EvalRun
from specserve.interop import doctor
from specserve.interop.head import load_head, save_head
from specserve.serve.programs.program_cache import _surroundings
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun
from specserve.train.head import new_drafter
from specserve.train.settings import TrainRun

ROOT = Path(__file__).parents[2]
PACKAGE = Path(specserve.__file__).parent
PLACE = "toy_drafter:TOY"


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    kinds, names = dict(KINDS), list(registry._NAMES)
    yield
    for added in KINDS.keys() - kinds.keys():
        del KINDS[added]
    registry._NAMES[:] = names


@pytest.fixture
def _registered() -> None:
    """The options of the tutorial were given."""
    registry.add_module(PLACE)


def test_the_tutorial_has_the_code_that_is_tested() -> None:
    page = (ROOT / "docs" / "add-a-drafter.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert code == Path(toy_drafter.__file__).read_text()
    assert len(code.splitlines()) <= 100
    assert f"--drafter-module {PLACE} --drafter toy" in page


@pytest.mark.usefixtures("_registered")
def test_a_toy_is_trained_and_served_and_kept(tmp_path: Path, shallow_target: Target) -> None:
    """Speculation of a kind that nobody else knows changes no token, and what is saved is what is loaded."""
    target_ids = np.arange(8, 56, dtype=np.int32)
    drafter = new_drafter("toy", DraftSettings(), shallow_target.config, len(target_ids))
    first = Head(drafter, drafter.init_params(shallow_target, target_ids, seed=0), target_ids)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a Python float to an int32 power
        tiny_trainer(tmp_path, shallow_target, head=first).train()
    losses = [row["loss"] for row in metrics(tmp_path) if "loss" in row]
    assert losses[-1] < losses[0]

    head = load_head(tmp_path, shallow_target, dtype="float32")
    save_head(tmp_path / "again", head, shallow_target, dtype="float32", notes={})
    again = load_head(tmp_path / "again", shallow_target, dtype="float32")
    assert head.drafter == again.drafter == drafter
    assert all(map(np.array_equal, jax.tree.leaves(head.params), jax.tree.leaves(again.params)))
    assert doctor.examine(tmp_path / "again", shallow_target).findings == []

    asks = [Ask([3 + n, 5, 9], greedy(20)) for n in range(3)]
    asks += [Ask([7, n], SamplingParams(max_tokens=20, temperature=2.0, seed=n)) for n in range(2)]
    answers, ways = {}, ("off", "chain:3", "tree:3x2x6")
    runner = make_runner(shallow_target, head, *ways)
    compile_programs(runner)
    for speculation in ways:
        with serving(make_engine(runner, Fixed(parse_speculation(speculation)))) as engine:
            inboxes = run(engine, asks)
            answers[speculation] = [inbox.token_ids for inbox in inboxes]
            accepted = sum(inbox.deltas[-1].stats.num_accepted for inbox in inboxes)
            assert (accepted > 0) == (speculation != "off")
    assert answers["off"] == answers["chain:3"] == answers["tree:3x2x6"]


MAY_NAME = {"drafters/registry.py", "interop/formats.py"}
FAMILY = {"eagle3": {"eagle3", "peagle"}}  # P-EAGLE is made of an EAGLE-3 network


@pytest.mark.parametrize("room", ["eagle3", "peagle", "mtp", "dflash", "language_model"])
def test_a_kind_is_named_in_its_folders_and_two_lines(room: str) -> None:
    """What imports from a kind's folder is its folder, its files in `interop`, the registry and the table of files."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE)
        if name.parts[1:2] and name.parts[1] in FAMILY.get(room, {room}) and name.parts[0] in ("drafters", "interop"):
            continue
        if re.search(rf"specserve\.(drafters|interop)\.{room}\b", path.read_text()):
            found.add(name.as_posix())
    assert found <= MAY_NAME
    assert "drafters/registry.py" in found


def test_a_toy_is_named_nowhere() -> None:
    assert not [path for path in PACKAGE.rglob("*.py") if re.search(r"\btoy", path.read_text())]


@pytest.mark.parametrize("schema", [TrainRun, ServeRun, EvalRun, BenchRun])
def test_a_module_is_an_option_of_every_command_that_has_heads(schema: type, tmp_path: Path) -> None:
    """It is imported before any other setting is read, wherever it stands."""
    file = tmp_path / "run.yaml"
    file.write_text("drafter: toy\n" * (schema is TrainRun) + f"drafter_module: {PLACE}\n")
    needed = {"bench": "pydoc"} if schema is BenchRun else {}
    run: Any = config.resolve(schema, file=file, flags=needed)
    assert run.drafter_module == PLACE
    assert registry.load_kind("toy") is toy_drafter.TOY


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nobody.has_this", "cannot be imported .*No module named 'nobody'.*; is its folder on PYTHONPATH"),
        ("toy_drafter:TAY", r"toy_drafter\.py has no TAY"),
        ("toy_drafter:Toy", "toy_drafter:Toy is no drafters.interface.Kind"),
        ("toy_drafter", "registers nothing; call drafters.registry.register there, or name a Kind of it"),
        ("taken:TOY", "its drafters are named 'mtp', as those of specserve.drafters.mtp.drafter:MTP; rename them"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = Path(toy_drafter.__file__).read_text().replace('name = "toy"', 'name = "mtp"')
    (tmp_path / "taken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=said):
        config.resolve(ServeRun, flags={"drafter_module": place})


def test_kept_programs_are_those_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that registers itself, and one that it imports: what either says is in the name of every program."""
    folder = tmp_path / "of_another"
    folder.mkdir()
    code = Path(toy_drafter.__file__).read_text().replace('name = "toy"', 'name = "other"')
    (folder / "network.py").write_text(code)
    (folder / "__init__.py").write_text(
        "from of_another.network import TOY\nfrom specserve.drafters.registry import register\n"
        'register(TOY, "of_another.network:TOY")\n'
    )
    before = _surroundings()
    monkeypatch.syspath_prepend(tmp_path)
    registry.add_module("of_another")
    first = _surroundings()
    assert first != before
    assert first == _surroundings()
    for name in ("network.py", "__init__.py"):
        (folder / name).write_text((folder / name).read_text() + "# changed\n")
        assert _surroundings() != first
        first = _surroundings()
