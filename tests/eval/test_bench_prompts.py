"""Every bench asks what its rows say, from the hub and from files alike; and a file that is none of them is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from specserve.errors import ConfigError, DataError
from specserve.eval import prompts
from specserve.eval.prompts import BENCHES, Question, load_questions

# a row of each as its repository has it, and what is asked
ROWS: dict[str, tuple[dict[str, Any], Question]] = {
    "mt-bench": (
        {"prompt_id": 81, "category": "writing", "prompt": ["a", "b"], "reference": []},
        Question("81", "writing", ("a", "b")),
    ),
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, Question("1", "gsm8k", ("How many?",))),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "x", "test": "y"},
        Question("HumanEval/0", "humaneval", ("def f():\n",)),
    ),
    "math-500": (
        {"problem": "2+2?", "solution": "4", "subject": "Algebra", "level": 1, "unique_id": "test/1.json"},
        Question("test/1.json", "Algebra", ("2+2?",)),
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1 1", "output": "2", "text": "..."},
        Question("1", "alpaca", ("### Instruction:\nAdd.\n\n### Input:\n1 1\n\n### Response:",)),
    ),
    "cnn-dm": (
        {"article": "News.", "highlights": "N.", "id": "f00"},
        Question("f00", "cnn-dm", ("Summarize: News.",)),
    ),
    "spec-bench": (
        {"question_id": 7, "category": "rag", "turns": ["c"]},
        Question("7", "rag", ("c",)),
    ),
}


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_is_the_same_from_the_hub_and_from_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, expected = ROWS[name]
    monkeypatch.setattr(prompts, "download", lambda _dataset, _split: [row])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    for bench in (name, f"{name}:{tmp_path / 'rows.jsonl'}", f"{name}:{tmp_path / 'rows.parquet'}"):
        assert load_questions(bench, 0) == [expected]
    (tmp_path / "other.json").write_text('[{"text": "no question"}]')
    with pytest.raises(DataError, match=r"other.json:1: (no row of|turns must be)"):
        load_questions(f"{name}:{tmp_path / 'other.json'}", 0)


def test_question_files_and_folders_of_them(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"question_id": i, "category": "writing", "turns": ["a", "b"]} for i in range(10)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert [question.question_id for question in load_questions(str(path), 5)] == ["0", "2", "4", "6", "8"]
    (tmp_path / "more.json").write_text('[{"turns": ["c"]}]')
    assert load_questions(str(tmp_path), 0)[0] == Question("1", "all", ("c",))
    assert len(load_questions(f"speed-bench:{tmp_path}", 0)) == 11
    path.write_text(path.read_text() + '\n{"question_id": 1, "turns": "a"}\n')
    with pytest.raises(DataError, match=r"questions.jsonl:11: turns must be"):
        load_questions(str(path), 0)
    (tmp_path / "more.json").write_text(json.dumps([{"turns": [f"{prompts.MASKED} USING SPECDEC_BENCH"]}]))
    with pytest.raises(DataError, match="place holder"):
        load_questions(f"speed-bench:{tmp_path}", 0)
    for wrong, said in (
        ("mtbench", "did you mean mt-bench"),
        ("speed-bench", "licence"),
        ("no/where.jsonl", "no such"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_questions(wrong, 0)
