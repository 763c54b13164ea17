"""The proof that speculation changes nothing, on any target and head: plain decoding and every way to speculate answer
the same requests through the engine that serves, and a difference is traced to where it begins.

A difference is a tie where the rule of drawing leaves the choice open by no more than what programs of different shapes
differ by on this machine (`WholeText` is one of them). Anything else is a bug.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specserve.drafters.speculation import describe
from specserve.eval.verify.asker import Asker, ProofAnswers, ProofProgress, Script, joined
from specserve.eval.verify.draws import COUNTED_TOKENS, NUM_DRAWS, chi_square, num_answers, places
from specserve.eval.verify.judge import Judge, ProofSubject, bug, log_sum_exp
from specserve.eval.verify.report import Mismatch, ProofReport, Row, Test
from specserve.eval.verify.requests import ProofRequest, base_requests, draw_requests, follow_ups, option_requests
from specserve.serve.requests.completion import CompletionOutput
from specserve.speculative.tree import Tree

SHARE = 0.1  # of the logits' own spread: what is called noise and is larger is no rounding


@dataclass(frozen=True)
class ProofSize:
    """The size of a proof: the tokens of an answer, and the draws of a statistical test."""

    max_tokens: int = 32
    draws: int = NUM_DRAWS  # counted by each chi-square test
    seed: int = 0


@dataclass
class _Steps:
    """Steps whose drafts were compared with those of the same steps of another run, up to the first difference."""

    number: int = 0
    differences: int = 0

    def compare(self, drafts: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> None:
        for ours, theirs in zip(drafts, others, strict=False):
            self.number += 1
            if ours != theirs:
                self.differences += 1
                return

    def p_value(self, control: "_Steps") -> float:
        """The chance of so many differences if they were as frequent, per step, as between two runs that differ only in
        the shape of their programs. Given how many there are in both, they would fall on either by its steps."""
        from scipy.stats import binomtest  # takes a third of a second to import

        total = self.differences + control.differences
        if not total:
            return 1.0
        share = self.number / (self.number + control.number)
        return float(binomtest(self.differences, total, share, alternative="greater").pvalue)


class Prover:
    """Runs the checks over one bench, and adds what it finds to a report. `on_progress` hears what is being checked,
    how many tokens the answers so far were asked for, and of how many, None as long as that is not known."""

    def __init__(
        self,
        bench: ProofSubject,
        prompts: Sequence[Sequence[int]],
        size: ProofSize,
        report: ProofReport,
        on_progress: Callable[[str, int, int | None], None] = lambda _what, _done, _total: None,
    ) -> None:
        self.bench, self.prompts, self.size, self.report = bench, prompts, size, report
        self._plain: dict[int, CompletionOutput] = {}  # by the request's id
        self._judge, self._progress = Judge(bench, report), ProofProgress(on_progress)
        self._spread = 0.0  # of the target's logits

    def run(self) -> None:
        """Run all checks of all ways to speculate. Plain decoding is asked, and held against the rule, with the
        programs of the first group. Raises SpecServeError where the engine dies."""
        for group in self.bench.groups:
            self._asker = Asker(self.bench, group.open(), self._progress)
            if not self._plain:
                self._answer_plainly()
                self._check_plain()
            for tree in group.trees:
                self._check_way(tree)
            self._check_any(group.trees)
            del self._asker  # two states are never there at once

    def _answer_plainly(self) -> None:
        """Have plain decoding answer everything, one request after the other, without a prefix cache."""

        def answer(requests: Sequence[ProofRequest]) -> list[CompletionOutput]:
            answers = self._asker.ask(lambda: None, requests, is_caching=False, is_alone=True).of
            self._plain |= {id(request): found for request, found in zip(requests, answers, strict=True)}
            return answers

        self._progress.begin("off", "answers")
        first = base_requests(self.prompts, self.size.max_tokens, self.size.seed)
        answers = answer(first)
        second = follow_ups(first, answers)
        self.first, self.base = first, [*first, *second]
        options = option_requests(
            self.prompts,
            answers[::2],
            self.bench.tokenizer,
            max_tokens=self.size.max_tokens,
            seed=self.size.seed,
            has_grammars=self._asker.runner.has_constrained,
        )
        self.everything = [*self.base, *options]
        self._progress.expect(self._number_in_all())
        answer(second)
        answer(options)

    def _number_in_all(self) -> int:
        """The tokens of all answers that the checks take, drawn ones included."""
        requests = self.first, self.base, self.everything, _shorter(self.base), _shorter(self.everything)
        first, base, everything, *again = (sum(request.max_tokens for request in some) for some in requests)
        drawn = num_answers(self.size.draws) * (1 + COUNTED_TOKENS)
        number = everything + base + self.size.draws + drawn  # plain ones
        for group in self.bench.groups:
            number += everything + again[1]
            for tree in group.trees:
                alone = base + 2 * first if _is_by_head_alone(tree) else first
                number += alone + 2 * base + again[0] + everything + drawn
        return number

    # Checks.

    def _check_plain(self) -> None:
        """Measure the noise, and hold plain decoding against the rule and against itself in a batch."""
        self._progress.begin("off", "the rule")
        together = self._asker.ask(lambda: None, self.base, is_caching=False)
        bests = {id(request): self._best(request, other) for request, other in zip(self.base, together.of, strict=True)}
        row = Row("off", "the rule", note=f"noise {self.report.noise:.1e}")
        self.report.rows.append(row)
        if self.report.noise > SHARE * self._spread:
            self._add(row, bug("off", row.check, self.base[0], "log-probability", "one forward", "its steps"))
        for request in self.everything:
            if id(request) not in bests:
                bests[id(request)] = self._best(request)
            self._check_rule(row, request, bests[id(request)])
        self._compare("off", "mixed batches", self.base, together)
        self._draw(None)

    def _best(self, request: ProofRequest, other: CompletionOutput | None = None) -> np.ndarray:  # [token]
        """Return the token that the rule draws at each place of a plain answer, from one forward over the whole text.
        With the answer that came in a batch, it also measures the noise, and how far the logits spread."""
        self._progress.show()
        plain = self._plain[id(request)]
        if not plain.token_ids:
            return np.zeros(0, int)
        logits = self._judge.logits(request, plain.token_ids)
        if other is not None:
            self._spread = max(self._spread, float(logits.std(axis=-1).max()))
            logs = logits - log_sum_exp(logits)
            for i, found in enumerate(plain.logprobs or ()):
                ids = [token_id for token_id, _ in found.top]
                self._note_noise(np.array([value for _, value in found.top]) - logs[i, ids])
            for ours, theirs in zip(plain.logprobs or (), other.logprobs or (), strict=False):
                if ours.token_id != theirs.token_id:
                    break  # all that comes after has another prefix
                known = dict(theirs.top)
                self._note_noise(np.array([value - known[i] for i, value in ours.top if i in known]))
        return self._judge.scores(request, plain.token_ids, logits).argmax(axis=-1)

    def _note_noise(self, differences: np.ndarray) -> None:
        self.report.noise = max(self.report.noise, float(np.abs(differences).max(initial=0.0)))
        self.report.num_compared += differences.size

    def _check_rule(self, row: Row, request: ProofRequest, best: np.ndarray) -> None:
        """Check that every token of a plain answer is the one that the rule draws."""
        answer = self._plain[id(request)]
        row.num_answers += 1
        if answer.finish_reason not in ("stop", "length"):
            self._add(row, bug("off", row.check, request, "error", "an answer", answer.error or answer.finish_reason))
        row.num_tokens += len(answer.token_ids)
        if not (wrong := np.flatnonzero(best != np.array(answer.token_ids, int))).size:
            return
        at = int(wrong[0])
        tokens = int(best[at]), answer.token_ids[at]
        self._add(row, self._judge.judge("off", row.check, request, answer, answer, at, *tokens))

    def _check(
        self, way: str, check: str, script: Script, requests: Sequence[ProofRequest], **options: Any
    ) -> tuple[Row, ProofAnswers]:
        """Compare the answers to these requests with those of plain decoding. `options` are those of `_answer`."""
        self._progress.begin(way, check)
        answers = self._asker.ask(script, requests, **options)
        return self._compare(way, check, requests, answers), answers

    def _check_way(self, tree: Tree) -> None:
        way = describe(tree)
        alone = self.base if _is_by_head_alone(tree) else self.first  # to compare drafts, or it takes half as long
        _, fresh = self._check(way, "alone", lambda: tree, alone, is_caching=False, is_alone=True)
        row, hits = self._check(way, "prefix hits", lambda: tree, self.base, is_caching=True, is_alone=True)
        _note_events(row, hits.stats.num_prefix_hits, f"{hits.stats.num_prefix_hits:,} tokens hit")
        _, together = self._check(way, "mixed batches", lambda: tree, self.everything, is_caching=False)
        self._in_few_pages(way, "preemption", lambda: tree, self.base)
        if _is_by_head_alone(tree):
            control = _Steps()
            for ours, theirs in zip(fresh.drafts, together.drafts, strict=False):
                control.compare(ours, theirs)
            self._compare_drafts(way, "after prefix hits", hits, fresh, control)
            self._check_stretch(tree, control)
        self._draw(tree)

    def _check_any(self, trees: Sequence[Tree]) -> None:
        """Check steps that are each done in another way, with all options in a batch, and with sequences that are
        preempted. An option's state must be there again when its sequence goes on, perhaps in another way."""
        dice = random.Random(self.size.seed)
        ways = [None, *trees]
        name = "any way at each step"
        if len(trees) == 1:
            name = f"{describe(trees[0])} or off at each step"
        self._in_few_pages(name, "preemption, all options", lambda: dice.choice(ways), self.everything)

    def _in_few_pages(self, way: str, check: str, script: Script, requests: Sequence[ProofRequest]) -> None:
        """Check answers in so few pages that sequences give theirs back, wait, and go on later. The shorter half
        is asked once more by itself, since pages for the longest request are enough for several short ones."""
        shapes, shorter = self._asker.runner.shapes, _shorter(requests)
        self._progress.begin(way, check)
        runs, pages = [], []
        for some, spare in ((shorter, 0), (requests, 1)):
            pages.append(spare + max(-(-request.num_tokens // shapes.page_size) for request in some))
            runs.append(self._asker.ask(script, some, is_caching=True, num_pages=pages[-1]))
        row = self._compare(way, check, [*shorter, *requests], joined(runs))
        number = sum(run.stats.num_preemptions for run in runs)
        where = f"{' and '.join(map(str, pages))} pages"
        if shapes.num_ranks > 1:
            where += f" of each of {shapes.num_ranks} data ranks"
        _note_events(row, number, f"{number} preemptions in {where}")

    def _check_stretch(self, tree: Tree, control: _Steps) -> None:
        """Check plain steps that are followed by speculative ones: the drafter must stand where it would if it had
        been there always."""
        way = describe(tree)
        self._progress.begin(way, "after plain steps")
        length = self.size.max_tokens // 3
        late, fresh = [], []
        for request in self.first:
            steps = itertools.chain(itertools.repeat(None, length), itertools.repeat(tree))
            # the script is asked once for all steps of a call, and is to be asked for each
            late.append(self._asker.ask(steps.__next__, [request], is_caching=False, most_steps=1))
            # the prompt of the fresh run ends before the token that is the root when speculation begins
            prompt = (*request.prompt, *self._plain[id(request)].token_ids[:length])
            params = dataclasses.replace(request.params, max_tokens=self.size.max_tokens - length)
            fresh.append(self._asker.ask(lambda: tree, [ProofRequest(request.name, prompt, params)], is_caching=False))
        late, fresh = joined(late), joined(fresh)
        self._compare(way, "after plain steps", self.first, late)
        self._compare_drafts(way, "after plain steps", late, fresh, control)

    def _compare_drafts(self, way: str, what: str, found: ProofAnswers, fresh: ProofAnswers, control: _Steps) -> None:
        """Check that the same tokens were proposed as by runs that begin anew. A drafter that lacks entries proposes
        others, which costs acceptance and changes no answer."""
        steps = _Steps()
        for ours, theirs in zip(found.drafts, fresh.drafts, strict=True):
            steps.compare(ours, theirs)
        taus = [each.acceptance_of_drafts.tau for each in (found, fresh)]
        found_text = f"{steps.differences} of {len(found.of)} answers, tau {taus[0]:.2f}; of fresh runs {taus[1]:.2f}"
        self.report.tests.append(Test(way, f"other drafts {what}", found_text, steps.p_value(control)))

    # Comparison.

    def _compare(self, way: str, check: str, requests: Sequence[ProofRequest], answers: ProofAnswers) -> Row:
        row = Row(way, check, acceptance=answers.acceptance)
        self.report.rows.append(row)
        for request, answer in zip(requests, answers.of, strict=True):
            row.num_answers += 1
            row.num_tokens += len(answer.token_ids)
            if mismatch := self._judge.find(way, check, request, self._plain[id(request)], answer):
                self._add(row, mismatch)
        return row

    def _add(self, row: Row, mismatch: Mismatch) -> None:
        row.num_ties += mismatch.verdict == "tie"
        row.num_bugs += mismatch.verdict == "bug"
        self.report.mismatches.append(mismatch)

    # The distribution.

    def _draw(self, tree: Tree | None) -> None:
        """Draws at temperature 1 from one prompt with many seeds: chi-square tests against the target's own softmax
        (`draws`), and the tokens beside those of plain decoding with the same seeds."""
        way = describe(tree)
        self._progress.begin(way, "distribution")
        prompt = min(self.prompts, key=len)
        if tree is None:
            requests = draw_requests(prompt, self.size.draws, 1, self.size.seed)
            answers = self._asker.ask(lambda: None, requests, is_caching=True).of
            self._test_draws(way, "first token", prompt, answers, 0)
            self._drawn = draw_requests(prompt, num_answers(self.size.draws), 1 + COUNTED_TOKENS, self.size.seed)
        found = self._asker.ask(lambda: tree, self._drawn, is_caching=True)
        if tree is None:
            self._plain |= {id(request): answer for request, answer in zip(self._drawn, found.of, strict=True)}
        else:
            self._compare(way, "distribution", self._drawn, found)
        self._test_draws(way, "next tokens", prompt, found.of, 1)

    def _test_draws(
        self, way: str, what: str, prompt: Sequence[int], answers: Sequence[CompletionOutput], start: int
    ) -> None:
        """Test how the tokens from `start` on of these answers were drawn. All are of the same length."""
        if broken := [answer for answer in answers if answer.finish_reason != "length"]:
            why = broken[0].error or broken[0].finish_reason
            found = f"{len(broken)} of {len(answers)} answers are not whole: {why}"
            self.report.tests.append(Test(way, f"distribution of {what}", found, 0.0))
            return
        cells = self._judge.cells(prompt, [answer.token_ids for answer in answers])
        counted = np.concatenate([each[start:] for each in cells])
        self.report.tests.append(chi_square(way, what, places(counted)))


def _note_events(row: Row, number: int, note: str) -> None:
    """Note how often the event that a check is about has happened. Where it never has, nothing was tested."""
    row.is_tested, row.note = number > 0, note
    if not number:
        row.note = f"not tested: {note}"


def _shorter(requests: Sequence[ProofRequest]) -> list[ProofRequest]:
    """Return the half of the requests that have the fewest tokens."""
    return sorted(requests, key=lambda request: request.num_tokens)[: -(-len(requests) // 2)]


def _is_by_head_alone(tree: Tree) -> bool:
    """Return whether a tree depends on its own sequence alone. A lookup does not: it finds more, the more has been
    answered."""
    return tree.uses_head and not tree.lookup
