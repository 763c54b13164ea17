"""Where the time of the server's own choice goes under load: every second of the engine, by what it was spent on,
beside plain decoding and a fixed chain of the same questions.

Run from the checkout: `python benchmarks/account.py --clients 8,16,32`. One process, no HTTP; the ways take turns. The
seconds between the result of one program and that of the next belong to the latter, and those in which nothing was on
the device are gaps. A look is a step by which the controller tries another way than it thinks best. What the choice
cost in hindsight is a row of its own: the seconds that the quickest way of the table would have saved. So are tokens
that belong to no answer, because it ended before the burst of steps that made them.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from in_turns import spread
from over_http import processor, questions
from served_flags import add_served, numbers, positive, run

from specserve.drafters.speculation import describe
from specserve.eval.bench.comparison import PLAIN, EngineArm
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.rounds import InFlight
from specserve.serve.engines import measured_engine
from specserve.serve.launch import load_models
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.program import StepProgram

CONTEXT = 1024
FEW = 20  # steps, whose mean is no chance


@dataclass
class Account:
    """What the engine's seconds were spent on, by name, and how many programs or steps that were."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    numbers: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)  # taken by sequences
    last: float = 0.0  # when the result before was read
    host: float = 0.0  # seconds of processor of the engine's thread, beside all of this

    def add(self, name: str, until: float, number: int, tokens: int) -> None:
        self.seconds[name] += until - self.last
        self.numbers[name] += number
        self.tokens[name] += tokens
        self.last = until


class Watched:
    """An engine whose rounds are accounted for."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.account = name, Account()
        self._rounds, self._looks = engine.rounds, set[int]()
        self._run_round, self._read_round, self._dispatch_round = (
            engine.rounds.run,
            engine.rounds._read,
            engine.rounds._dispatch,
        )
        self._shown, self._shows = set[int](), False  # prompts that the head reads too
        rounds: Any = self._rounds
        rounds.run, rounds._read, rounds._dispatch = self._run, self._read, self._dispatch
        runner: Any = engine.runner
        self._run_program, runner.run = runner.run, self._note

    def _note(self, program: StepProgram, *given: Any, **options: Any) -> Any:
        if program.kind == "prefill":
            self._shows = not program.is_alone
        return self._run_program(program, *given, **options)

    def _run(self, **how: Any) -> bool:
        begin = time.thread_time()
        found = self._run_round(**how)
        self.account.host += time.thread_time() - begin
        return found

    def _dispatch(self, work: Any) -> None:
        if not self._rounds.in_flight:
            now = time.perf_counter()
            self.account.add("nothing on the device", now, 1, 0)
        self._dispatch_round(work)
        self._looks |= {id(each) for each in self._rounds.in_flight[-1] if each.program and self._is_other(each)}
        if self._shows:
            self._shown |= {id(each) for each in self._rounds.in_flight[-1] if not each.program}

    def _is_other(self, each: InFlight) -> bool:
        """Return whether a step is over another tree than the controller thinks best."""
        found = self._rounds.choice.controller._present
        best = [present.tree for (batch, _), present in found.items() if batch == _batch(each)]
        return bool(best) and each.tree not in best

    def _read(self) -> None:
        parts, read = list(self._rounds.in_flight[0]), dict[int, tuple[float, int, int]]()
        for each in parts:
            self._time(each, read)
        self._read_round()
        for each in parts:
            until, number, tokens = read[id(each)]
            self.account.add(self._kind(each), until, number, tokens)
            self._looks.discard(id(each))
            self._shown.discard(id(each))

    def _time(self, each: InFlight, read: dict[int, tuple[float, int, int]]) -> None:
        handle: Any = each.handle
        read_each = handle.read_each

        def timed() -> list[Any]:
            steps = read_each()
            rows = list(each.awaited())
            tokens = sum(int((step.n_accepted[rows] + 1).sum()) for step in steps)
            read[id(each)] = time.perf_counter(), len(steps), tokens
            return steps

        object.__setattr__(handle, "read_each", timed)

    def _kind(self, each: InFlight) -> str:
        if each.program is None:
            return "prompts, the head too" if id(each) in self._shown and self.name != PLAIN else "prompts"
        way, batch = describe(each.tree), f"{_batch(each):2d} sequences"
        way = f"look at {way}" if id(each) in self._looks else way
        way += ", followed" if each.tree is None and not each.program.is_alone and self.name != PLAIN else ""
        return f"{batch}, {way}" + (", the draft reads before" if each.has_read else "")


def _batch(each: InFlight) -> int:
    program = each.program
    assert isinstance(program, StepProgram)
    return program.batch


def lost_to_ways(accounts: dict[str, Account]) -> dict[str, float]:
    """Return the seconds of each arm that the quickest way of each number of sequences would have saved: what looks,
    stale costs and late changes took together, in hindsight. A way counts as one where an arm made FEW steps of it."""
    quickest = dict[str, float]()  # seconds of a token, by the number of sequences
    for account in accounts.values():
        for name, number in account.numbers.items():
            if "sequences" in name and number >= FEW and account.tokens[name]:
                cost, batch = account.seconds[name] / account.tokens[name], name.split(",")[0]
                quickest[batch] = min(cost, quickest.get(batch, cost))
    return {
        arm: sum(
            max(0.0, seconds - account.tokens[name] * quickest[name.split(",")[0]])
            for name, seconds in account.seconds.items()
            if name.split(",")[0] in quickest
        )
        for arm, account in accounts.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_served(parser)
    parser.add_argument("--quantization", default="none", help="of the target, as of `specserve serve` (%(default)s)")
    parser.add_argument("--draft-quantization", default="", help="of the head, as of `specserve serve`")
    parser.add_argument("--ways", default="chain:3,auto", help="beside plain decoding, with commas")
    parser.add_argument("--clients", type=numbers, default="8,16,32", help="at once, with commas")
    parser.add_argument("--slots", type=int, default=0, help="of each engine; 0: as many as the most clients")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--max-tokens", type=positive, default=128)
    return run(parser, account_for)


def account_for(given: argparse.Namespace, target: Path) -> None:
    """Print a table for each number of clients."""
    clients = given.clients
    ways = [PLAIN, *given.ways.split(",")]
    models = load_models(
        given.target, given.draft, quantization=given.quantization, draft_quantization=given.draft_quantization
    )
    prompts = itertools.cycle(
        questions(target, given.bench, min(2 * max(clients) * given.rounds, 60), CONTEXT - given.max_tokens - 32)
    )
    print(f"{processor()}; {models.name}, {models.draft.name if models.draft else 'no head'}")
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(
                measured_engine(models, way, num_slots=given.slots or max(clients), max_model_len=CONTEXT)
            )
            for way in ways
        }
        watched = {way: Watched(way, engine) for way, engine in engines.items()}
        for number in clients:
            _measure(number, engines, watched, prompts, given)


def _measure(number: int, engines: Any, watched: dict[str, Watched], prompts: Any, given: argparse.Namespace) -> None:
    arms, rates = {way: EngineArm(engine) for way, engine in engines.items()}, {way: [] for way in engines}
    costs = {way: [] for way in engines}  # seconds of both cores, by token
    of_answers = Counter[str]()  # tokens
    for each in watched.values():
        each.account = Account()
    for turn in range(given.rounds + 1):
        asked = list(itertools.islice(prompts, 2 * number))
        params = [SamplingParams(max_tokens=given.max_tokens, temperature=0.0, ignore_eos=True)] * len(asked)
        for way in [*arms][turn % len(arms) :] + [*arms][: turn % len(arms)]:
            arms[way].forget()
            watched[way].account.last, begin = time.perf_counter(), time.process_time()
            answers, seconds = arms[way].ask(asked, params, number)
            num_tokens = sum(answer.num_tokens for answer in answers)
            of_answers[way] += num_tokens
            rates[way].append(num_tokens / seconds)
            costs[way].append((time.process_time() - begin) / num_tokens)
        if turn == 0:  # the controller's first steps, and first touches of memory
            for each in watched.values():
                each.account = Account(last=time.perf_counter())
            rates, costs = {way: [] for way in engines}, {way: [] for way in engines}
            of_answers.clear()
    print(f"\n{number} clients, seconds of all rounds (steps or programs, tokens of each)\n")
    names = sorted({name for each in watched.values() for name in each.account.seconds})
    print("|", " | ".join(["", *watched]), "|\n" + "|---" * (1 + len(watched)) + "|")
    for name in names:
        cells = [
            f"{each.account.seconds[name]:.2f} ({each.account.numbers[name]:,}, "
            f"{each.account.tokens[name] / max(each.account.numbers[name], 1):.1f})"
            if each.account.numbers[name]
            else ""
            for each in watched.values()
        ]
        print("|", " | ".join([name, *cells]), "|")
    lost = lost_to_ways({way: each.account for way, each in watched.items()})
    print("|", " | ".join(["of it by ways that were slower", *(f"{lost[way]:.2f}" for way in watched)]), "|")
    of_none = {way: each.account.tokens.total() - of_answers[way] for way, each in watched.items()}
    print("|", " | ".join(["tokens of no answer", *(f"{of_none[way]:,}" for way in watched)]), "|")
    print("|", " | ".join(["the host meanwhile", *(f"{each.account.host:.2f}" for each in watched.values())]), "|")
    print("|", " | ".join(["all", *(f"{sum(each.account.seconds.values()):.2f}" for each in watched.values())]), "|")
    print("|", " | ".join(["tokens/s", *(f"{statistics.median(rates[way]):.0f}" for way in watched)]), "|")
    for name, of_ways in (("to plain", rates), ("processor seconds of a token, to plain", costs)):
        cells = [spread([a / b for a, b in zip(of_ways[way], of_ways[PLAIN], strict=True)]) for way in watched]
        print("|", " | ".join([name, *cells]), "|", flush=True)


if __name__ == "__main__":
    sys.exit(main())
