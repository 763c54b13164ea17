"""The judge of a difference: where an answer begins to differ from that of plain decoding, and whether that is a tie
or a bug."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specserve.checkpoints.load import Target
from specserve.eval.verify.draws import cells_of
from specserve.eval.verify.report import Kind, Mismatch, ProofReport, Verdict
from specserve.eval.verify.requests import NUM_LOGPROBS, ProofRequest
from specserve.eval.verify.rule import WholeText, rule_scores
from specserve.serve.engine.options import bad_sequences
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.completion import CompletionOutput
from specserve.serve.requests.grammars import Grammars
from specserve.speculative.tree import Tree
from specserve.tokenizer import Tokenizer

LOGPROB_SLACK = 8  # times the measured noise, which is the largest of thousands of differences: no right one comes near
NUM_NUDGES = 64  # with which a tie is looked for
TEXTS_AT_ONCE = 8


@dataclass(frozen=True)
class ProofSubject:
    """The target and the groups of ways to speculate that are put to the proof, and the forward by which answers are
    judged."""

    target: Target
    tokenizer: Tokenizer | None
    whole_text: WholeText
    groups: Sequence["Group"]


@dataclass(frozen=True)
class Group:
    """The ways to speculate that one runner has together, beside plain decoding, and the function that makes the
    runner with all its programs. There is only one runner at a time, because each packs the weights anew."""

    trees: Sequence[Tree]
    open: Callable[[], Runner]


class Judge:
    """Judges answers. The noise is that of the report, so it is measured before anything is judged."""

    def __init__(self, bench: ProofSubject, report: ProofReport) -> None:
        self.bench, self.report = bench, report
        self._cells: dict[tuple[int, ...], np.ndarray] = {}  # by answer to the prompt of the draws

    def find(
        self, way: str, check: str, request: ProofRequest, plain: CompletionOutput, answer: CompletionOutput
    ) -> Mismatch | None:
        """The first difference from plain decoding's answer, if there is one."""
        if answer.finish_reason not in ("stop", "length"):
            return bug(way, check, request, "error", "an answer", answer.error or answer.finish_reason)
        pairs = enumerate(zip(plain.token_ids, answer.token_ids, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is not None:
            return self.judge(way, check, request, plain, answer, at, plain.token_ids[at], answer.token_ids[at])
        ends = [(len(each.token_ids), each.finish_reason, each.stop_reason, each.text) for each in (plain, answer)]
        if ends[0] != ends[1]:
            ours, theirs = (f"{number} tokens, {why} {what or ''}: {text[-20:]!r}" for number, why, what, text in ends)
            return bug(way, check, request, "end", ours, theirs, min(ends[0][0], ends[1][0]))
        for i, (ours, theirs) in enumerate(zip(plain.logprobs or (), answer.logprobs or (), strict=True)):
            if not abs(ours.logprob - theirs.logprob) <= LOGPROB_SLACK * self.report.noise:
                logs = (f"log p = {each.logprob:.6f}" for each in (ours, theirs))
                found = bug(way, check, request, "log-probability", *logs, position=i)
                return dataclasses.replace(found, plain_top=ours.top, other_top=theirs.top)
        return None

    def judge(
        self,
        way: str,
        check: str,
        request: ProofRequest,
        plain: CompletionOutput,
        answer: CompletionOutput,
        at: int,
        a: int,
        b: int,
    ) -> Mismatch:
        """Judge a difference. It is a tie if the rounding of products can make the rule draw b in place of its own
        choice, and otherwise a bug. `a` is the token that was drawn otherwise."""
        prefix = plain.token_ids[: at + 1]
        logits = self.logits(request, prefix)
        row = self.scores(request, prefix, logits)[at]
        params, noise = request.params, self.report.noise
        stretch = max(params.repetition_penalty, 1 / params.repetition_penalty) / (params.temperature or 1.0)
        lead = float(row.max() - row[b])
        is_tie = lead <= 2 * noise * stretch
        rng = np.random.default_rng(at)
        if noise and not np.isfinite(lead):  # top_p and the like cut it off
            for _ in range(NUM_NUDGES):
                nudged = logits + rng.uniform(-noise, noise, logits.shape).astype(np.float32)
                is_tie = is_tie or int(self.scores(request, prefix, nudged)[at].argmax()) == b
        verdict: Verdict = "tie" if is_tie else "bug"
        return Mismatch(
            *(way, check, request.name, "token", at, self._spell(a), self._spell(b), lead, verdict),
            plain_top=_top(plain, at, logits[at]),
            other_top=_top(answer, at),
        )

    def _spell(self, token_id: int) -> str:
        if self.bench.tokenizer is None:
            return str(token_id)
        return f"{token_id} {self.bench.tokenizer.decode([token_id], skip_special_tokens=False)!r}"

    def logits(self, request: ProofRequest, output_ids: Sequence[int]) -> np.ndarray:  # [n, vocab]
        [logits] = self.bench.whole_text.logits([[*request.prompt, *output_ids]])
        return logits[len(request.prompt) - 1 : -1]

    def scores(self, request: ProofRequest, output_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:  # [n, vocab]
        params, target, tokenizer = request.params, self.bench.target, self.bench.tokenizer
        mask = None
        if params.grammar is not None:
            assert tokenizer is not None, "a grammar without a tokenizer is refused"
            mask = Grammars(tokenizer, target.config.vocab_size, target.eos_ids).compile(params.grammar)()
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends.update(target.eos_ids)
        words = bad_sequences(params.bad_words, tokenizer)
        return rule_scores(
            request.prompt, params, output_ids, logits, stop_ids=sorted(ends), bad_sequences=words, mask=mask
        )

    def cells(self, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the cells of each answer, [token, 2] (see `draws.cells_of`). An answer's text is run once,
        however often it is asked for."""
        missing = sorted({tuple(answer) for answer in answers} - self._cells.keys())
        by_text: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for answer in missing:
            by_text.setdefault(answer[:-1], []).append(answer)  # by all that comes before the last token
        texts = list(by_text)
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = texts[start : start + TEXTS_AT_ONCE]
            padded = [*some, *some[:1] * (TEXTS_AT_ONCE - len(some))]  # one shape, one program
            found = self.bench.whole_text.logits([[*prompt, *text] for text in padded])
            for text, logits in zip(some, found, strict=False):
                rows = logits[len(prompt) - 1 :].astype(np.float64)
                probs = np.exp(rows - log_sum_exp(rows))
                self._cells |= {answer: cells_of(probs, answer) for answer in by_text[text]}
        return [self._cells[tuple(answer)] for answer in answers]


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=-1, keepdims=True)
    return top + np.log(np.exp((logits - top).astype(np.float64)).sum(axis=-1, keepdims=True))


def _top(answer: CompletionOutput, at: int, logits: np.ndarray | None = None) -> tuple[tuple[int, float], ...]:
    """Return the most likely tokens at a place of an answer with their log-probabilities, as they were reported there,
    or from these logits [vocab] where nothing was."""
    if answer.logprobs and at < len(answer.logprobs):
        return answer.logprobs[at].top
    if logits is None:
        return ()
    logs = logits - log_sum_exp(logits)
    return tuple((int(i), float(logs[i])) for i in np.argsort(-logs)[:NUM_LOGPROBS])


def bug(way: str, check: str, request: ProofRequest, kind: Kind, plain: str, other: str, position: int = 0) -> Mismatch:
    """Make the record of a difference that no rounding explains."""
    return Mismatch(way, check, request.name, kind, position, plain, other, None, "bug")
