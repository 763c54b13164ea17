"""The questions that a head is evaluated on: published benches by name, held-out pydoc, and files of questions."""

import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specserve import hub
from specserve.data import pydoc
from specserve.data.conversations import Conversation
from specserve.data.sources import SUFFIXES, HubDataset, download, file_rows
from specserve.errors import ConfigError, DataError, RequestError
from specserve.serve.engine.interface import TokenizerLike

PYDOC, SPEED_BENCH = "pydoc", "speed-bench"
RANDOM = "random"  # prompts of random token ids, for benchmarks alone
RANDOM_LENGTH = 128  # tokens of such a prompt where none is given
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # of SPEED-Bench, instead of most of its questions
ROW = '{"question_id": 1, "category": "writing", "turns": ["..."]}'

Raw = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A conversation to have with the target: its turns are asked one after the other, each with the answers so far."""

    question_id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class QuestionSet:
    """A published set of questions: where it is, and what the target is asked of one of its rows."""

    dataset: HubDataset
    turns: Callable[[Raw], Sequence[str]]  # raises KeyError where a row is of another data set
    category: Callable[[Raw], str]


def _alpaca(row: Raw) -> list[str]:
    """The sections that the data set's authors trained on, without the sentence above them, as SpecForge asks."""
    given = f"\n\n### Input:\n{row['input']}" if row["input"] else ""
    return [f"### Instruction:\n{row['instruction']}{given}\n\n### Response:"]


# A bench is asked as the publishers of heads ask it: the row's own text as the user's turn, without a system prompt and
# without examples. Where they do not agree, docs/evaluation.md describes what is done here.
BENCHES = {
    "mt-bench": QuestionSet(
        HubDataset("HuggingFaceH4/mt_bench_prompts", "apache-2.0"),
        lambda row: row["prompt"],
        lambda row: row["category"],
    ),
    "gsm8k": QuestionSet(
        HubDataset("openai/gsm8k", "mit", config="main", split="test"),
        lambda row: [row["question"]],
        lambda _: "gsm8k",
    ),
    "humaneval": QuestionSet(
        HubDataset("openai/openai_humaneval", "mit", split="test"),
        lambda row: [row["prompt"]],
        lambda _: "humaneval",
    ),
    "math-500": QuestionSet(
        HubDataset("HuggingFaceH4/MATH-500", "mit", split="test"),
        lambda row: [row["problem"]],
        lambda row: row["subject"],
    ),
    "alpaca": QuestionSet(HubDataset("tatsu-lab/alpaca", "cc-by-nc-4.0"), _alpaca, lambda _: "alpaca"),
    "cnn-dm": QuestionSet(
        HubDataset("abisee/cnn_dailymail", "apache-2.0", config="3.0.0", split="test"),
        lambda row: [f"Summarize: {row['article']}"],
        lambda _: "cnn-dm",
    ),
    "spec-bench": QuestionSet(
        # in no repository of the hub: `datasets` reads the authors' file where it lies
        HubDataset(
            "json",
            "apache-2.0",
            files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        ),
        lambda row: row["turns"],
        lambda row: row["category"],
    ),
}


def load_questions(bench: str, limit: int) -> list[Question]:
    """Load the questions of a bench. It is one of BENCHES by its name, through `datasets`; `NAME:PATH`, the same from
    files that were downloaded elsewhere; `pydoc` (held-out modules); or files of questions, each `{"question_id",
    "category", "turns": [..]}` with turns alone required, in a .jsonl, .json or .parquet, or a folder of these.

    At most `limit`, evenly spread over the bench in its own order, 0 for all: the same ones every time. Raises
    ConfigError for a name that nobody knows, DataError for what cannot be read.
    """
    if bench == PYDOC:
        held_out = pydoc.held_out_prompts(limit or 80)
        return [Question(str(i), c.category, (c.messages[0].content,)) for i, c in enumerate(held_out)]
    name, _, path = bench.partition(":")
    found = _of_bench(name, path) if name in BENCHES else _of_files(_local(bench))
    questions = list(found)
    if not questions:
        raise DataError(f"--bench {bench}: there is no question in it")
    return _spread(questions, limit or len(questions))


def load_chats(bench: str, limit: int, history: int = 2) -> list[list[dict[str, str]]]:
    """Load at most `limit` chats that end with a question, for measurements of speed. With `pydoc` they begin with
    none, one, up to `history` answered questions about the same module, so prompts are as long as those of real chats.
    With any other bench (see `load_questions`) each is a question's first turn."""
    if bench != PYDOC:
        return [[{"role": "user", "content": question.turns[0]}] for question in load_questions(bench, limit)]
    by_module: dict[str, list[Conversation]] = {}
    for conversation in pydoc.build("held-out"):
        by_module.setdefault(conversation.source, []).append(conversation)
    chats = []
    for i, question in enumerate(pydoc.held_out_prompts(limit)):
        others = [c for c in by_module[question.source] if c.messages[0] != question.messages[0]]
        start = i % max(1, len(others))  # not always the module's first ones
        earlier = [*others[start:], *others[:start]][: i % (history + 1)]
        chats.append([message for c in (*earlier, question) for message in c.as_dicts()])
    return chats


def render(tokenizer: TokenizerLike, chat: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of a chat, up to where the target's answer begins. Raises DataError where it has no chat
    template that takes this one."""
    try:
        return tokenizer.render_chat(chat)
    except RequestError as error:
        raise DataError(f"the target cannot be asked: {error}") from error


def load_prompts(
    bench: str,
    count: int,
    render: Callable[[list[dict[str, str]]], list[int]],  # a chat as token ids
    fits: Callable[[int], bool],  # whether a prompt of so many tokens can be asked
) -> list[list[int]]:
    """Load `count` prompts of a bench that fit, or all that do. They are evenly spread over the chats that were looked
    at, which are as many (`load_chats`) as it takes."""
    limit = count
    while True:
        chats = load_chats(bench, limit)
        found = [prompt for prompt in map(render, chats) if fits(len(prompt))]
        if len(found) >= count or len(chats) < limit:
            return _spread(found, count)
        limit *= 4


def _spread(items: list[T], count: int) -> list[T]:
    """Choose so many of the items, evenly spread over them; all where there are no more."""
    if len(items) <= count:
        return items
    return [items[i * len(items) // count] for i in range(count)]


def random_length(bench: str, input_len: int, room: int) -> int:
    """Return the tokens of each random prompt that --input-len asks for, which is 0 where nobody has given it, and 0
    for a bench that asks in words. `room` is the most that fit before an answer. Raises ConfigError for a length that
    would be ignored, or does not fit."""
    if bench != RANDOM:
        if input_len:
            raise ConfigError(
                f"--input-len is the length of random prompts, and --bench is {bench}: leave it out, or give --bench "
                f"{RANDOM}"
            )
        return 0
    length = input_len or RANDOM_LENGTH
    if length > room:
        raise ConfigError(
            f"--input-len {length}: --max-model-len leaves room for prompts of {max(0, room)} tokens before an answer; "
            "raise it, or shorten either"
        )
    return length


def random_prompts(token_ids: range, count: int, length: int, seed: int) -> list[list[int]]:
    """So many prompts of so many random token ids out of these."""
    return np.random.default_rng(seed).integers(token_ids.start, token_ids.stop, (count, length)).tolist()


def _of_bench(name: str, path: str) -> Iterator[Question]:
    """The questions of a published bench, from the hub or from files of it, which may be rows of ours as well."""
    bench, ids = BENCHES[name], ("question_id", "prompt_id", "task_id", "unique_id", "id")
    rows = _numbered(_files(Path(path).expanduser())) if path else _downloaded(name, bench.dataset)
    for where, row in rows:
        if path and isinstance(row, Mapping) and "turns" in row:
            yield _parse(where, row)
            continue
        try:
            turns = tuple(bench.turns(row))
            category = bench.category(row)
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{where}: no row of {name} ({error!r}); its rows are as in {bench.dataset.homepage}, or {ROW}"
            ) from error
        own_id = next((row[key] for key in ids if row.get(key) is not None), where.rpartition(":")[2])
        yield Question(str(own_id), str(category), turns)


def _downloaded(name: str, dataset: HubDataset) -> Iterator[tuple[str, Any]]:
    try:
        rows = download(dataset, dataset.split)
        yield from ((f"{name}:{number}", row) for number, row in enumerate(rows, start=1))
    except Exception as error:  # datasets raises many types for "cannot be reached"
        raise DataError(
            f"--bench {name}: {dataset.homepage} could not be loaded ({hub.why(error)}). Where it can be had, download "
            f"its files, and give them as --bench {name}:PATH"
        ) from error


def _local(bench: str) -> Path:
    """The file or folder that a bench is. Raises ConfigError where there is none of that name."""
    name, _, rest = bench.partition(":")
    if name == SPEED_BENCH and not rest:
        raise ConfigError(
            "--bench speed-bench: its licence lets nobody pass its questions on. Prepare them with the script of "
            "https://huggingface.co/datasets/nvidia/SPEED-Bench, and give the files as --bench speed-bench:PATH"
        )
    path = Path(rest if name == SPEED_BENCH else bench).expanduser()
    if path.exists():
        return path
    names = [PYDOC, *BENCHES, SPEED_BENCH]
    near = difflib.get_close_matches(bench.lower(), names, n=1)
    raise ConfigError(
        f"--bench {bench}: {f'did you mean {near[0]}? ' if near else ''}There is no such file; expected one of "
        f"{', '.join(names)}, NAME:PATH, or a {', '.join(SUFFIXES)} or folder of questions such as {ROW}"
    )


def _of_files(path: Path) -> Iterator[Question]:
    return itertools.starmap(_parse, _numbered(_files(path)))


def _files(path: Path) -> list[Path]:
    """The files of questions that a path stands for: itself, or those in a folder, by name."""
    found = [path]
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
    if not found or path.suffix not in (*SUFFIXES, "") or not all(each.suffix in SUFFIXES for each in found):
        raise DataError(f"--bench {path}: expected a file ending in {', '.join(SUFFIXES)}, or a folder of such files")
    return found


def _numbered(paths: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        for number, raw in file_rows(path):
            where = f"{path.name}:{number}"
            try:
                yield where, json.loads(raw) if isinstance(raw, bytes) else raw
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error}); expected {ROW}") from error


def _parse(where: str, row: Any) -> Question:
    turns = row.get("turns") if isinstance(row, Mapping) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise DataError(f"{where}: turns must be a list of texts; expected {ROW}")
    if any(MASKED in turn for turn in turns):
        raise DataError(
            f"{where}: this is SPEED-Bench's place holder, not a question; run the data set's own script on it, which "
            "fetches the questions from their sources"
        )
    return Question(
        str(row.get("question_id", where.rpartition(":")[2])), str(row.get("category", "all")), tuple(turns)
    )
