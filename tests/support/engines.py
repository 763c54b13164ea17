"""What the engine's tests share: small runners, a tokenizer of letters, a grammar, and solo runs on a plain engine, of
requests whose every token is chosen by more than rounding."""

import dataclasses
import itertools
import random
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import tokenizers
from jax.sharding import Mesh
from rounding import assert_within, jittered

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.eval.verify.rule import rule_scores
from specserve.models.cache import WindowSizes
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.options import Encoder, EngineOptions, bad_sequences
from specserve.serve.programs.compile_queue import compile_all
from specserve.serve.programs.layouts import make_layouts
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.requests.grammars import Grammars
from specserve.serve.requests.request import Delta, FinishReason, Request, SamplingParams, TokenLogprobs
from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree

PAGE_SIZE, MAX_LEN, NUM_SLOTS = 8, 96, 4
NUM_PAGES = NUM_SLOTS * MAX_LEN // PAGE_SIZE
VOCAB = 64
EOS = 2
PATIENCE = 600  # seconds: what takes longer hangs, however busy the machine is


class Letters:
    """One letter for each of the tiny target's 64 tokens."""

    alphabet = string.ascii_letters + string.digits + " ."
    vocab_size = VOCAB
    special_token_ids = frozenset({0, EOS})
    end_ids = frozenset({EOS})
    sampling_defaults: Mapping[str, float] = {}
    has_chat_template, template = False, SimpleNamespace(mentions=lambda _word: False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.alphabet.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.alphabet[i] for i in token_ids if not (skip_special_tokens and i in self.special_token_ids))

    def as_json(self) -> str:
        words = {
            letter.replace(" ", "\u0120"): i for i, letter in enumerate(self.alphabet)
        }  # as byte-level BPE writes it
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        return tokenizer.to_str()


class Grammar:
    """A `TokenMask`: an automaton of five states, each of which allows a quarter of the tokens, EOS rarely."""

    allowed = np.random.default_rng(5).random((5, VOCAB)) < 0.25

    def __init__(self) -> None:
        self.state = 0

    def masks(self, parents: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:
        states = [self.state]
        for parent, token_id in zip(parents[1:], token_ids[1:], strict=True):
            states.append(self.follow(states[parent], token_id))
        return np.packbits(self.allowed[states], axis=-1, bitorder="little")

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert self.allowed[self.state, token_id], f"token {token_id} is not allowed in state {self.state}"
            self.state = self.follow(self.state, token_id)

    @staticmethod
    def follow(state: int, token_id: int) -> int:
        return (2 * state + token_id + 1) % 5


@dataclass(frozen=True, eq=False)
class Ask:
    """One request. Its seed is set: two runs of it must agree."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str = ""
    priority: int = 0
    is_constrained: bool = False  # by `Grammar`
    lora: str = ""

    @property
    def key(self) -> str:
        """Equal where the answer must be: salt and priority, and what speculation may do, change no token."""
        return f"{self.prompt} {self.params} {self.is_constrained}"


class Inbox:
    """A listener that keeps what it hears and lets the test wait for the end."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self._is_done = threading.Event()
        self._has_begun = threading.Event()

    def __call__(self, delta: Delta) -> None:
        assert not self._is_done.is_set(), "nothing comes after the last delta"
        self.deltas.append(delta)
        self._has_begun.set()
        if delta.finish_reason is not None:
            self._is_done.set()

    def wait_for_first(self) -> None:
        assert self._has_begun.wait(PATIENCE)

    def wait(self) -> Delta:
        """The last delta."""
        assert self._is_done.wait(PATIENCE), "the request never ended"
        return self.deltas[-1]

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [logprobs for delta in self.deltas for logprobs in delta.logprobs]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


Listen = Callable[[Delta], None]


def holding(engine: Engine, listen: Listen) -> Listen:
    """A listener that hands on what it hears, and with the first of it holds the engine until somebody asks it for a
    change: so the change meets an answer that is under way, however slowly it is asked for."""
    changes = engine._changes
    return _after_first(listen, lambda: wait_until(lambda: not (changes._asked.empty() and changes._urgent.empty())))


def hold_next(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next answer wait, once its first token is there, until the engine is asked for a change."""
    submit = engine.submit

    def submit_held(prompt: Any, params: Any, listen: Listen, **options: Any) -> Request:
        monkeypatch.setattr(engine, "submit", submit)
        return submit(prompt, params, holding(engine, listen), **options)

    monkeypatch.setattr(engine, "submit", submit_held)


def waiting(event: threading.Event, listen: Listen) -> Listen:
    """A listener that hands on what it hears, and with the first of it holds the engine until the event."""
    return _after_first(listen, lambda: event.wait(PATIENCE))


def _after_first(listen: Listen, then: Callable[[], object]) -> Listen:
    has_begun = False

    def hear(delta: Delta) -> None:
        nonlocal has_begun
        listen(delta)
        if not has_begun:
            then()
        has_begun = True

    return hear


class Fixed(Controller):
    """Always the same tree."""

    def __init__(self, tree: Tree | None) -> None:
        super().__init__({})
        self.tree = tree

    def choose(
        self, estimates: Sequence[Estimate], choices: Sequence[StepProgram], num_unread: int = 0, num_unseen: int = 0
    ) -> StepProgram:
        return next(program for program in choices if program.tree == self.tree)


class Dice(Controller):
    """Any tree, and plain decoding, in any order, beside a draft that is left out half of the time, or never."""

    def __init__(self, seed: int, *, leaves_draft: bool = True) -> None:
        super().__init__({})
        self.random, self._draft, self._leaves_draft = random.Random(seed), random.Random(seed), leaves_draft

    def choose(
        self, estimates: Sequence[Estimate], choices: Sequence[StepProgram], num_unread: int = 0, num_unseen: int = 0
    ) -> StepProgram:
        self._reading.is_following = not self._leaves_draft or self._draft.random() < 0.5
        return self.random.choice(choices)


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)  # type: ignore[arg-type]


def make_runner(
    target: Target,
    head: Head | None,
    *speculations: str,
    num_slots: int = NUM_SLOTS,
    num_pages: int = 0,  # 0: as many as all slots can have
    chunk: int = 16,  # so that most prompts take a few
    has_constrained: bool = True,
    mesh: Mesh | None = None,
    folder: Path | None = None,
    widths: Sequence[int] = (),  # empty: the widest alone
    is_mixing: bool = False,  # as on an accelerator: steps and prompts in one program
    kept_states: int = 0,  # recurrent ones, of prefixes
    windows: WindowSizes = (),  # with pages of their own, as many as these
    kept_layers: tuple[int, ...] = (),  # layers of which hidden states may be asked for
    max_loras: int = 0,
    make: Callable[..., Runner] = Runner,
) -> Runner:
    """One batch size, one width and one chunk: every other costs programs, and programs are most of a test's time."""
    shapes = make_shapes(
        [parse_speculation(text) for text in speculations],
        target.config,
        mesh,
        num_slots=num_slots,
        max_model_len=MAX_LEN,
        page_size=PAGE_SIZE,
        num_pages=num_pages or num_slots * MAX_LEN // PAGE_SIZE,
        kept_layers=kept_layers,
        kept_states=kept_states,
    )
    few = dataclasses.replace(
        shapes, batch_sizes=(num_slots,), widths=(*widths, shapes.widths[-1]), chunks=(chunk,), max_rows=1024
    )
    few = dataclasses.replace(few, is_mixing=is_mixing, windows=windows)
    if max_loras:
        few = dataclasses.replace(few, max_loras=max_loras, max_lora_rank=4)
    return make(target, head, few, has_constrained=has_constrained, mesh=mesh, folder=folder)


def compile_programs(runner: Runner) -> None:
    """Compile every program of it, side by side."""
    compile_all(runner.compile, list_programs(runner))


def make_engine(
    runner: Runner,
    controller: Controller | None = None,
    loras: Any = None,
    **options: object,
) -> Engine:
    """A fresh engine with these `EngineOptions`, not started, on a runner that other tests have used."""
    runner.reset()
    return Engine(
        runner,
        Letters(),  # type: ignore[arg-type]
        model_name="tiny",
        eos_ids=(EOS,),
        controller=controller,
        options=EngineOptions(**options),  # type: ignore[arg-type]
        loras=loras,
    )


def submit(engine: Engine, ask: Ask, hear: Callable[[Listen], Listen] = lambda listen: listen) -> tuple[Request, Inbox]:
    """Ask, and hear the answer by way of `hear`, such as `holding`."""
    inbox = Inbox()
    request = engine.submit(
        ask.prompt,
        ask.params,
        hear(inbox),
        priority=ask.priority,
        cache_salt=ask.salt,
        token_mask=Grammar() if ask.is_constrained else None,
        lora=ask.lora,
    )
    return request, inbox


def run(engine: Engine, asks: Sequence[Ask]) -> list[Inbox]:
    """All together."""
    inboxes = [submit(engine, ask)[1] for ask in asks]
    for inbox in inboxes:
        inbox.wait()
    return inboxes


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def serving(engine: Engine) -> Iterator[Engine]:
    """Start it; at the end, when all that was asked has ended, nothing may be left behind."""
    num_compiled = len(engine.runner.compiled)
    with engine:
        yield engine
        check_idle(engine)
    assert len(engine.runner.compiled) == num_compiled, "something was compiled while serving"
    assert engine.stats().num_late_compiles == 0


def check_idle(engine: Engine) -> None:
    scheduler = engine.rounds.scheduler
    wait_until(
        lambda: (
            not (
                scheduler.running or scheduler.waiting or engine.rounds.in_flight or not engine._queue._arrived.empty()
            )
        )
    )
    assert engine.is_healthy
    scheduler.pool.check()
    assert scheduler.pool.num_available == scheduler.pool.num_pages, "pages leaked"
    assert sorted(itertools.chain(*scheduler._free_slots)) == list(range(engine.runner.shapes.num_slots)), (
        "slots leaked"
    )
    assert engine._queue.num_open == 0
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_held) == (0, 0, 0)


SEEDS = range(3)  # of moved weights: seven near-ties in eight are found


@contextmanager
def moved_weights(runner: Runner, target: Target, head: Head, seed: int) -> Iterator[None]:
    """Weights that differ by all that rounding explains. What two programs must agree in may not depend on that: what
    is said, and what is accepted, where tokens of a draft may tie."""
    layouts = runner.inputs.layouts
    draft = dataclasses.replace(head, params=jittered(head.params, seed))
    runner.inputs.layouts = make_layouts(dataclasses.replace(target, params=jittered(target.params, seed)), draft)
    try:
        yield
    finally:
        runner.inputs.layouts = layouts


class Reference:
    """Plain decoding, one request at a time, without a prefix cache. What has been asked before is remembered, and how
    firmly its tokens stand."""

    def __init__(self, target: Target, folder: Path | None = None) -> None:
        self.target = target
        self.runner = make_runner(target, None, "off", num_slots=1, chunk=64, folder=folder)
        self.engine = make_engine(self.runner, is_caching=False)
        self.off = float(tiny.tolerance(target, range(VOCAB)).max())  # of a logit, by rounding
        self._answers: dict[str, Inbox] = {}
        self._ties: dict[str, str] = {}

    def answer(self, ask: Ask) -> Inbox:
        if ask.key not in self._answers:
            [inbox] = run(self.engine, [ask])
            self._answers[ask.key] = inbox
            self._ties[ask.key] = find_tie(self.target, Letters(), ask, inbox.token_ids, self.off)
        return self._answers[ask.key]

    def is_firm(self, ask: Ask) -> bool:
        """Whether no order of sums may change the answer."""
        self.answer(ask)
        return not self._ties[ask.key]

    def firm(self, asks: Iterable[Ask]) -> Iterator[Ask]:
        """Those of which that is so."""
        return filter(self.is_firm, asks)

    def any_ask(self, rng: np.random.Generator, length: int, is_sampled: bool) -> Ask:
        """One of them, of a prompt of that length."""
        options = {"max_tokens": MAX_LEN // 2, "ignore_eos": True, "temperature": 0.7 if is_sampled else 0.0}

        def draw() -> Ask:
            seed = int(rng.integers(2**31))
            return Ask(tuple(rng.integers(3, VOCAB, length).tolist()), SamplingParams(seed=seed, **options))

        return next(self.firm(iter(draw, None)))

    def check(self, ask: Ask, inbox: Inbox, *, is_cancelled: bool = False) -> None:
        """The engine answered what plain decoding answers; one that was ended before, the beginning of that."""
        end, plain = inbox.wait(), self.answer(ask)
        reason = end.finish_reason
        assert self.is_firm(ask), f"{ask}: {self._ties[ask.key]}; ask with another seed"
        plain_end = plain.wait()
        assert plain_end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), plain_end
        got, expected = inbox.token_ids, plain.token_ids
        is_cut = is_cancelled and reason in (FinishReason.CANCELLED, FinishReason.ABORTED)
        if is_cut:
            expected = expected[: len(got)]
        check_equal(self.target, Letters(), ask, got, expected, f"{ask}")
        if reason == FinishReason.ABORTED:
            assert inbox.text == Letters().decode(got), "an answer that the operator ends has all of its text"
        if not is_cut:
            said = reason, end.stop_reason, inbox.text
            assert said == (plain_end.finish_reason, plain_end.stop_reason, plain.text)
        self._check_logprobs(ask, inbox.logprobs, plain.logprobs)

    def _check_logprobs(self, ask: Ask, got: list[TokenLogprobs], plain: list[TokenLogprobs]) -> None:
        if ask.params.logprobs is None:
            assert got == plain == []
            return
        for ours, theirs in zip(got, plain, strict=False):
            assert (ours.token_id, len(ours.top)) == (theirs.token_id, ask.params.logprobs)
            bound = 2 * self.off  # the difference of a logit and of the logarithm of a sum of them
            assert_within(ours.logprob, theirs.logprob, bound)
            values, others = np.array([value for _, value in ours.top]), np.array([value for _, value in theirs.top])
            assert_within(values, others, bound)
            known = dict(theirs.top)
            for token_id, value in ours.top:  # ties may stand in another order, and at the end fall out
                assert_within(known.get(token_id, others[-1]), value, bound)


def check_equal(
    target: Target, tokenizer: Encoder | None, ask: Ask, got: Sequence[int], plain: Sequence[int], what: str
) -> None:
    """Token for token; a difference is reported with the scores that it lies between."""
    if list(got) == list(plain):
        return
    at = next((i for i, (a, b) in enumerate(zip(got, plain, strict=False)) if a != b), None)
    assert at is not None, f"{what}: {got} and {plain} end at different places"
    row = plain_scores(target, tokenizer, ask, plain[: at + 1])[at]
    a, b = plain[at], got[at]
    raise AssertionError(
        f"{what}: token {at} is {b}, plain decoding drew {a}; "
        f"their scores are {row[b]} and {row[a]}, the best is {row.max()}: a gap of {row.max() - row[b]:.2e}"
    )


def find_tie(target: Target, tokenizer: Encoder | None, ask: Ask, output_ids: Sequence[int], off: float) -> str:
    """Where a token of an answer leads by no more than rounding may bring, if anywhere: two scores may come nearer by
    what both logits are off, and options may stretch that."""
    if not output_ids:
        return ""
    params = ask.params
    stretch = max(params.repetition_penalty, 1 / params.repetition_penalty) / (params.temperature or 1.0)
    scores = plain_scores(target, tokenizer, ask, output_ids)
    drawn = np.take_along_axis(scores, np.array(output_ids)[:, None], axis=1)[:, 0]
    np.put_along_axis(scores, np.array(output_ids)[:, None], -np.inf, axis=1)
    lead = drawn - scores.max(axis=1)
    at = int(lead.argmin())
    return f"token {at} leads by {lead[at]:.1e}, a near-tie" if lead[at] <= 2 * off * stretch else ""


def plain_scores(
    target: Target, tokenizer: Encoder | None, ask: Ask, output_ids: Sequence[int]
) -> np.ndarray:  # [n, vocab]
    """What each token of an answer is the argmax of, by one plain forward and the rule of drawing, for which the answer
    is a chain below the prompt's last token."""
    params, vocab, n = ask.params, target.config.vocab_size, len(output_ids)
    logits = tiny.target_logits(target, [*ask.prompt, *output_ids])[len(ask.prompt) - 1 : -1]
    mask = Grammar() if ask.is_constrained else None
    if params.grammar is not None:
        mask = Grammars(Letters(), vocab, (EOS,)).compile(params.grammar)()  # type: ignore[arg-type]
    return rule_scores(
        ask.prompt,
        params,
        output_ids,
        logits[:n],
        stop_ids=sorted(set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.eos_ids))),
        bad_sequences=bad_sequences(params.bad_words, tokenizer),
        mask=mask,
    )
