"""The documents say what the code does. Run this file to rewrite the tables that are made from it."""

import functools
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_tables import commands, settings_table

from specserve import config
from specserve.answers.settings import RegenerateRun
from specserve.eval.settings import EvalRun
from specserve.plan.settings import PlanServeRun
from specserve.serve.http.admin.openapi import openapi
from specserve.serve.http.app import create_app
from specserve.serve.settings import ServeRun
from specserve.train.settings import TrainRun

ROOT = Path(__file__).parents[2]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "benchmarks/README.md")
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted(DOCS.rglob("*.md"))]


def _support(name: str) -> str:
    import support_tables  # needs tests/support on the path

    return getattr(support_tables, name)()


SCHEMAS: dict[str, type] = {"serve": ServeRun, "train": TrainRun, "data regenerate": RegenerateRun}  # by command
SCHEMAS |= {"eval": EvalRun, "plan serve": PlanServeRun}
# the name in a comment of a page -> the maker of the text below it, up to the comment that ends it
TABLES: dict[str, Callable[[], str]] = {
    "commands": lambda: commands({of: place(f"settings of {name}").name for name, of in SCHEMAS.items()}),
    "families": partial(_support, "families"),
    "weights": partial(_support, "weights"),
    "heads": partial(_support, "heads"),
    "options of heads": partial(_support, "head_options"),
    **{f"settings of {name}": partial(settings_table, schema) for name, schema in SCHEMAS.items()},
}


def between(name: str) -> re.Pattern[str]:
    begin = f"<!-- {name}: rewritten by `python tests/house/test_docs.py` -->\n"
    return re.compile(rf"(?<={re.escape(begin)}).*?(?=<!-- /{name.split()[0]} -->)", re.S)


def place(name: str) -> Path:
    """Find the one page that has a table."""
    (page,) = (page for page in PAGES if between(name).search(page.read_text()))
    return page


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_made_from_the_code_is_current(name):
    found = between(name).search(place(name).read_text())
    assert found is not None
    assert found[0] == TABLES[name](), "run `python tests/house/test_docs.py` to rewrite the table"


def test_the_api_reference_is_current():
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools" / "api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    found = tool.REFERENCE.search(tool.PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == tool.reference(), "run `python tools/api_reference.py` to rewrite the page"


def test_the_api_reference_has_every_route_whatever_flag_opens_it(fake_engine, tmp_path):
    """Those of an app whose switches are all on, each with the flag without which it is not there."""
    on = {leaf.name: True for leaf in config.leaves(ServeRun) if leaf.field.annotation is bool}
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^### `([A-Z]+ /\S*)`\n\n(With `--[a-z-]+`)?", page, re.M))

    def routes(**settings):
        paths = openapi(create_app(fake_engine, run=ServeRun(**settings)), has_key=False)["paths"]
        return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}

    every = routes(**on, update_folder=str(tmp_path))
    assert found.keys() == every
    assert {route for route, gate in found.items() if gate} == every - routes()


@functools.cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    seen = Counter[str]()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        seen[re.sub(r"[^\w\- ]", "", text).replace(" ", "-")] += 1
    return {f"{name}-{i}" if i else name for name, number in seen.items() for i in range(number)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    """To a page, and to a heading of it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        where = page if not link else page.parent / link
        assert link.startswith("http") or where.exists(), f"{page.name} links to {link}"
        if anchor and where.suffix == ".md":
            assert anchor in _anchors(where.resolve()), f"{page.name} links to {link}#{anchor}, which is no heading"


ROOMS = "|".join(sorted(path.name for path in (ROOT / "specserve").iterdir() if path.is_dir()))
PLACE = re.compile(rf"`((?:specserve|tests|tools|benchmarks|deploy|{ROOMS})/[\w/.]+)`")


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "log"], ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """As `room/file`, be it with .py or with a name in it, and from the package or from the checkout."""
    for named in PLACE.findall(page.read_text()):
        names = (named, f"{named}.py", f"{named.rpartition('.')[0]}.py")
        found = any((folder / name).exists() for folder in (ROOT, ROOT / "specserve") for name in names)
        assert found or named.endswith("/NAME"), f"{page.name} names {named}, which is not there"


def test_the_readme_has_the_lines_that_ci_runs():
    lines = [line.split("  #")[0].strip() for line in (ROOT / "README.md").read_text().splitlines()]
    assert lines.index("specserve quickstart") == lines.index("pip install -e .") + 1
    assert "pip install -e '.[dev]' && pytest" in lines


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    for name, make in TABLES.items():
        text, page = make(), place(name)
        page.write_text(between(name).sub(lambda _, text=text: text, page.read_text()))
