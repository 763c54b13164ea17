"""The report: what it says, that it needs nobody, and that users' data stays text in it."""

import dataclasses
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specserve import config
from specserve.data.conversations import Conversation, Message
from specserve.data.dataset import SourceTokens, build
from specserve.data.documents import Document, TokenizedDocuments
from specserve.data.sources import SourceRows
from specserve.train.run import page as pages
from specserve.train.run.page import line_chart, nice, number
from specserve.train.run.report import RunReport, duration, render, summarize
from specserve.train.settings import EvalSettings, TrainRun, TrainSettings

HOSTILE = "<script>alert('x')</script>\"&{{ 7*7 }}"
VOID = {"meta"}


class Page(HTMLParser):
    """Text and tags of a page, whose tags must match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes another tag, line {self.getpos()[0]}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def _found(tau: float, steps: int = 100) -> dict[str, Any]:
    return {"tau": tau, "accept_rate": [0.625, 0.4375, 0.3125], "steps": steps}


def _measurement(step: int, tau: float, is_last: bool = False) -> dict[str, Any]:
    arms = {"chain:3 T=0": {**_found(tau), "by_source": {"pydoc": _found(tau + 0.111), HOSTILE: _found(1.234)}}}
    if is_last:
        arms["tree:3x3x8 T=0.8"] = {**_found(2.718), "by_source": {}}
    row = {"step": step, "seconds": step / 2, "tokens": step * 1000, "loss": None, "tau": tau, "skipped_prompts": 3}
    return row | {"accept_rate": [0.5], "arms": arms} | ({"is_last": True} if is_last else {})


def _step(step: int) -> dict[str, Any]:
    speed = {"tokens_per_second": 4321.0, "positions_per_second": 5000.0, "mfu": 0.42, "device_bytes": None}
    return {
        "step": step,
        "seconds": step / 2,
        "tokens": step * 1000,
        "loss": 9.0 / step,
        "tau": None,
        "rollout_loss": [9.0 / step, 10.0 / step],
        "rollout_accuracy": [0.5, 0.25],
        "rollout_acceptance": [0.5, 0.25],
        "gradient_norm": 1.0,
        "learning_rate": 1e-3,
        **(speed | {"host_bytes": 3_210_000_000} if step > 1 else {}),
    }


def _taus(steps: list[int]) -> list[float]:
    return [2.5 - 1.2 * (step / 10) ** -0.5 for step in steps]


@pytest.fixture(scope="module")
def data_summary() -> dict[str, Any]:
    def source(name: str, weight: float, tokens: list[int], count: int) -> SourceTokens:
        documents = [Document(np.array([1, *tokens], np.int32), np.array([False] + [True] * len(tokens)))] * count
        row = Conversation((Message("user", "x"),), "", name)
        counts = Counter({"rows": count + 2, "truncated": 1, "truncated tokens": 5, "dropped": 1, "rejected": 1})
        tokenized = TokenizedDocuments(documents, list(range(count)), counts)
        return SourceTokens(SourceRows(name, weight, (row,) * count, ()), (row,) * count, tokenized)

    dataset = build([source(HOSTILE, 2.0, [2, 3, 4], 6), source("plain", 1.0, [4, 9], 3)], seq_len=8, vocab_size=10)
    return summarize(dataset, np.array([2, 3, 4], np.int32))


@pytest.fixture(scope="module")
def report(data_summary: dict[str, Any]) -> RunReport:
    run = TrainRun(
        target="my-target",
        output="my head",
        train=TrainSettings(lr=0.00123, patience=7),
        eval=EvalSettings(speculation=("chain:3", "tree:3x3x8")),
    )
    measured = [20, 40, 60, 80, 100]
    rows = [_step(step) for step in range(1, 101)]
    rows += [_measurement(step, tau, step == 100) for step, tau in zip(measured, _taus(measured), strict=True)]
    notes = {"target": HOSTILE, "target_fingerprint": "abcdef0123456789", "data_summary": data_summary}
    provenance = {"jax": "9.8.7", "argv": ["specserve", "train", "a b"]}
    return RunReport(run.output, config.changed(run), notes, rows, "finished", provenance)


def test_the_report_says_what_was_measured(report: RunReport) -> None:
    html = render(report)
    json.dumps(report.notes)  # stands in the exported head too
    text = " ".join(" ".join(Page(html).text).split())
    last = _taus([100])[0]
    expected = [
        f"{last:.2f}",  # the tile
        f"{last:.3f}",  # the table
        f"{last + 0.111:.3f}",  # by source
        "2.718",  # the arm that only the end measures
        *("0.625", "0.438", "0.312"),  # by depth
        "4,321",
        "42% of the measured peak",
        "3.2 GB",
        "3 prompts did not fit",
        "0.00123",
        "abcdef0123456789",
        "9.8.7",
        "specserve train 'a b'",
        "specserve serve --draft 'my head'",
        "specserve train --config 'my head/run.yaml' --init-from 'my head' --output 'my head-2'",
        "92.86%",  # coverage, see below
        "finished",
    ]
    assert [value for value in expected if value not in text] == []
    assert html.count("<svg") == 6


def test_the_report_needs_no_network_and_no_script(report: RunReport) -> None:
    page = Page(html := render(report))
    assert "script" not in page.tags
    assert not {"link", "img", "iframe", "object", "embed", "use", "image"} & set(page.tags)
    assert not re.findall(r"https?:|//\w|url\(|@import|\bsrc=|href=", html)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_users_data_stays_text(report: RunReport) -> None:
    """A name of a source or of a target is shown as it is, and is neither markup nor a template."""
    html = render(report)
    assert "<script" not in html
    assert "".join(Page(html).text).count(HOSTILE) >= 3


@pytest.mark.parametrize("kept", ["nothing", "one step", "no measurement", "one measurement", "no data"])
def test_a_report_of_a_run_that_hardly_began(report: RunReport, kept: str) -> None:
    rows = {"nothing": [], "one step": [_step(1)], "no measurement": [_step(1), _step(2)]}.get(
        kept, [_step(1), _measurement(1, 1.5)]
    )
    notes = {"target": "x", "target_fingerprint": "y"} if kept == "no data" else report.notes
    page = Page(render(RunReport(report.output, report.settings, notes, rows, "stopped by SIGTERM", {})))
    text = " ".join(page.text)
    assert "stopped by SIGTERM" in text
    assert "specserve train --config 'my head/run.yaml' --resume" in text


def test_a_run_that_ends_between_two_logged_steps_is_reported_to_its_end(report: RunReport) -> None:
    rows = [_step(1), _measurement(4, 1.5, True)]
    page = Page(render(RunReport(report.output, report.settings, report.notes, rows, "finished", {})))
    assert f"{number(4000)} tokens learned from" in " ".join(page.text)


def test_sources_add_up_to_the_whole(data_summary: dict[str, Any]) -> None:
    sources = data_summary["sources"]
    for key in ("documents", "tokens", "loss_tokens", "rows", "truncated_tokens", "dropped", "withheld"):
        assert data_summary[key] == sum(source[key] for source in sources)
    assert [source["coverage"] for source in sources] == [1.0, 0.5]
    # twice 6 documents of three tokens that are all covered, and once 3 of two tokens, half of them covered
    assert data_summary["coverage"] == pytest.approx((2 * 18 + 3) / (2 * 18 + 6))
    assert data_summary["loss_tokens"] == 18 + 6


def test_what_was_measured_otherwise_is_left_out_and_counted(report: RunReport) -> None:
    """A resumed run may measure with other prompts or another arm: those taus are no points of the same curve."""
    others = [_measurement(step, 2.9) | {"measurement": "chain:7"} for step in (5, 10)]
    page = render(dataclasses.replace(report, rows=[*others, *report.rows]))
    assert "2 earlier measurements, of something else, are left out" in page
    assert "best 2.90" not in page
    assert "earlier measurements" not in render(report)


def _drawn(chart: str) -> list[list[tuple[float, float]]]:
    """The points of each line of a chart, in SVG units."""
    paths = [value[1:] for _, name, value in Page(chart).attributes if name == "d" and "L" in value]
    return [[tuple(map(float, point.split())) for point in path.split("L")] for path in paths]  # type: ignore[misc]


@pytest.mark.parametrize(("count", "scale"), [(2, 1e-7), (50, 1e6), (5000, 3.0)])
def test_charts_fit_their_frame(count: int, scale: float) -> None:
    values = scale * np.random.default_rng(0).normal(size=count)
    points = list(enumerate(values.tolist()))
    chart = line_chart("t", "step", {"a": points, HOSTILE: [*points, (0.0, float("nan"))], "none": [(1.0, np.inf)]})
    assert chart is not None
    assert "".join(Page(chart).text).count(HOSTILE) == 1  # in the legend, as text
    lines = _drawn(chart)
    assert len(lines) == 2
    for at in lines:
        assert len(at) <= pages.MAX_POINTS
        assert all(pages.LEFT - 0.1 <= x <= pages.WIDTH - pages.RIGHT + 0.1 for x, _ in at)
        assert all(pages.TOP - 0.1 <= y <= pages.HEIGHT - pages.BOTTOM + 0.1 for _, y in at)
        assert [x for x, _ in at] == sorted(x for x, _ in at)
    assert line_chart("t", "step", {"a": [(0.0, float("nan"))]}) is None


@pytest.mark.parametrize("scale", [1.5e-5, 1.0, -1.25e-5])
def test_the_widest_label_of_a_chart_fits_its_margin(scale: float) -> None:
    chart = line_chart("t", "step", {"a": [(0.0, 0.0), (9.0, scale)]})
    assert chart is not None
    labels = re.findall(r'text-anchor="end">([^<]+)<', chart)
    left = min(x for x, _ in _drawn(chart)[0])
    assert labels
    assert max(map(len, labels)) * pages.LETTER <= left - pages.GAP + 0.1
    assert (left == pages.LEFT) == (scale == 1)


def test_numbers_for_people() -> None:
    assert [nice(size) for size in (0.3, 1.0, 1.01, 4.0, 9.0)] == [0.5, 1.0, 2.0, 5.0, 10.0]
    assert [number(value) for value in (0, 0.0008, 1.25, 9999, 12_000, 3_400_000, -2e9)] == [
        *("0", "0.0008", "1.25", "9999", "12k", "3.4M", "-2G")
    ]
    assert [duration(seconds) for seconds in (0, 59.6, 3600 + 62)] == ["0:00", "1:00", "1:01:02"]


def test_the_template_is_in_the_package() -> None:
    from specserve.train.run import report as module

    assert (Path(module.__file__).parent / module.TEMPLATE).is_file()
