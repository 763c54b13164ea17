"""What cannot be is refused before anything is loaded or written, by a run and by its dry run in the same words."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_run

from specserve.checkpoints.load import Target
from specserve.checkpoints.source import BUNDLED, BUNDLED_FOLDER
from specserve.data import pydoc, sources
from specserve.errors import ConfigError
from specserve.plan.training import make_plan
from specserve.tokenizer import Tokenizer
from specserve.train.run.folder import RunFolder
from specserve.train.run.prepare import load_data, load_mixture, prepare
from specserve.train.settings import CaptureSettings, DataSettings, DraftSettings, EvalSettings

MEASURED = {"patience": 2, "eval_every": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, r"max_steps and train\.max_minutes are both 0"),
        ({"accumulate": 3}, r"train\.batch_size is 4, which train\.accumulate 3 does not divide"),
        ({"mesh": "data=3"}, r"train\.batch_size / train\.accumulate is 4, no multiple of --mesh data=3"),
        ({"mesh": "data=4", "accumulate": 2}, r"train\.accumulate is 2, no multiple of --mesh data=4"),
        (
            {"mesh": "data=2,expert=4"},
            r"train\.batch_size / train\.accumulate is 4, no multiple of --mesh data=2 x expert=4; change one",
        ),
        ({"mesh": "expert=3"}, r"train\.accumulate is 4, no multiple of --mesh expert=3; change one"),
        ({"mesh": "sequence=5"}, r"train\.seq_len is 32, no multiple of --mesh sequence=5"),
        ({"budget": "soon"}, r"expected a time such as 2h"),
        ({"budget": "2h", "features": CaptureSettings(capture="there")}, r"with --capture give --max-steps"),
        ({"budget": "2h", "coordinator": "host:1"}, r"specserve data regenerate"),
        ({"data": DataSettings(regenerate=True), "coordinator": "host:1"}, r"specserve data regenerate"),
        ({"mesh": "rows=2"}, r"--mesh rows=2: got 'rows=2', expected data=N"),
        ({"patience": 2}, r"train\.patience is 2, but.* --eval-every"),
        (MEASURED | {"data": DataSettings(eval_prompts=0)}, r"train\.patience is 2, but.* --eval-prompts"),
        (MEASURED | {"features": CaptureSettings("features")}, r"train\.patience is 2, but.* --patience 0"),
        ({"eval": EvalSettings(speculation=("chains:3",))}, r"chains:3"),
        ({"eval": EvalSettings(temperature=())}, r"eval\.temperature need at least one value"),
        ({"data": DataSettings(columns=("foo=bar",))}, r"data\.columns: 'foo=bar'"),
        ({"data": DataSettings(source=("gsm8k=0",))}, r"data\.source: 'gsm8k=0'"),
        ({"data": DataSettings(template_kwargs=("thinking",))}, r"data\.template_kwargs"),
    ],
)
def test_settings_that_nothing_could_mend(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = tiny_run(tmp_path / "run", **changes)
    with pytest.raises(ConfigError, match=message):
        RunFolder(run)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=message):
        make_plan(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 513}, r"train\.seq_len is 513.*positions of the target, 512; lower --seq-len"),
        ({"weighting": "d-pace"}, r"train\.weighting is d-pace.* blocks.*eagle3 does not; give --weighting decay"),
        ({"anchors": 4}, r"train\.anchors is 4,.*eagle3 does not; give --anchors 0, or another --drafter"),
        ({"anchors": 4, "drafter": "p-eagle"}, r"train\.anchors is 4,.*p-eagle does not"),
        ({"anchors": 33, "drafter": "dflash"}, r"train\.anchors is 33, more than the 32 positions"),
        ({"draft": DraftSettings(vocab_size=65)}, r"draft\.vocab_size is 65, the target has 64 tokens; lower --vocab"),
    ],
)
def test_more_than_the_target_has(tmp_path: Path, tiny_target: Target, changes: dict[str, Any], message: str) -> None:
    run = tiny_run(tmp_path, target=str(tiny_target.folder), **changes)
    with pytest.raises(ConfigError, match=message):
        make_plan(run)
    with RunFolder(run) as folder, pytest.raises(ConfigError, match=message):
        prepare(run, folder)


def test_patience_needs_a_question_that_can_be_asked(tmp_path: Path, pydoc_tokenizer: Tokenizer) -> None:
    """Plain documents ask none. That shows only in the data; patience could then never end the run."""
    source = tmp_path / "plain.jsonl"
    source.write_text("".join(json.dumps({"text": f"plain words {number}"}) + "\n" for number in range(200)))
    run = tiny_run(tmp_path, target=str(tmp_path), data=DataSettings((str(source),), workers=1), **MEASURED)
    mixture = load_mixture(run.target, run.data, 8192)
    with pytest.raises(ConfigError, match=r"no held-out question of at most 32 tokens.*--patience 0"):
        load_data(run.target, run.data, run.train, mixture, pydoc_tokenizer, BUNDLED_FOLDER, 8192)


def test_a_process_that_cannot_be_one_of_them() -> None:
    """The run itself gets the error when it joins the others."""
    with pytest.raises(ConfigError, match="need a coordinator"):
        make_plan(tiny_run(Path("run"), process_id=3))


def test_pydoc_for_another_target_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line; the bundled target's own data is none."""
    monkeypatch.setattr(sources, "load_mixture", lambda *_args, **_options: ())
    monkeypatch.setattr(pydoc, "build", lambda _split: ())
    cases = (("qwen3-8b", "pydoc=2", True), ("qwen3-8b", "a.jsonl", False), (BUNDLED, "pydoc", False))
    for target, source, is_warned in cases:
        caplog.clear()
        load_mixture(target, DataSettings((source,)), 64)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * is_warned, (target, source)
        assert "data for the bundled target: a head for qwen3-8b" in caplog.text or not is_warned
