"""A drafter is added by a folder and a line: the tutorial's own code is trained, served, saved and loaded, and nothing
else in the package names a kind."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_drafter
from engines import Ask, Fixed, compile_programs, greedy, make_engine, make_runner, run, serving
from tiny_run import metrics, tiny_trainer

import specserve
from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.registry import KINDS, DraftSettings, KindEntry
from specserve.drafters.speculation import parse_speculation
from specserve.interop import doctor
from specserve.interop.head import load_head, save_head
from specserve.serve.requests.request import SamplingParams
from specserve.train.head import new_drafter

ROOT = Path(__file__).parents[2]
PACKAGE = Path(specserve.__file__).parent
LINE = '    "toy": KindEntry("toy_drafter:TOY"),\n'


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the tutorial stands in the registry."""
    monkeypatch.setitem(KINDS, "toy", eval(LINE.partition(":")[2].strip().rstrip(","), {"KindEntry": KindEntry}))


def test_the_tutorial_has_the_code_that_is_tested() -> None:
    page = (ROOT / "docs" / "add-a-drafter.md").read_text()
    blocks = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)
    assert "".join(blocks) == Path(toy_drafter.__file__).read_text() + LINE.strip().rstrip(",") + ",\n"
    assert len(blocks[0].splitlines()) <= 100


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


def test_a_toy_is_named_by_its_line_alone() -> None:
    assert not [path for path in PACKAGE.rglob("*.py") if re.search(r"\btoy", path.read_text())]
    assert LINE.count("\n") == 1
