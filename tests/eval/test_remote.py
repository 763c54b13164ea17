"""What other engines report of acceptance is read where each of them reports it, and what none reports stays open."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from specserve.errors import ConfigError, DataError, SpecServeError
from specserve.eval.acceptance import SpeculationReport, converse
from specserve.eval.prompts import Question
from specserve.eval.remote import ServerArm, parse_counts, read_chats

QUESTIONS = [Question(str(i), "ab"[i % 2], ("x" * (i + 1),)) for i in range(4)]
Handler = Callable[[httpx.Request], httpx.Response]


class Engine:
    """Answers five tokens to everything, over three steps of a chain of 2: of which 2, 0 and 0 tokens are accepted. It
    reports that in the words of `kind`."""

    def __init__(self, kind: str) -> None:
        self.kind, self.num_answers = kind, 0
        self.asked: list[list[str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, n = request.url.path, self.num_answers
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if path == "/v1/chat/completions":
            body = json.loads(request.content)
            if len(body["messages"][0]["content"]) == 2 and self.kind == "vllm":
                return httpx.Response(400, json={"error": {"message": "too long"}})
            self.num_answers += 1
            self.asked.append([f"{message['role']}: {message['content']}" for message in body["messages"]])
            return httpx.Response(200, content="".join(self._events()))
        if path == "/metrics" and self.kind == "vllm":
            return httpx.Response(200, text=self._metrics(n))
        if path == "/get_server_info" and self.kind == "sglang" and n:
            return httpx.Response(200, json={"internal_states": [{"avg_spec_accept_length": 2.5}]})
        return httpx.Response(404)

    def _events(self) -> Iterator[str]:
        chunks = [{"choices": [{"delta": {"content": word}}]} for word in ("a", " b\u2028c")]
        usage = {} if self.kind == "silent" else {"usage": {"completion_tokens": 6, "prompt_tokens": 1}}
        last: dict = {"choices": [], **usage}
        if self.kind == "llama.cpp":
            last["timings"] = {"predicted_n": 6, "draft_n": 6, "draft_n_accepted": 2}
        yield from (f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in (*chunks, last))
        yield "data: [DONE]\n\n"

    def _metrics(self, n: int) -> str:
        """Over two engines behind one address; and a series that only resembles the counters."""
        counted = {"num_drafts": 3, "num_draft_tokens": 6, "num_accepted_tokens": 2}
        lines = ["# TYPE vllm:generation_tokens_total counter", f'vllm:generation_tokens_total{{engine="0"}} {6 * n}']
        for name, each in counted.items():
            lines += [f"# TYPE vllm:spec_decode_{name}_total counter"]
            lines += [f'vllm:spec_decode_{name}_total{{engine="{i}"}} {(7, each * n)[i]}' for i in range(2)]
            lines += [f"# TYPE vllm:spec_decode_{name}_created gauge", f"vllm:spec_decode_{name}_created 1.7e9"]
        lines += ["# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter"]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{engine="1",position="{d}"}} {n}' for d in range(2)]
        return "\n".join(lines) + "\n"


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], ServerArm]:
    def arm(handler: Handler) -> ServerArm:
        client = functools.partial(httpx.Client, transport=httpx.MockTransport(handler))
        monkeypatch.setattr(httpx, "Client", client)
        return ServerArm("http://server/v1/", "key")

    return arm


def _measure(arm: ServerArm, concurrency: int = 1) -> SpeculationReport:
    report = SpeculationReport("x", "", 0.0, concurrency, draft=arm.url)
    arm.describe(report)
    converse({arm.url: arm}, QUESTIONS, [report], read_chats(9), on_answer=lambda: arm.describe(report))
    return report


def test_each_kind_of_server_is_read_where_it_tells(connect: Callable[[Handler], ServerArm]) -> None:
    found = {kind: _measure(connect(Engine(kind))) for kind in ("vllm", "llama.cpp", "sglang", "plain")}
    assert {kind: report.tau for kind, report in found.items()} == {
        "vllm": pytest.approx(5 / 3),
        "llama.cpp": pytest.approx(5 / 3),
        "sglang": 2.5,
        "plain": None,
    }
    assert found["vllm"].accept_rate == pytest.approx((1 / 3, 1.0))
    assert found["llama.cpp"].accept_rate == found["sglang"].accept_rate == found["plain"].accept_rate == ()
    assert found["llama.cpp"].tau_interval
    assert found["sglang"].tau_interval is found["plain"].tau_interval is None
    assert [report.speculative.num_answers for report in found.values()] == [3, 4, 4, 4]
    assert found["vllm"].num_skipped == 1
    notes = [" ".join(report.notes) for report in found.values()]
    for said, expected in zip(notes, ("too long", "", "own mean", "does not report"), strict=True):
        assert expected in said
    assert json.loads(json.dumps(found["plain"].to_json()))["tau"] is None
    assert set(found["plain"].by_category) <= {"a", "b"}


def test_with_several_clients_what_is_known_of_groups_is_drawn_in_groups(
    connect: Callable[[Handler], ServerArm],
) -> None:
    counted, timed = (_measure(connect(Engine(kind)), concurrency=2) for kind in ("vllm", "llama.cpp"))
    assert [*counted.by_unit] == [(0, 1), (2, 3)]
    assert [*timed.by_unit] == [(0,), (1,), (2,), (3,)]
    assert counted.tau == timed.tau == pytest.approx(5 / 3)


def test_a_second_turn_is_asked_after_the_first_and_its_answer(connect: Callable[[Handler], ServerArm]) -> None:
    engine = Engine("vllm")
    arm = connect(engine)
    report = SpeculationReport("x", "", 0.0, 2, draft=arm.url)
    questions = [Question("1", "a", ("one", "two", "three")), Question("2", "a", ("alone",))]
    converse({arm.url: arm}, questions, [report], read_chats(9))
    assert sorted(engine.asked) == [
        ["user: alone"],
        ["user: one"],
        ["user: one", "assistant: a b\u2028c", "user: two"],
        ["user: one", "assistant: a b\u2028c", "user: two", "assistant: a b\u2028c", "user: three"],
    ]


def test_plain_steps_of_a_server_of_ours_count() -> None:
    counted = {"specserve:sequence_steps": 10, "vllm:spec_decode_num_drafts": 4}
    text = "".join(f"# TYPE {name}_total counter\n{name}_total {number}\n" for name, number in counted.items())
    vllms = text[text.index("# TYPE vllm") :]
    found = [parse_counts(each) for each in (text, vllms, "")]
    assert [counts and counts.acceptance.num_steps for counts in found] == [10, 4, None]


def test_of_several_servers_the_first_is_what_the_others_are_compared_with(
    connect: Callable[[Handler], ServerArm],
) -> None:
    arms = {"plain": connect(Engine("plain")), "fast": connect(Engine("llama.cpp"))}
    reports = [SpeculationReport("x", "", 0.0, 1, draft=name) for name in arms]
    for report in reports:
        arms[report.name].describe(report)
    converse(arms, QUESTIONS, reports, read_chats(9))
    plain, fast = reports
    assert (plain.gain, plain.gain_interval, plain.to_json()["identical_answers"]) == (None, None, None)
    assert fast.plain is plain.speculative
    assert fast.gain
    assert fast.gain_interval
    assert fast.speculative.num_identical == 4
    assert list(fast.by_category) == ["a", "b"]


def test_what_is_no_server_or_fails_is_said(connect: Callable[[Handler], ServerArm]) -> None:
    for reply in (httpx.Response(401), httpx.Response(200, text="<html>"), httpx.Response(200, json={"data": []})):
        with pytest.raises(ConfigError, match="--server http://server/v1/: GET http://server/v1/models failed"):
            connect(lambda _request, reply=reply: reply)
    numbers = itertools.count()
    healthy = Engine("plain")

    def dying(request: httpx.Request) -> httpx.Response:
        is_answer = request.url.path == "/v1/chat/completions"
        return httpx.Response(503, text="busy") if is_answer and next(numbers) > 2 else healthy(request)

    with pytest.raises(SpecServeError, match="an answer has no usage"):
        connect(Engine("silent"))
    with pytest.raises(SpecServeError, match="http://server: 503 busy"):
        _measure(connect(dying))
    with pytest.raises(DataError, match="none of the prompts fits the context, or all were refused"):
        _measure(
            connect(lambda r: httpx.Response(400, text="no") if r.url.path == "/v1/chat/completions" else healthy(r))
        )
