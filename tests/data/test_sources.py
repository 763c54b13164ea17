"""Every named data set reads in its own layout, files in theirs, and what one source holds out none trains on."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from specserve.data import sources
from specserve.data.conversations import Columns, Conversation, Message, RowProblem, TokenRow
from specserve.data.sources import DATASETS, load, load_mixture, parse_entry
from specserve.errors import ConfigError, DataError

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def chat(i: int, answer: str = "a") -> dict:
    return {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": answer}]}


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def contents(rows):
    return [tuple(message.content for message in row.messages) for row in rows]


# Rows as the hub's data sets have them, which answer "a<i>" to "q<i>".
LAYOUTS = {
    "sharegpt": lambda i: {
        "id": f"QWJhYvA_{i}",
        "conversations": [
            {"from": "human", "value": f"q{i}", "markdown": None},
            {"from": "gpt", "value": f"a{i}", "markdown": None},
        ],
    },
    "ultrachat": lambda i: {
        "prompt": f"q{i}",
        "prompt_id": f"{i:064x}",
        "messages": [{"content": f"q{i}", "role": "user"}, {"content": f"a{i}", "role": "assistant"}],
    },
    "perfectblend": lambda i: {
        "conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}],
        "source": "meta-math/MetaMathQA",
    },
    "magpie": lambda i: {
        "uuid": f"{i}",
        "model": "Llama 3.1 70B Instruct",
        "gen_input_configs": {"temperature": 1.0, "top_p": 1.0, "seed": None},
        "instruction": f"q{i}",
        "response": f"a{i}",
        "conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}],
        "task_category": "Math",
    },
    "opencodeinstruct": lambda i: {
        "id": f"{i:032x}",
        "input": f"q{i}",
        "output": f"a{i}",
        "domain": "generic",
        "generation_algorithm": "self-instruct",
        "llm_judgement": "{}",
        "unit_tests": "[]",
        "tests_execution_status": "[]",
        "average_test_score": "1",
    },
    "gsm8k": lambda i: {"question": f"q{i}", "answer": f"a{i}"},
}
HUB = {  # where they stand: repository, config, split, file
    "sharegpt": (
        "Aeala/ShareGPT_Vicuna_unfiltered",
        "default",
        "train",
        "ShareGPT_V4.3_unfiltered_cleaned_split.json",
    ),
    "ultrachat": ("HuggingFaceH4/ultrachat_200k", "default", "train_sft", "data/train_sft-00000-of-00003.parquet"),
    "perfectblend": ("mlabonne/open-perfectblend", "default", "train", "data/train-00000-of-00006.parquet"),
    "magpie": ("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "default", "train", "data/train-00000.parquet"),
    "opencodeinstruct": ("nvidia/OpenCodeInstruct", "train", "train", "data/train-00000-of-00014.parquet"),
    "gsm8k": ("openai/gsm8k", "main", "train", "main/train-00000-of-00001.parquet"),
}
CATEGORIES = {"magpie": "Math", "opencodeinstruct": "generic"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`datasets` finds `owner/name` below the working directory before it asks the hub; the rest is its own code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()

    def publish(hub_id: str, rows: list[dict], *, config="default", split="train", file="data/train-00000.parquet"):
        path = tmp_path / hub_id / file
        path.parent.mkdir(parents=True)
        if file.endswith(".json"):
            path.write_text(json.dumps(rows))
        else:
            parquet.write_table(pa.Table.from_pylist(rows), path)
        where = f"- config_name: {config}\n  data_files:\n  - split: {split}\n    path: {file}\n"
        (tmp_path / hub_id / "README.md").write_text(f"---\nconfigs:\n{where}---\n")
        return path

    return publish


@pytest.mark.parametrize("name", DATASETS)
def test_a_named_data_set_reads_in_its_own_layout(hub, name):
    hub_id, config, split, file = HUB[name]
    hub(hub_id, [LAYOUTS[name](i) for i in range(60)], config=config, split=split, file=file)
    (found,) = load_mixture([name])
    assert sorted(contents((*found.train, *found.held_out))) == sorted((f"q{i}", f"a{i}") for i in range(60))
    assert {row.category for row in found.train} == {CATEGORIES.get(name, "")}
    assert found.train[0].source == f"{name}:1"
    assert found.problems == ()


def test_every_named_data_set_has_a_layout():
    assert LAYOUTS.keys() == HUB.keys() == DATASETS.keys()


def test_only_the_named_file_of_a_repository_is_read(hub):
    hub_id, _, _, name = HUB["sharegpt"]
    file = hub(hub_id, [LAYOUTS["sharegpt"](i) for i in range(40)], file=name)
    (file.parent / "README.md").write_text("---\nlicense: apache-2.0\n---\n")  # it names no files, as the hub's
    (file.parent / "ShareGPT_2023.05.04v0_Wasteland_Edition.json").write_text(json.dumps([LAYOUTS["sharegpt"](99)]))
    (found,) = load_mixture(["sharegpt"])
    assert len(found.train) + len(found.held_out) == 40


def test_any_hub_data_set_reads_through_a_mapping(hub):
    rows = [{"problem": f"q{i}", "solution": f"a{i}", "topic": "t"} for i in range(60)]
    hub("someone/maths", rows, config="easy", split="test")
    columns = Columns.parse(["prompt=problem", "response=solution", "category=topic"])
    (found,) = load_mixture(["someone/maths/easy:test[:50]"], columns)
    assert sorted(contents((*found.train, *found.held_out))) == sorted((f"q{i}", f"a{i}") for i in range(50))
    assert {row.category for row in found.train} == {"t"}
    with pytest.raises(DataError, match=r"fits no row of easy.jsonl; their columns are messages$"):
        load_mixture([write(Path("easy.jsonl"), [chat(i) for i in range(9)])], Columns.parse(["text=body"]))
    with pytest.raises(DataError, match=r"60 rows left out: none of .* columns are problem, solution, topic: say what"):
        load_mixture(["someone/maths/easy:test"])


def test_a_hub_out_of_reach_is_one_error_that_names_the_files_to_give(monkeypatch):
    def fail(*_arguments, **_options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    fix = (
        r"huggingface.co/datasets/openai/gsm8k\) and give its files: --source FILE.parquet --columns prompt=question,re"
    )
    with pytest.raises(DataError, match=rf"gsm8k:test: openai/gsm8k could not be loaded \(Couldn't reach.*{fix}"):
        load("gsm8k:test", split="train")
    with pytest.raises(DataError, match=r"a/b could not be loaded .*--source FILE.parquet$"):
        load("a/b", split="train")


def test_files_of_every_kind_read_to_the_same(tmp_path):
    rows = [chat(i) for i in range(60)]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    write(tmp_path / "d.jsonl", rows)
    found = [load_mixture([str(tmp_path / f"d.{kind}")])[0] for kind in ("jsonl", "json", "parquet")]
    assert contents(found[0].train) == contents(found[1].train) == contents(found[2].train)
    assert contents(found[0].held_out) == contents(found[1].held_out) == contents(found[2].held_out)


def test_a_table_says_of_tools_what_lines_say(tmp_path):
    """Where every call has every other's arguments, null."""

    def call(number: int) -> dict:
        call = {"type": "function", "function": {"name": f"f{number % 2}", "arguments": {f"a{number % 2}": number}}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call], "thinking": "hm" if number % 3 else None}
        turns = [{"role": "user", "content": f"q{number}"}, answer, {"role": "tool", "content": "2"}]
        return {"messages": turns, "tools": [{"name": f"f{number % 2}", "parameters": {f"a{number % 2}": "integer"}}]}

    rows = [call(i) for i in range(30)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    table, lines = (
        load_mixture([name])[0] for name in (str(tmp_path / "d.parquet"), write(tmp_path / "d.jsonl", rows))
    )
    assert [replace(row, source="") for row in table.train] == [replace(row, source="") for row in lines.train]
    assert all(row.tools and row.as_dicts()[1]["tool_calls"] for row in lines.train)


def test_fields_that_are_not_read_are_named_once(tmp_path, caplog):
    rows = [chat(i) for i in range(30)]
    for row in rows[:3]:
        row["messages"][1] |= {"weight": 0, "refusal": None}
    load_mixture([write(tmp_path / "d.jsonl", rows)])
    [message] = [record.getMessage() for record in caplog.records]
    assert message.endswith("d.jsonl: fields that are not read: weight (in 3 rows)")


def test_bad_rows_are_counted_with_their_line_numbers(tmp_path, caplog):
    rows = [chat(1), "", "not json", "[" * 100_000, chat(2), '{"text": " "}', '{"input_ids": [70], "loss_mask": [1]}']
    (found,) = load_mixture([write(tmp_path / "d.jsonl", rows)], vocab_size=64)
    outside = "input_ids are not all in the vocabulary of 64"
    expected = ((3, "not JSON"), (4, "not JSON"), (6, "text is empty"), (7, outside))
    assert found.problems == tuple(RowProblem(*problem) for problem in expected)
    assert [row.source for row in found.train] == ["d.jsonl:1", "d.jsonl:5"]
    assert "not JSON: 2 (line 3, 4)" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.jsonl", "", "no usable row; there is none"),
        ("d.jsonl", "{}", "no usable row; 1 rows left out"),
        ("d.json", "{}", "expected a list of rows, got dict"),
        ("d.json", "[1,", "not JSON"),
        ("d.parquet", "PAR1", "not a parquet file"),
    ],
)
def test_a_file_without_rows_is_an_error(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_mixture([str(tmp_path / name)])


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.json", "gone.parquet"])
def test_a_missing_file_is_an_error(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name}: cannot read the data"):
        load_mixture([str(tmp_path / name)])


def test_a_name_nobody_knows_is_an_error():
    with pytest.raises(ConfigError, match=r"'sharegtp' is not known; did you mean 'sharegpt'\?"):
        load("sharegtp", split="train")
    with pytest.raises(ConfigError, match="is not known"):
        load("/tmp", split="train")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("gsm8k", ("gsm8k", 1.0)),
        ("gsm8k=0.5", ("gsm8k", 0.5)),
        ("a=b.jsonl", ("a=b.jsonl", 1.0)),
        ("a=b=2", ("a=b", 2.0)),
    ],
)
def test_entries(entry, expected):
    assert parse_entry(entry) == expected


@pytest.mark.parametrize("entries", [["a=0"], ["a=-1"], ["a=nan"], ["a=inf"], ["=2"], [""], [], ["pydoc", "pydoc=2"]])
def test_bad_entries_are_refused(entries):
    with pytest.raises(ConfigError, match=r"data\.source"):
        load_mixture(entries)


def test_the_split_is_by_question_and_nothing_held_out_is_trained_on_anywhere(tmp_path, monkeypatch):
    first = write(tmp_path / "a.jsonl", [chat(i) for i in range(200)])
    second = write(tmp_path / "b.jsonl", [chat(i, "another answer") for i in range(399, 100, -1)])
    pydoc = {"train": range(1000, 1100), "held-out": range(20)}  # a split that is not by key
    monkeypatch.setattr(
        sources.pydoc,
        "build",
        lambda part: [
            Conversation((Message("user", f"q{i}"), Message("assistant", "doc")), "", "m") for i in pydoc[part]
        ],
    )
    mixture = load_mixture([first, second, "pydoc"], withheld={mine.key for mine in load(first, split="train")[-3:]})
    asked = [
        {part: {row.messages[0].content for row in getattr(source, part)} for part in ("train", "held_out")}
        for source in mixture
    ]
    held_out = set().union(*(source["held_out"] for source in asked))
    trained = set().union(*(source["train"] for source in asked))
    assert not held_out & trained
    assert asked[0]["held_out"] & {f"q{i}" for i in range(101, 200)} == asked[1]["held_out"] & asked[0]["held_out"]
    assert len(asked[0]["held_out"]) > 2
    withheld = mixture[0].num_withheld
    assert len(asked[0]["train"]) + len(asked[0]["held_out"]) + withheld == 200
    assert withheld == 20 + 3 - len(asked[0]["held_out"] & {f"q{i}" for i in range(20)})


def test_ready_token_ids_stay_in_the_part_that_they_say(tmp_path):
    rows = [
        {"input_ids": [i, 1], "loss_mask": [0, 1], "key": f"{i:x}", "split": "held-out" if i % 2 else "train"}
        for i in range(30)
    ]
    (found,) = load_mixture([write(tmp_path / "d.jsonl", rows)])
    assert [int(row.token_ids[0]) % 2 for row in found.train] == [0] * 15
    assert all(isinstance(row, TokenRow) for row in found.held_out)
    with pytest.raises(DataError, match="rows of token ids, of which no conversation"):
        load(str(tmp_path / "d.jsonl"), split="train")
