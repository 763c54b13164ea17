"""`specserve verify` passes what is right, and finds what is planted: each fault changes one thing of a step."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from engines import VOCAB, Letters, make_runner
from spread import mesh_of, spread_head, spread_target

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.eval.verify import rule
from specserve.eval.verify.asker import Asker
from specserve.eval.verify.judge import Group, ProofSubject
from specserve.eval.verify.proof import ProofSize, Prover
from specserve.eval.verify.report import ProofReport
from specserve.eval.verify.rule import WholeText
from specserve.eval.verify.runners import make_bench
from specserve.serve.launch import Models
from specserve.serve.programs.runner import Runner
from specserve.speculative import sampling, step
from specserve.speculative.slot_state import StepResult

PROMPTS = [tuple(random.Random(i).choices(range(3, VOCAB), k=9 + 5 * i)) for i in range(5)]
PLAN = ProofSize(max_tokens=15, draws=80)


def prove(runner: Runner, target: Target, *ways: str, size: ProofSize = PLAN, num_prompts: int = 2) -> ProofReport:
    report = ProofReport()
    trees = [tree for way in ways if (tree := parse_speculation(way))]
    bench = ProofSubject(target, Letters(), WholeText(target), [Group(trees, lambda: runner)])  # type: ignore[arg-type]
    Prover(bench, PROMPTS[:num_prompts], size, report).run()
    return report


def test_a_right_engine_passes(runner: Runner, tiny_target: Target) -> None:
    report = prove(runner, tiny_target, "tree:3x3x8")
    assert not report.num_bugs, report.to_json()
    assert len(report.tests) == 5
    assert 0 < report.noise < 1e-4
    for row in report.rows:
        assert row.num_answers > 3 < row.num_tokens, row
        if row.way != "off":
            assert row.acceptance.num_accepted, f"{row}: nothing was accepted, so nothing was tested"
    assert not report.untested, "preemptions and hits were to be tested"
    assert report.verdict.startswith("speculation changes nothing here")
    assert "tested" not in report.verdict


@pytest.mark.slow
def test_a_check_that_nothing_was_put_to_is_not_passed(
    runner: Runner, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here there are pages for all, and nothing that is cached."""
    right = Asker.ask

    def answer(self: Asker, *args: Any, num_pages: int | None = None, is_caching: bool = False, **more: Any) -> Any:
        del num_pages, is_caching
        return right(self, *args, is_caching=False, **more)

    monkeypatch.setattr(Asker, "ask", answer)
    report = prove(runner, tiny_target, "static:2x1", size=dataclasses.replace(PLAN, draws=40), num_prompts=1)
    assert not report.num_bugs
    assert [row.check for row in report.untested] == ["prefix hits", "preemption", "preemption, all options"]
    assert all(row.note.startswith("not tested: 0 ") for row in report.untested)
    assert "3 checks tested nothing (static:2x1: prefix hits, static:2x1: preemption, " in report.verdict
    assert [row["tested"] for row in report.to_json()["rows"]].count(False) == report.to_json()["untested"] == 3


@pytest.mark.slow
def test_every_check_is_put_to_each_data_rank() -> None:
    """Which has slots and pages of its own: with one sequence each, nothing would ever be put back."""
    mesh = mesh_of("data=4")
    models = Models("tiny", spread_target("dense", mesh), spread_head("dense", mesh), None, mesh=mesh)
    tree, report = parse_speculation("ngram:2"), ProofReport()
    assert tree is not None
    prompts = [prompt[: 4 + 3 * i] for i, prompt in enumerate(PROMPTS[:4])]
    Prover(make_bench(models, [tree], max_model_len=60), prompts, ProofSize(max_tokens=18, draws=40), report).run()
    assert not report.num_bugs, report.to_json()
    assert not report.untested, [(row.way, row.check, row.note) for row in report.untested]
    assert any("pages of each of 4 data ranks" in row.note for row in report.rows)


def test_a_wrong_bonus_token_is_found_and_called_a_bug(
    runner: Runner, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted where results are read, so that nothing compiles; the slow tests below plant faults in the step."""
    right = StepResult.emitted

    def wrong(self: StepResult, row: int) -> list[int]:
        *accepted, bonus = right(self, row)
        return [*accepted, (bonus + 1) % VOCAB if accepted else bonus]

    monkeypatch.setattr(StepResult, "emitted", wrong)
    report = prove(runner, tiny_target, "static:2x1", size=dataclasses.replace(PLAN, draws=40), num_prompts=1)
    found = [each for each in report.mismatches if each.verdict == "bug"]
    assert {each.kind for each in found} == {"token"}, report.rows
    assert "static:2x1" in {each.way for each in found} <= {"static:2x1", "static:2x1 or off at each step"}


@pytest.mark.slow
def test_a_draft_that_did_not_catch_up_is_found(
    runner: Runner, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs acceptance and changes no token."""
    monkeypatch.setattr(Runner, "_catch_up", lambda *_args: None)
    report = prove(runner, tiny_target, "chain:3", size=ProofSize(max_tokens=21, draws=80), num_prompts=5)
    assert [test.what for test in report.failed] == ["other drafts after plain steps"], report.tests
    assert not sum(row.num_bugs for row in report.rows)


@pytest.mark.slow
def test_a_rule_that_draws_too_coldly_is_found_by_its_distribution(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of drawing itself is wrong, so that every way agrees with it."""
    right, scores = sampling.noise, rule._scores.__wrapped__
    monkeypatch.setattr(sampling, "noise", lambda *args: right(*args) / 2)
    monkeypatch.setattr(rule, "_scores", jax.jit(lambda *args: scores(*args)))  # traced anew
    runner = make_runner(tiny_target, None, "off", "ngram:2", has_constrained=False)
    report = prove(runner, tiny_target, "ngram:2", size=ProofSize(max_tokens=9))
    assert not report.mismatches
    assert {(test.way, test.what) for test in report.failed} == {
        (way, f"distribution of {what}")
        for way, what in (("off", "first token"), ("off", "next tokens"), ("ngram:2", "next tokens"))
    }


Plant = Callable[[pytest.MonkeyPatch], None]


def _wrong_bonus(patch: pytest.MonkeyPatch) -> None:
    right = step.verify_chain

    def wrong(*args: Any) -> Any:
        verdict = right(*args)
        is_bonus = jnp.arange(verdict.token_ids.shape[1]) == verdict.n_accepted[:, None]
        is_full = verdict.n_accepted[:, None] == verdict.token_ids.shape[1] - 1
        moved = jnp.where(is_bonus & is_full, (verdict.token_ids + 1) % VOCAB, verdict.token_ids)
        return dataclasses.replace(verdict, token_ids=moved)

    patch.setattr(step, "verify_chain", wrong)


def _wrong_mask(patch: pytest.MonkeyPatch) -> None:
    right = step.ancestor_mask
    patch.setattr(step, "ancestor_mask", lambda *args: right(*args) | jnp.eye(9, k=-1, dtype=bool))


def _noise_by_node(patch: pytest.MonkeyPatch) -> None:
    right = step.sampling.sample
    patch.setattr(
        step.sampling,
        "sample",
        lambda rows, logits, position_ids: right(
            rows, logits, position_ids + 1000 * jnp.arange(position_ids.shape[1], dtype=jnp.int32)
        ),
    )


def _rejected_node(patch: pytest.MonkeyPatch) -> None:
    right = step._commit

    def wrong(config: Any, weights: Any, state: Any, now: Any, new: Any, committed: Any, after: Any, path: Any = None):
        if path is not None:  # the nodes as they stand in the tree, whichever were accepted
            path = jnp.broadcast_to(jnp.arange(path.shape[1]), path.shape)
        return right(config, weights, state, now, new, committed, after, path)

    patch.setattr(step, "_commit", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "way", "kinds"),
    [
        (_wrong_bonus, "chain:1", {"token"}),
        (_wrong_mask, "tree:3x3x8", {"token", "log-probability"}),
        (_noise_by_node, "tree:3x3x8", {"token"}),
        (_rejected_node, "tree:3x3x8", {"token", "log-probability"}),
    ],
)
def test_a_planted_fault_is_found_and_called_a_bug(
    tiny_target: Target, tiny_head: Head, monkeypatch: pytest.MonkeyPatch, plant: Plant, way: str, kinds: set[str]
) -> None:
    plant(monkeypatch)
    runner = make_runner(tiny_target, tiny_head, "off", way, has_constrained=False)
    report = prove(runner, tiny_target, way, size=dataclasses.replace(PLAN, draws=40))
    found = [each for each in report.mismatches if each.verdict == "bug"]
    assert found, report.rows
    assert {each.kind for each in found} <= kinds
    found_in = {each.way for each in found}
    assert {way} <= found_in <= {way, f"{way} or off at each step"}, "plain decoding is right"
    assert report.num_bugs >= len(found)
    assert all(len(each.plain_top) == len(each.other_top) == 5 for each in found if each.check != "distribution")
