"""benchmarks/drafters.py: what it makes of reports that are made up, and which report it takes for which question."""

import argparse
import json
from pathlib import Path

import drafters
import numpy as np
import pytest
from drafters import CHAIN, DEFAULTS, TREE, Arm, Row, best_of, report_file, row_of, table, train_all
from safetensors.numpy import save_file
from side_by_side import BenchmarkError


def _report(seed: int) -> dict[str, object]:
    cells = [(way, heat, 2.0 + seed + heat / 2) for way in (CHAIN, TREE) for heat in (0.0, 1.0)]
    return {
        "reports": [{"speculation": way, "temperature": heat, "tau": tau} for way, heat, tau in cells],
        "steps": {CHAIN: {"draft_ms": 4.0 + seed}},
    }


def _gains() -> dict[str, object]:
    cells = [(1, 1.5, 90.4), (4, 1.25, 250.0)]
    keys = "speculation", "temperature", "concurrency", "gain", "tokens_per_second"
    return {"reports": [dict(zip(keys, ("auto", 0.0, *cell), strict=True)) for cell in cells], "steps": {}}


def test_rows_and_table(tmp_path: Path) -> None:
    """Means, least and most over seeds; numbers in float tensors; a pace that one slow line does not move."""
    arms = [Arm("dflash", seed, tmp_path / f"dflash-{seed}") for seed in (0, 1)]
    arms[0].folder.mkdir()
    tensors = {"fc": np.zeros((1000, 1200), np.float32), "d2t": np.zeros(9, np.int64)}
    save_file(tensors, arms[0].folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "dflash-pace").mkdir()
    lines = [{"step": 1}, *({"tokens_per_second": pace} for pace in (1500.0, 3.0, 1600.0))]
    (tmp_path / "dflash-pace" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (arms[0].folder / "specserve.json").write_text('{"steps": 60}')
    row = row_of("dflash", arms, [_report(0), _gains(), _report(1)])
    assert (row.parameters, row.steps, row.tokens_per_second, row.draft_ms) == (1_200_000, 60, 1500.0, 4.5)
    assert row.taus[CHAIN, 0.0] == (2.5, 2.0, 3.0)
    assert row.gains == {1: (1.5, 90.4), 4: (1.25, 250.0)}
    titles, _, line = table([row], [1, 4, 16]).splitlines()
    assert titles.count("|") == line.count("|")
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:5] == ["dflash", "1.2M", "60", "1,500", "4.5"]
    assert cells[5:9] == ["2.50 (2.00-3.00)", "3.00 (2.50-3.50)"] * 2
    assert cells[9:] == ["90, 1.50x", "250, 1.25x", "-"]


def test_heads_of_other_steps_are_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table compares heads of equal time, and shows the steps that each head has had."""
    asked: list[Path] = []

    def train(_options: object, _kind: str, folder: Path, *, max_steps: int, **_flags: int) -> None:
        asked.append(folder)
        folder.mkdir()
        (folder / "specserve.json").write_text(json.dumps({"steps": max_steps}))

    monkeypatch.setattr(drafters, "train", train)
    options = argparse.Namespace(output=tmp_path, seeds=2, kinds=["mtp", "dflash"])
    arms = train_all(options, {"mtp": 9, "dflash": 7})
    assert asked == [arm.folder for arm in arms]
    assert train_all(options, {"mtp": 9, "dflash": 7}) == arms
    (tmp_path / "mtp-0" / "specserve.json").unlink()
    with pytest.raises(BenchmarkError, match="dflash-0 was trained for 7 steps, and --minutes asks for 14 of dflash"):
        train_all(options, {"mtp": 9, "dflash": 14})
    assert len(asked) == 4, "nothing is trained, or trained again"


def test_a_report_is_of_what_is_asked(tmp_path: Path) -> None:
    """The names of what is measured by default stay as they are; anything else has a name of its own."""
    arm = Arm("p-eagle", 1, tmp_path / "p-eagle-1")

    def name(report: str, **asked: object) -> str:
        return report_file(argparse.Namespace(**DEFAULTS | asked), arm, report).name

    assert name("taus") == "p-eagle-1-taus.json"
    assert name("gains") == "p-eagle-1-gains.json"
    assert name("taus", bench="mt-bench") == "p-eagle-1-bench-mt-bench-taus.json"
    assert name("taus", clients=[2]) == name("taus"), "of which it does not depend"
    asked = [{}, {"bench": "mt-bench"}, {"limit": 80}, {"bench": "mt-bench", "limit": 80}, {"max_tokens": 8}]
    asked += [{"clients": [2]}, {"bench": "/q/a.jsonl"}, {"bench": "b.jsonl"}]
    names = [name("gains", **each) for each in asked]
    assert len(set(names)) == len(names)
    assert not any("/" in each or " " in each for each in names)


def test_the_best_two_are_named() -> None:
    """By the tree, greedy: what another way accepts does not count."""
    taus = {"a": (2.0, 9.0), "b": (3.0, 1.0), "c": (2.5, 2.0)}
    rows = [
        Row(kind, 1, 1, 1.0, 1.0, {(TREE, 0.0): (tree, tree, tree), (CHAIN, 0.0): (chain, chain, chain)}, {})
        for kind, (tree, chain) in taus.items()
    ]
    assert best_of(rows) == ["b", "c"]
