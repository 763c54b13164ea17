"""The files of deploy/: they name what is there."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fakes import FakeEngine

from specserve.serve.engine.interface import EngineStats
from specserve.serve.settings import ServeRun

DEPLOY = Path(__file__).parents[3] / "deploy"
NAME = re.compile(r"\b(?:vllm|specserve|process)[:_][a-z0-9_:]+")


def test_every_series_of_the_board_is_there(
    http: httpx.Client, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "state", EngineStats(num_steps_by_speculation={"off": 1}))
    board = json.loads((DEPLOY / "grafana.json").read_text())
    http.post("/v1/completions", json={"prompt": "x"})
    exported = http.get("/metrics").text
    there = {line.split("{")[0].split(" ")[0] for line in exported.splitlines() if not line.startswith("#")}
    named = {name for text in _texts(board) if "{" in text or "(" in text or ":" in text for name in NAME.findall(text)}
    named -= {board["uid"]}
    assert len(named) > 25
    assert named <= there, named - there
    ours = {name for name in there if name.startswith("specserve:")}
    assert ours <= named, "what only this server tells is on its board"


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inner for text in _texts(item)]


def test_prometheus_asks_where_the_server_listens() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"localhost:{ServeRun().port}"]}]
    assert "metrics_path" not in job, "the usual one, /metrics"
