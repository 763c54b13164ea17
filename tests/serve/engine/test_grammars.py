"""Grammars of the bundled target's own tokenizer: what a mask allows is what a parser accepts, over trees as along a
path; and what cannot be used is refused."""

import itertools
import json
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from fakes import wait_for

from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.errors import CapacityError, RequestError
from specserve.serve.requests import grammar_trial
from specserve.serve.requests import grammars as room
from specserve.serve.requests.grammar_trial import GrammarTrial
from specserve.serve.requests.grammars import Grammars
from specserve.serve.requests.request import GrammarSpec, TokenMask, fill_masks
from specserve.tokenizer import Tokenizer

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["a", "bé", "漢字"]}, "maxItems": 3},
            "n": {"type": "integer", "minimum": -5, "maximum": 99},
        },
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)
SPECS = {
    "schema": GrammarSpec("json_schema", SCHEMA),
    "regex": GrammarSpec("regex", r"(ab|[0-9]{2,4}|é+)(-x)?"),
    "choice": GrammarSpec("choice", json.dumps(["yes", "no", 'a "quoted"\nline', "yesterday"])),
    "lark": GrammarSpec("lark", 'start: "(" start ")" | /[a-c]{1,3}/'),
}


def _is_nested(text: str) -> bool:
    depth = (len(text) - len(text.strip("()"))) // 2
    return (
        re.fullmatch(r"[a-c]{1,3}", text.strip("()")) is not None
        and text == "(" * depth + text.strip("()") + ")" * depth
    )


def _follows_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) <= {"name", "tags", "n"} and isinstance(value["name"], str) and -5 <= value["n"] <= 99


FOLLOWS: dict[str, Callable[[str], bool]] = {
    "schema": _follows_schema,
    "regex": lambda text: re.fullmatch(SPECS["regex"].text, text) is not None,
    "choice": lambda text: text in json.loads(SPECS["choice"].text),
    "lark": _is_nested,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_FOLDER)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size + 3, sorted(tokenizer.end_ids))


def _allowed(mask: TokenMask, parents: list[int], token_ids: list[int]) -> np.ndarray:
    return np.unpackbits(mask.masks(parents, token_ids), axis=-1, bitorder="little")


def _walk(mask: TokenMask, end_ids: frozenset[int], rng: random.Random) -> list[int]:
    """Tokens that the mask allows, drawn until it allows an end."""
    token_ids: list[int] = []
    while len(token_ids) < 200:
        allowed = np.flatnonzero(_allowed(mask, [0], [0])[0]).tolist()
        ends = end_ids.intersection(allowed)
        if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
            return token_ids
        token_ids.append(rng.choice([i for i in allowed if i not in ends]))
        mask.accept(token_ids[-1:])
    raise AssertionError("the grammar never ended")


@pytest.mark.parametrize("name", SPECS)
def test_what_a_mask_allows_follows_its_grammar(tokenizer: Tokenizer, grammars: Grammars, name: str) -> None:
    make_mask = grammars.compile(SPECS[name])
    for seed in range(12):
        text = tokenizer.decode(_walk(make_mask(), tokenizer.end_ids, random.Random(seed)))
        assert FOLLOWS[name](text), text


@pytest.mark.parametrize("name", SPECS)
def test_a_tree_is_masked_as_its_paths_are(tokenizer: Tokenizer, grammars: Grammars, name: str) -> None:
    """Trees of tokens that fit, that do not, and of ends; each node has the mask of its own path."""
    rng = random.Random(5)
    make_mask = grammars.compile(SPECS[name])
    accepted = _walk(make_mask(), tokenizer.end_ids, rng)
    for start in range(0, len(accepted), 3):
        mask = make_mask()
        mask.accept(accepted[:start])
        parents, token_ids = [0], [0]
        for _ in range(9):
            parent = rng.randrange(len(parents))
            fits = np.flatnonzero(_allowed(mask, parents, token_ids)[parent]).tolist()
            parents.append(parent)
            token_ids.append(rng.choice([rng.choice(fits), rng.randrange(tokenizer.vocab_size), *tokenizer.end_ids]))
        rows = _allowed(mask, parents, token_ids)
        for node in range(len(parents)):
            path = [node]
            while path[0]:
                path.insert(0, parents[path[0]])
            alone, is_real = make_mask(), True
            alone.accept(accepted[:start])
            for token_id in (token_ids[each] for each in path[1:]):
                is_real &= bool(_allowed(alone, [0], [0])[0, token_id]) and token_id not in tokenizer.end_ids
                if is_real:
                    alone.accept([token_id])
            if is_real:
                np.testing.assert_array_equal(rows[node], _allowed(alone, [0], [0])[0])
            assert rows[node].any()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (GrammarSpec("json_schema", "{"), "cannot be used"),
        (GrammarSpec("json_schema", '{"type": "bogus"}'), "bogus"),
        (GrammarSpec("json_schema", '{"$ref": "http://example.com/x"}'), "not present"),
        (GrammarSpec("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'), "minimum"),
        (GrammarSpec("json_schema", '{"allOf": [' * 5000 + "{}" + "]}" * 5000), "cannot be used"),
        (GrammarSpec("regex", "("), "unclosed group"),
        (GrammarSpec("regex", "a(?=b)"), "look-around"),
        (GrammarSpec("lark", "start: other"), "unknown name"),
        (GrammarSpec("lark", "x" * (room.MAX_GRAMMAR_CHARS + 1)), "characters"),
    ],
)
def test_what_cannot_be_used_is_refused(grammars: Grammars, spec: GrammarSpec, says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        grammars.compile(spec)
    assert error.value.param == "grammar"
    assert len(str(error.value)) < 500


BLOWUPS: dict[str, GrammarSpec] = {
    # deeper than a thread's stack, which would end the server
    "rules": GrammarSpec(
        "lark", "start: r0\n" + "".join(f'r{i}: "x" r{i + 1} | "y"\n' for i in range(9000)) + 'r9000: "z"'
    ),
    # hours, or gigabytes
    "patterns": GrammarSpec(
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{i % 20}}}b.*"} for i in range(200)]}),
    ),
    "options": GrammarSpec("regex", "a?" * 20_000 + "a" * 20_000),
    "gbnf": GrammarSpec(
        "lark", "root ::= r0\n" + "".join(f'r{i} ::= "x" r{i + 1}\n' for i in range(9000)) + 'r9000 ::= "z"'
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "rules")) for n in BLOWUPS])
def test_what_cannot_be_compiled_within_the_bounds_is_refused(grammars: Grammars, name: str) -> None:
    """Another process has tried it, and has not survived; the next grammar finds a new one."""
    for _ in range(2):
        with pytest.raises(RequestError, match="compiling it takes more than") as error:
            grammars.compile(BLOWUPS[name])
        assert error.value.param == "grammar"
        grammars.compile(GrammarSpec("choice", json.dumps([name])))


ENDS = "import os, signal, sys\nsys.stdin.readline()\nprint('\"\"', flush=True)\nsys.stdin.readline()\n{}"
OF_LIMITS = ["os._exit(3)", *(f"os.kill(os.getpid(), signal.{name})" for name in ("SIGXCPU", "SIGSEGV", "SIGABRT"))]
OF_OTHERS = {
    "os.kill(os.getpid(), signal.SIGKILL)": r"signal 9 \(Killed\)",
    "os.kill(os.getpid(), signal.SIGTERM)": r"signal 15",
    "raise OSError('no room')": r"exit status 1, OSError: no room",
    "": "exit status 0",
}


@pytest.fixture
def trial(tokenizer: Tokenizer) -> GrammarTrial:
    return GrammarTrial(tokenizer.as_json(), tokenizer.vocab_size, sorted(tokenizer.end_ids))


@pytest.mark.parametrize("end", OF_LIMITS + list(OF_OTHERS))
def test_only_limits_are_a_grammars_fault(
    trial: GrammarTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """What else ends a process, twice, is an error of the server's, which says how it ended; and the next grammar is
    tried all the same."""
    monkeypatch.setattr(grammar_trial, "__file__", str(tmp_path / "trial.py"))
    (tmp_path / "trial.py").write_text(ENDS.format(end))
    if end in OF_LIMITS:
        assert "takes more than 2 s" in trial.check("regex", "a")
    else:
        with pytest.raises(ChildProcessError, match=OF_OTHERS[end]):
            trial.check("regex", "a")
    monkeypatch.undo()
    assert trial.check("regex", "a") == ""


def test_who_stops_a_process_of_trials_refuses_no_grammar(
    trial: GrammarTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with its server alone. One that is killed, or no longer answers, is followed by another."""

    def pid() -> int:
        assert trial._process is not None
        return trial._process._process.pid

    assert "unclosed group" in trial.check("regex", "(")
    first = pid()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(first, number)
    assert trial.check("regex", "a") == ""
    assert pid() == first
    os.kill(first, signal.SIGKILL)
    assert trial.check("regex", "a") == ""
    os.kill(pid(), signal.SIGSTOP)
    wait_for(lambda: psutil.Process(pid()).status() == psutil.STATUS_STOPPED)  # the signal may take a moment
    (tmp_path / "trial.py").write_text("import time\ntime.sleep(3600)\n")  # the next one never starts
    monkeypatch.setattr(grammar_trial, "__file__", str(tmp_path / "trial.py"))
    monkeypatch.setattr(grammar_trial, "ANSWER_SECONDS", 0.2)
    with pytest.raises(ChildProcessError, match=r"\(no answer within 0.2 s; no answer within 0.2 s\)"):
        trial.check("regex", "a")
    monkeypatch.undo()
    assert trial.check("regex", "a") == ""


def test_what_cannot_be_tried_now_can_be_later(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Why is the operator's to know."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 1, sorted(tokenizer.end_ids))
    spec = SPECS["regex"]
    for python, why in (("/nowhere/python", "/nowhere/python"), ("/bin/false", "(exit status 1; exit status 1)")):
        with monkeypatch.context() as patch:
            patch.setattr(grammar_trial.sys, "executable", python)
            with pytest.raises(CapacityError, match="the server's log has the details") as error:
                grammars.compile(spec)
        assert why in caplog.text
        assert why not in str(error.value)
        assert not grammars.knows(spec)
    grammars.compile(spec)
    assert grammars.knows(spec)


def test_what_is_known_is_not_tried_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what many ask for at once; and an answer about it waits for no other grammar."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 2, sorted(tokenizer.end_ids))
    tried: Counter[str] = Counter()
    check = GrammarTrial.check
    monkeypatch.setattr(GrammarTrial, "check", lambda self, kind, text: tried.update([text]) or check(self, kind, text))
    good, bad = GrammarSpec("regex", "a+"), GrammarSpec("regex", "(")
    long = GrammarSpec("lark", "x" * (room.MAX_GRAMMAR_CHARS + 1))
    assert [grammars.knows(spec) for spec in (good, bad, long)] == [False, False, True]
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(grammars.compile, spec) for spec in (good, bad) * 4]
        assert [type(each.exception()) for each in done] == [type(None), RequestError] * 4
    assert tried == {"a+": 1, "(": 1}
    with grammars._compiling:
        grammars.compile(good)
        for spec, says in ((bad, "unclosed group"), (long, "characters")):
            assert grammars.knows(spec)
            with pytest.raises(RequestError, match=says):
                grammars.compile(spec)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("lark", 'start: start "a" | "a"'),
        GrammarSpec("lark", 'start: start start | "a" |'),
        GrammarSpec("lark", 'start: (("ab" | "c"){1,1000} "d"?){1,1000}'),
        GrammarSpec("regex", "(a|b)*a(a|b){25}"),
        GrammarSpec("regex", "((a{1,1000}){1,1000}){1,1000}"),
        GrammarSpec("json_schema", '{"properties": {"x": {"$ref": "#"}}, "required": ["x"]}'),
        GrammarSpec("json_schema", json.dumps({"enum": [f"w{i}" for i in range(10_000)]})),
        GrammarSpec("json_schema", '{"type": "string", "maxLength": 1000000000}'),
        GrammarSpec("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(300)}})),
    ],
    ids=lambda spec: spec.text[:40],
)
def test_what_looks_endless_is_compiled(tokenizer: Tokenizer, grammars: Grammars, spec: GrammarSpec) -> None:
    """Recursion on the left and on both sides, of a schema, and repetitions of repetitions. Something may always be
    said, until nothing but an end may."""
    mask = grammars.compile(spec)()
    for _ in range(5):
        [allowed] = _allowed(mask, [0], [0])
        assert allowed.any()
        words = set(np.flatnonzero(allowed).tolist()) - tokenizer.end_ids
        if not words:
            break
        mask.accept([min(words)])


def test_what_is_kept_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size, sorted(tokenizer.end_ids))
    monkeypatch.setattr(room, "NUM_KEPT", 3)
    specs = [GrammarSpec("choice", json.dumps([word])) for word in ("a", "b", "c", "d")]
    for spec in specs:
        grammars.compile(spec)
    compiled = []
    monkeypatch.setattr(Grammars, "_compile", lambda self, spec: compiled.append(spec))
    for spec in itertools.chain(specs[1:], specs[:1]):
        grammars.compile(spec)
    assert compiled == specs[:1]


def test_what_is_too_complex_behind_a_draft_token_ends_no_answer() -> None:
    """The target may draw another token. Where it draws that one, none may follow it."""

    class Matcher:
        def __init__(self, is_over: bool) -> None:
            self.is_over = is_over

        def deep_copy(self) -> "Matcher":
            return Matcher(True)

        def is_stopped(self) -> bool:
            return False

        def validate_tokens(self, token_ids: list[int]) -> int:
            return len(token_ids)

        def consume_token(self, _token_id: int) -> None: ...

        def compute_bitmask(self) -> bytes:
            return b"" if self.is_over else b"\x0f\xf0"

        def is_error(self) -> bool:
            return self.is_over

        def get_error(self) -> str:
            return "too many steps"

    rows = np.zeros((3, 2), np.uint8)
    fill_masks(rows, room.GrammarMask(Matcher(False), 16), np.array([0, 0, 1]), np.array([3, 1, 2]))
    assert rows[:2].tolist() == [[0x0F, 0xF0], [0, 0]]
    with pytest.raises(RequestError, match="cannot be followed further: too many steps"):
        room.GrammarMask(Matcher(True), 16).masks([0], [3])
