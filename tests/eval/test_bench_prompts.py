"""Every bench asks what its rows say, from the hub and from files alike; and a file that is none of them is refused."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from specserve.cli.bench import measure_engine
from specserve.cli.bench_offline import throughput
from specserve.errors import ConfigError, DataError
from specserve.eval import prompts
from specserve.eval.bench.offline import latency_prompts, throughput_prompts
from specserve.eval.prompts import BENCHES, Question, load_prompts, load_questions
from specserve.eval.settings import BenchRun, LatencyRun, ThroughputRun
from specserve.serve.launch import Models
from specserve.tokenizer import Tokenizer

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

HUB = "https://huggingface.co/datasets"
PLACES = {  # where each is, and which part of it is asked; nobody else's renaming is to reach into these
    "mt-bench": (f"{HUB}/HuggingFaceH4/mt_bench_prompts", None, "train"),
    "gsm8k": (f"{HUB}/openai/gsm8k", "main", "test"),
    "humaneval": (f"{HUB}/openai/openai_humaneval", None, "test"),
    "math-500": (f"{HUB}/HuggingFaceH4/MATH-500", None, "test"),
    "alpaca": (f"{HUB}/tatsu-lab/alpaca", None, "train"),
    "cnn-dm": (f"{HUB}/abisee/cnn_dailymail", "3.0.0", "test"),
    "spec-bench": (
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        None,
        "train",
    ),
}


def test_every_bench_is_where_its_authors_have_it() -> None:
    found = {name: bench.dataset for name, bench in BENCHES.items()}
    assert {name: (each.homepage, each.config, each.split) for name, each in found.items()} == PLACES


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


@pytest.mark.parametrize("batch_size", [LatencyRun().batch_size, 1])
def test_the_benchmarks_find_prompts_with_nothing_but_their_defaults(
    pydoc_tokenizer: Tokenizer, batch_size: int
) -> None:
    """The first chat of pydoc is one short question, and some are longer than the context."""
    models = Models("tiny", None, None, lambda: pydoc_tokenizer)  # type: ignore[arg-type]
    timed = latency_prompts(models, LatencyRun(batch_size=batch_size))
    assert [len(prompt) for prompt in timed] == [LatencyRun().input_len] * batch_size
    assert len(set(map(tuple, timed))) == batch_size, "equal ones would share their pages"
    run = ThroughputRun()
    asked = throughput_prompts(models, run)
    assert len(set(map(tuple, asked))) == len(asked) == run.num_prompts
    assert max(map(len, asked)) + run.output_len <= run.max_model_len


def test_a_bench_with_few_prompts_that_fit_asks_them_again(tmp_path: Path, pydoc_tokenizer: Tokenizer) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [f"{i} " * i]}) for i in range(1, 61)))
    models = Models("tiny", None, None, lambda: pydoc_tokenizer)  # type: ignore[arg-type]
    timed = latency_prompts(models, LatencyRun(bench=str(path), batch_size=5, input_len=100))
    all_long = load_prompts(str(path), 60, pydoc_tokenizer.render_chat, lambda length: length >= 100)
    assert 0 < len(all_long) < 60
    assert len(timed) == 5
    assert {tuple(prompt) for prompt in timed} <= {tuple(prompt[-100:]) for prompt in all_long}
    assert load_prompts(str(path), 3, pydoc_tokenizer.render_chat, lambda length: length >= 100)[0] == all_long[0]
    with pytest.raises(DataError, match=r"questions.jsonl: no prompt has 1000 tokens; lower --input-len"):
        latency_prompts(models, LatencyRun(bench=str(path), input_len=1000))
    with pytest.raises(DataError, match=r"no prompt leaves room for 128 tokens; raise --max-model-len, which is 129"):
        throughput_prompts(models, ThroughputRun(bench=str(path), max_model_len=129))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that may not come as far as loading a model."""

    def load(_run: object) -> None:
        raise AssertionError("the models are loaded")

    for command in ("bench", "bench_offline"):
        monkeypatch.setattr(f"specserve.cli.{command}.bench_models", load)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("length", [128, 512])
def test_a_length_that_would_be_ignored_is_refused_though_it_is_the_usual_one(length: int) -> None:
    """A given length is distinguished from none: the default is no length that anybody gives."""
    for refused in (
        lambda: measure_engine(BenchRun(input_len=length)),
        lambda: throughput(ThroughputRun(input_len=length)),
    ):
        with pytest.raises(ConfigError, match="--input-len is the length of random prompts, and --bench is pydoc"):
            refused()


@pytest.mark.usefixtures("unloaded")
def test_random_prompts_that_do_not_fit_are_refused_before_anything_is_loaded() -> None:
    for run, room in (
        (partial(measure_engine, BenchRun(bench="random", input_len=2000, max_tokens=24)), 1000),
        (partial(throughput, ThroughputRun(bench="random", input_len=2000, output_len=24)), 1000),
        (partial(measure_engine, BenchRun(bench="random", max_model_len=160, max_tokens=33)), 127),
    ):
        with pytest.raises(ConfigError, match=rf"--max-model-len leaves room for prompts of {room} tokens"):
            run()
    with pytest.raises(AssertionError, match="are loaded"):
        measure_engine(BenchRun(bench="random", max_model_len=160, max_tokens=32))


def test_random_prompts_have_the_length_that_is_asked_for() -> None:
    vocabulary = SimpleNamespace(target=SimpleNamespace(config=SimpleNamespace(vocab_size=50)))
    for given, expected in ((0, prompts.RANDOM_LENGTH), (7, 7)):
        asked = throughput_prompts(vocabulary, ThroughputRun(bench="random", input_len=given))  # type: ignore[arg-type]
        assert {len(prompt) for prompt in asked} == {expected}
        assert all(token_id in range(1, 50) for prompt in asked for token_id in prompt)
