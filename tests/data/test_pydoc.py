"""The pydoc recipe on a small source tree: which pairs it makes, and that they stay the same."""

import pytest

from specserve.data import pydoc

MODULE = '''
@decorated
def long_enough(path):
    """Return the path, made absolute and normalised.

    More words."""
    def nested_function_that_is_long_enough_to_count(): return os
    return path

class Thing:
    async def method(self, value):
        if value is not None:
            return value + 1_000_000

def short(): pass
'''
METHOD = "async def method(self, value):\n    if value is not None:\n        return value + 1_000_000"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A package with one rich module, its copy, an unreadable file, a test folder and 120 modules of one function."""
    files = {f"m{i}.py": f"def f():\n    return 'distinct and long enough, number {i}'\n" for i in range(120)}
    files |= {"sub/mod.py": MODULE, "sub/twin.py": MODULE, "tests/mod.py": MODULE.replace("path", "way")}
    files |= {"__init__.py": "", "broken.py": "def (:\n"}
    for name, text in files.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(pydoc, "_roots", lambda packages: [("pack", tmp_path / "pack")])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ask(split):
    return [(c.messages[0].content, c.messages[1].content, c.category, c.source) for c in pydoc.build(split)]


def test_recipe(tree):
    rows = [row for split in ("train", "held-out") for row in ask(split) if ".sub." in row[3]]
    (source, method, docs) = sorted(rows, key=lambda row: (row[2] == "docs", "Thing" in row[0]))
    assert source[1].startswith("```python\ndef long_enough(path):\n")
    assert source[1].endswith("    return path\n```")
    assert method[1] == f"```python\n{METHOD}\n```"
    assert "pack.sub.mod.Thing" in method[0]
    assert docs[1] == "Return the path, made absolute and normalised.\n\nMore words."
    assert docs[2:] == ("docs", "pack.sub.mod")  # the first of two copies
    assert "long_enough" in docs[0]


def test_a_module_is_in_one_split_and_the_cache_changes_nothing(tree, monkeypatch):
    first = {split: ask(split) for split in ("train", "held-out")}
    modules = {split: {row[3] for row in rows} for split, rows in first.items()}
    assert not modules["train"] & modules["held-out"]
    assert len(first["train"]) + len(first["held-out"]) == 120 + 3
    assert modules["held-out"] == {"pack.m48", "pack.m86"}  # pinned: models were trained on this rule
    monkeypatch.setattr(pydoc, "_make_pairs", None)
    assert {split: ask(split) for split in first} == first


def test_a_cache_that_cannot_be_written_costs_only_time(tree, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(ask("train")) == 121
    assert "built again next time" in caplog.text


def test_held_out_prompts_are_spread_over_modules_and_carry_no_answer(tree):
    prompts = pydoc.held_out_prompts(2)
    assert len({c.source for c in prompts}) == 2
    assert all([m.role for m in c.messages] == ["user"] for c in prompts)
    assert prompts == pydoc.held_out_prompts(3)
    assert len(pydoc.held_out_prompts(99)) == 2
