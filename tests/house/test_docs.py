"""The documents say what the code does. Run this file to rewrite the tables that are made from it."""

import importlib.util
import re
from pathlib import Path

import pytest

from specserve import config
from specserve.answers.settings import RegenerateRun
from specserve.eval.settings import EvalRun
from specserve.plan.settings import PlanServeRun
from specserve.serve.settings import ServeRun
from specserve.train.settings import TrainRun

ROOT = Path(__file__).parents[2]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").glob("*.md"))]
SCHEMAS: dict[str, type] = {"serve": ServeRun, "train": TrainRun, "data regenerate": RegenerateRun}  # by command
SCHEMAS |= {"eval": EvalRun, "plan serve": PlanServeRun}
PLACES = {"serve": "settings.md", "train": "settings.md", "data regenerate": "data.md"}
PLACES |= {"eval": "evaluation.md", "plan serve": "scale.md"}


def _settings(command: str) -> re.Pattern[str]:
    begin = f"<!-- settings of {command}: rewritten by `python tests/house/test_docs.py` -->\n"
    return re.compile(f"(?<={re.escape(begin)}).*?(?=<!-- /settings -->)", re.S)


def settings_table(schema: type) -> str:
    rows = ["| setting | flag | default | takes | |", "|---|---|---|---|---|"]
    for leaf in config.leaves(schema):
        expected = leaf.expected.replace("|", "\\|")
        rows.append(f"| `{leaf.name}` | `{leaf.flag}` | {_default(leaf)} | {expected} | {leaf.help} |")
    return "\n".join(rows) + "\n"


def _default(leaf: config.Leaf) -> str:
    if leaf.field.is_required():
        return "required"
    value = leaf.default
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value in ((), "") else f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("command", SCHEMAS)
def test_the_settings_table_is_current(command):
    found = _settings(command).search((ROOT / "docs" / PLACES[command]).read_text())
    assert found is not None
    assert found[0] == settings_table(SCHEMAS[command]), "run `python tests/house/test_docs.py` to rewrite the table"


def test_the_api_reference_is_current():
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools" / "api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    found = tool.REFERENCE.search(tool.PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == tool.reference(), "run `python tools/api_reference.py` to rewrite the page"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_readme_has_the_two_lines():
    lines = [line.split("  #")[0].strip() for line in (ROOT / "README.md").read_text().splitlines()]
    assert "pip install -e '.[dev]' && specserve quickstart" in lines
    assert "pip install -e '.[dev]' && pytest" in lines


if __name__ == "__main__":
    for command, schema in SCHEMAS.items():
        page, table = ROOT / "docs" / PLACES[command], settings_table(schema)
        page.write_text(_settings(command).sub(lambda _, table=table: table, page.read_text(), count=1))
