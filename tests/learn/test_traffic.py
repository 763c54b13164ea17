"""What is kept of answers for a head to learn from, and what is not."""

import dataclasses
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engines import PATIENCE
from fakes import MODEL, STORY, USER, FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from specserve.errors import ConfigError
from specserve.learn import traffic
from specserve.learn.selection import FEW, select, shared_out
from specserve.learn.traffic import ServedAnswer, Traffic, load_redact, read_traffic, segments
from specserve.serve.http.app import create_app
from specserve.serve.http.openai.streaming import WorkOptions
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.requests.request import Delta, Request
from specserve.speculative.sampling import DrawOptions

ALL = 10**9  # tokens
TEXT = {"prompt": "tell", "max_tokens": 5, "seed": 0}
CHAT = {"messages": USER, "max_tokens": 5, "seed": 0}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 5, "seed": 0},
    "/v1/messages": {"model": MODEL, **CHAT},
    "/generate": {"text": "tell", "sampling_params": {"max_new_tokens": 5, "sampling_seed": 0}},
}
PRIVATE: tuple[dict[str, Any], ...] = ({"learn": False}, {"cache_salt": "mine"}, {"store": False})


def test_every_route_states_whether_a_request_may_be_learnt_from(fake_engine: FakeEngine) -> None:
    """A listener hears the whole answer of each sequence, streamed or not, and gets what the client has asked for."""
    heard: list[tuple[bool, list[int], int]] = []

    def listen(request: Request, options: WorkOptions) -> Callable[[Delta], None]:
        found: list[int] = []

        def hear(delta: Delta) -> None:
            found.extend(delta.token_ids)
            if delta.finish_reason is not None:
                heard.append((options.may_learn, found, len(request.prompt_ids)))

        return hear

    server = HttpServer(create_app(fake_engine, listen=listen), port=0)
    server.start()
    try:
        with httpx.Client(base_url=server.url, timeout=10) as http:
            for path, body in ROUTES.items():
                for stream in (False, True):
                    private = PRIVATE[:2] if path == "/generate" else PRIVATE  # where no field has the third name
                    cases = [({}, True), *((fields, False) for fields in private)]
                    for fields, may_learn in cases:
                        heard.clear()
                        reply = http.post(path, json=body | {"stream": stream} | fields)
                        assert reply.status_code == 200, (path, reply.text)
                        [(may, ids, num_prompt)] = heard
                        assert (may, bytes(ids).decode(), num_prompt > 0) == (may_learn, STORY[:5], True), path
    finally:
        server.stop()


def _options(i: int) -> DrawOptions:
    return DrawOptions(i / 4, i, 1 - i / 900, i / 900, i / 300, -i / 300, 1 + i / 9, i)


def _answers(number: int, client: str = "a", first: int = 0) -> list[ServedAnswer]:
    return [ServedAnswer((1, 2, i), (3, i, 2), client, "0", _options(i)) for i in range(first, first + number)]


def _write(folder: Path, answers: list[ServedAnswer], **options: Any) -> Traffic:
    own = Traffic(folder, **{"most_bytes": 10**9, "most_seconds": 1e9, **options})
    for answer in answers:
        own.keep(answer)
    own.close()
    return own


def test_what_is_read_is_what_was_kept(tmp_path: Path) -> None:
    """In its order, whole segments alone, the newest tokens first where not all are asked for; nobody else reads it."""
    first, second = _answers(9), _answers(5, "b", 9)
    assert _write(tmp_path, first).num_kept == 9
    _write(tmp_path, second)
    assert read_traffic(tmp_path, ALL) == first + second
    assert read_traffic(tmp_path, 1) == second[-1:]
    assert {path.stat().st_mode & 0o077 for path in segments(tmp_path)} == {0}
    oldest, newest = segments(tmp_path)
    text = oldest.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    for known in ((), ("temperature",)):  # of a server that kept no options, or this one alone
        kept = {"prompt_ids", "answer_ids", "client", "version", *known}
        oldest.write_text("\n".join(json.dumps({name: row[name] for name in row if name in kept}) for row in rows))
        earlier = [DrawOptions(**{name: getattr(each.options, name) for name in known}) for each in first]
        found = [dataclasses.replace(each, options=own) for each, own in zip(first, earlier, strict=True)]
        assert read_traffic(tmp_path, ALL) == [*found, *second]
    oldest.write_text(text)
    oldest.write_bytes(oldest.read_bytes()[:-9])
    (tmp_path / f"{newest.name}.1-2.partial").write_bytes(newest.read_bytes())  # of a server that was killed
    assert read_traffic(tmp_path, ALL) == second


def test_one_client_does_not_fill_what_a_round_reads(tmp_path: Path) -> None:
    """Of any amount that came last: half of it is others', where there are any; and all is his where there are none."""
    others, flood = _answers(40, "b"), _answers(40, "flood", 100)
    number = sum(answer.num_tokens for answer in others)
    _write(tmp_path, others)
    _write(tmp_path, flood)
    found = read_traffic(tmp_path, number)
    shares = Counter({"b": 0, "flood": 0})
    for answer in found:
        shares[answer.client] += answer.num_tokens
    most = max(answer.num_tokens for answer in [*others, *flood])
    assert all(abs(share - number / 2) <= most for share in shares.values()), shares
    alone = tmp_path / "alone"
    _write(alone, flood)
    found = read_traffic(alone, sum(answer.num_tokens for answer in flood[-20:]))
    assert found == flood[-20:]


def test_the_clock_may_go_back(tmp_path: Path) -> None:
    """The newest answers are those that came last, and the oldest go first."""
    _write(tmp_path, _answers(9))
    [segment] = segments(tmp_path)
    segment.rename(tmp_path / f"{int(segment.stem) + 10**15:020d}.jsonl")
    last = _answers(9, "b", 50)
    _write(tmp_path, last, most_bytes=segments(tmp_path)[0].stat().st_size * 3 // 2)
    assert read_traffic(tmp_path, ALL)[-9:] == last


@pytest.mark.parametrize("other", [(1, 2), {"prompt_ids": (1,)}, 7], ids=str)
def test_a_hook_that_returns_something_else_costs_its_answers_alone(tmp_path: Path, other: Any) -> None:
    answers = _answers(4)
    kept = _write(tmp_path, answers, redact=lambda answer, _: other if answer == answers[1] else answer)
    assert (kept.num_kept, kept.num_dropped) == (3, 1)
    assert read_traffic(tmp_path, ALL) == [answers[0], *answers[2:]]


def test_numbers_of_any_kind_are_token_ids(tmp_path: Path) -> None:
    answers = _answers(4)

    def redact(answer: ServedAnswer, _: Any) -> ServedAnswer:
        return dataclasses.replace(answer, prompt_ids=np.array(answer.prompt_ids), answer_ids=list(answer.answer_ids))

    _write(tmp_path, answers, redact=redact)
    assert read_traffic(tmp_path, ALL) == answers


def test_what_a_killed_server_was_writing_goes(tmp_path: Path) -> None:
    _write(tmp_path, _answers(2))
    (tmp_path / f"{segments(tmp_path)[0].name}.1-2.partial").write_bytes(b"{")
    _write(tmp_path, [])
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]


def test_the_oldest_goes_beyond_size_and_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "SEGMENT_BYTES", 1)  # a segment for each answer
    answers = _answers(20)
    _write(tmp_path, answers)
    size = segments(tmp_path)[0].stat().st_size
    _write(tmp_path, [], most_bytes=7 * size + size // 2)
    found = read_traffic(tmp_path, ALL)
    assert found == answers[-len(found) :]
    assert 5 <= len(found) <= 7
    _write(tmp_path, [], most_seconds=1e-9)
    assert not segments(tmp_path)


def test_nothing_is_kept_that_the_hook_has_not_passed(tmp_path: Path) -> None:
    """It may change ids, leave an answer out, or fail."""

    def redact(answer: ServedAnswer, tokenizer: str) -> ServedAnswer | None:
        assert tokenizer == "tokenizer"
        number = answer.prompt_ids[-1]
        if number % 3 == 2:
            raise ValueError(number)
        return None if number % 3 else ServedAnswer(answer.prompt_ids[1:], answer.answer_ids, "forged", "forged")

    own = _write(tmp_path, _answers(9), redact=redact, tokenizer="tokenizer")
    assert read_traffic(tmp_path, ALL) == [ServedAnswer((2, i), (3, i, 2), "a", "0", _options(i)) for i in (0, 3, 6)]
    assert (own.num_kept, own.num_dropped) == (3, 6)


@pytest.mark.parametrize("path", ["nowhere:f", "json:nothing", "json", "string:digits"])
def test_a_hook_that_cannot_be_had_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--learn-redact {path!r}: expected")):
        load_redact(path)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for whatever waits to be written, however busy the disk is."""
    monkeypatch.setattr(traffic, "CLOSE_SECONDS", PATIENCE)


def _mixed(numbers: tuple[int, int], rng: random.Random) -> list[ServedAnswer]:
    """Answers of two clients, in any order, some of them to one prompt."""
    clients = ["a"] * numbers[0] + ["b"] * numbers[1]
    rng.shuffle(clients)
    return [ServedAnswer((rng.randrange(900),), (i, 2), client) for i, client in enumerate(clients)]


@given(st.tuples(st.integers(0, 300), st.integers(0, 120)), st.integers(1, 30), st.integers(0, 2**32))
def test_a_client_gives_no_more_than_all_others(numbers: tuple[int, int], most: int, seed: int) -> None:
    """Of those parts that several clients give. The newest stay. And what is held out is never trained on, now or when
    more has come."""
    rng = random.Random(seed)
    answers, more = _mixed(numbers, rng), _mixed((20, 20), rng)
    for part in (select(answers, most).train, shared_out(answers)):
        counts = Counter(answer.client for answer in part)
        others = sum(counts.values()) - max(counts.values(), default=0)
        assert others < FEW or max(counts.values()) <= others
    chosen, later = select(answers, most), select(answers + more, most)
    assert len(chosen.held_out) <= most
    assert sum(numbers) < 100 or (chosen.train and chosen.held_out)
    held_out = {answer.key for answer in (*chosen.held_out, *later.held_out)}
    assert not held_out & {answer.key for answer in (*chosen.train, *later.train)}
    for client in "ab":
        given, left = ([each for each in own if each.client == client] for own in (answers, shared_out(answers)))
        assert left == given[len(given) - len(left) :]
    turns = Counter(answer.client for answer in chosen.held_out)
    if len(chosen.held_out) == most and turns["b"] < turns["a"] - 1:  # b has no more to give
        assert turns["b"] == sum(answer.client == "b" for answer in select(answers, 10**6).held_out)
