"""The engines of the proof: they answer its requests by steps that a script chooses, and report how far it has come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specserve.errors import SpecServeError
from specserve.eval.verify.judge import ProofSubject
from specserve.eval.verify.requests import ProofRequest
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.interface import EngineStats
from specserve.serve.engine.options import EngineOptions
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.completion import CompletionOutput, answer_all
from specserve.serve.requests.request import Delta, Request
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree

Script = Callable[[], Tree | None]  # the tree of the next steps that are dispatched at once; None: plain ones
Drafts = list[tuple[int, ...]]  # the tokens that were proposed for one answer, step by step


class _Scripted(Controller):
    """A controller whose trees a script chooses."""

    def __init__(self, script: Script) -> None:
        super().__init__({})
        self._script = script

    def choose(
        self, estimates: Sequence[Estimate], choices: Sequence[StepProgram], num_unread: int = 0, num_unseen: int = 0
    ) -> StepProgram:
        del estimates, num_unread, num_unseen
        tree = self._script()
        # steps with grammars have programs for one tree alone
        return next((program for program in choices if program.tree == tree), choices[-1])


@dataclass(frozen=True)
class ProofAnswers:
    """The answers of an engine to some requests, in their order."""

    of: list[CompletionOutput]
    drafts: list[Drafts]  # of each answer, where its request has the tree
    stats: EngineStats

    @property
    def acceptance(self) -> Acceptance:
        return sum((answer.stats for answer in self.of), Acceptance())

    @property
    def acceptance_of_drafts(self) -> Acceptance:
        """The acceptance of those steps alone that proposed something."""
        return sum((answer.stats.of_drafts for answer in self.of), Acceptance())


def joined(runs: Sequence[ProofAnswers]) -> ProofAnswers:
    """Return the answers of several runs as those of one, with the stats of the last."""
    answers, drafts = [each for run in runs for each in run.of], [each for run in runs for each in run.drafts]
    return ProofAnswers(answers, drafts, runs[-1].stats)


class ProofProgress:
    """Reports what is being checked, how many tokens the answers so far were asked for, and of how many: None as long
    as that is not known."""

    def __init__(self, report: Callable[[str, int, int | None], None]) -> None:
        self._report = report
        self._what, self._num_tokens = "", 0
        self._total: int | None = None

    def begin(self, way: str, check: str) -> None:
        self._what = f"{way}: {check}"
        self.show()

    def count(self, request: ProofRequest) -> None:
        """Note that a request is answered."""
        self._num_tokens += request.max_tokens
        self.show()

    def expect(self, total: int) -> None:
        """Note how many tokens the answers to all requests will be."""
        self._total = total

    def show(self) -> None:
        self._report(self._what, self._num_tokens, self._total)


class Asker:
    """Makes engines over one runner, which forgets all sequences in between."""

    def __init__(self, bench: ProofSubject, runner: Runner, progress: ProofProgress) -> None:
        self.runner = runner
        self._bench, self._progress = bench, progress

    def ask(
        self,
        script: Script,
        requests: Sequence[ProofRequest],
        *,
        is_caching: bool,
        is_alone: bool = False,  # one after the other
        num_pages: int | None = None,  # see `EngineOptions`, also for the next one
        most_steps: int | None = None,
    ) -> ProofAnswers:
        """Answer the requests by an engine of their own. Raises SpecServeError where it dies."""
        self.runner.reset()
        engine = Engine(
            self.runner,
            self._bench.tokenizer,
            model_name="",
            eos_ids=self._bench.target.eos_ids,
            controller=_Scripted(script),
            options=EngineOptions(
                is_caching=is_caching, max_queue=len(requests), num_pages=num_pages, most_steps=most_steps
            ),
        )
        answers, drafts = [], []
        with engine:
            for some in [[request] for request in requests] if is_alone else [requests]:
                found = self._ask_together(engine, some)
                answers += found[0]
                drafts += found[1]
            if not engine.is_healthy:
                raise SpecServeError("the engine died; see its log")
            return ProofAnswers(answers, drafts, engine.stats())

    def _ask_together(
        self, engine: Engine, requests: Sequence[ProofRequest]
    ) -> tuple[list[CompletionOutput], list[Drafts]]:
        drafts: list[Drafts] = [[] for _ in requests]

        def submit(i: int, collect: Callable[[Delta], None]) -> Request:
            def on_delta(delta: Delta) -> None:
                if delta.tree is not None:
                    drafts[i].append(delta.tree.token_ids)
                collect(delta)

            return engine.submit(requests[i].prompt, requests[i].params, on_delta)

        answers = answer_all(
            submit, len(requests), lambda i, _answer: self._progress.count(requests[i]), most=len(requests)
        )
        return answers, drafts
