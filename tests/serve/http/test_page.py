"""The page at GET /: what the server says about it and what its files may name. A browser runs it in
`test_page_in_a_browser`."""

import re
from pathlib import Path

import httpx
import pytest
from fakes import FakeEngine

import specserve.serve.http
from specserve.serve.http.admin.metrics import Metrics
from specserve.serve.http.app import create_app
from specserve.serve.http.page.routes import PAGE_PATHS
from specserve.serve.http.transport.server import HttpServer
from specserve.speculative.acceptance import Acceptance

FOLDER = Path(next(iter(specserve.serve.http.__path__))) / "page"
TEXTS = {path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix not in ("", ".py")}


def test_every_file_is_served_and_asked_for() -> None:
    assert {path.removeprefix("/page/") for path in PAGE_PATHS} == {*TEXTS, "/"} - {"index.html"}
    named = set(re.findall(r'(?:href|src)="page/([^"]+)"', TEXTS["index.html"]))
    while more := {name for each in named for name in re.findall(r'from "./([^"]+)"', TEXTS[each])} - named:
        named |= more
    assert named == TEXTS.keys() - {"index.html"}


def test_no_file_names_another_origin_or_needs_what_the_policy_forbids() -> None:
    for name, text in TEXTS.items():
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"]*", text)) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"\bstyle=|<style|\bon\w+=|innerHTML|\beval\(|<script>", text), name


def test_the_series_that_it_draws_exist(fake_engine: FakeEngine) -> None:
    """By name, so that a series that is renamed takes its chart along."""
    engine_metrics = Metrics("m", fake_engine.stats)
    engine_metrics._num_accepted_per_pos.labels("m", "0").inc(0)
    engine_metrics._of_loras["adapter"] = Acceptance()
    rendered = engine_metrics.render().decode()
    for series in re.findall(r'"((?:vllm|specserve):\w+)"', TEXTS["api.js"]):
        is_learnt = series.startswith("specserve:learn_")  # `tests/learn/test_learning.py` has those
        assert is_learnt or f"\n{series}{{" in rendered, series


@pytest.mark.parametrize("key", [None, "secret"])
def test_it_needs_no_key_and_knows_whether_the_api_does(fake_engine: FakeEngine, key: str | None) -> None:
    server = HttpServer(create_app(fake_engine, api_keys=[key] if key else []), port=0)
    server.start()
    try:
        with httpx.Client(base_url=server.url) as http:
            replies = {path: http.get(path) for path in PAGE_PATHS}
            assert http.get("/page/").status_code == http.get("/page/x.js").status_code == (401 if key else 404)
    finally:
        server.stop()
    for path, reply in replies.items():
        assert reply.status_code == 200
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in reply.headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
        allowed = {value for name, value in policy.items() if name.endswith("-src")}
        assert allowed == {"'none'", "'self'"}, "nothing inline, and nothing of another origin"
        kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        assert reply.headers["Content-Type"].startswith(kinds.get(path.split(".")[-1], "text/html; charset=utf-8"))
    assert f'data-needs-key="{"true" if key else "false"}"' in replies["/"].text
