"""The rest of an engine: pauses and sleep, what they wait for, and what they wait for no more."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from engines import PATIENCE, Inbox, Reference, compile_programs, holding, make_runner, run, serving, submit, wait_until
from two_versions import firm_asks, updatable_engine

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.errors import ConfigError
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import Delta, FinishReason


def _wait_in_vain(inboxes: list[Any]) -> None:
    heard = [len(inbox.deltas) for inbox in inboxes]
    time.sleep(0.3)
    assert [len(inbox.deltas) for inbox in inboxes] == heard, "a paused engine goes on"


@pytest.mark.parametrize("mode", ["keep", "retract", "wait", "abort"])
def test_a_paused_engine_answers_later_as_if_it_had_not_paused(
    runner: Runner, tiny_target: Target, tiny_head: Head, old: Reference, new: Reference, mode: Any
) -> None:
    """What is asked meanwhile is taken, and a client that leaves meanwhile is let go."""
    asks = firm_asks(old, new)
    with serving(updatable_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        inboxes = [submit(engine, ask)[1] for ask in asks]
        for inbox in inboxes[:4]:
            inbox.wait_for_first()
        engine.pause(mode)
        assert engine.is_paused
        engine.pause("keep")  # again
        (request, left), (_, late) = submit(engine, asks[0]), submit(engine, asks[1])
        _wait_in_vain([*inboxes, late])
        request.cancel()
        assert left.wait().finish_reason == FinishReason.CANCELLED
        if mode in ("wait", "abort"):
            assert all(inbox.is_done for inbox in inboxes[:4])
        engine.resume()
        assert not engine.is_paused
        for ask, inbox in zip((*asks, asks[1]), (*inboxes, late), strict=True):
            old.check(ask, inbox, is_cancelled=mode == "abort" and inbox is not late)


@pytest.mark.parametrize("parts", [("kv_cache",), ("weights",), ("weights", "kv_cache")], ids=" ".join)
def test_an_engine_that_sleeps_gives_the_device_back_and_answers_later(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference, parts: Any
) -> None:
    """As RL code does it: the weights are brought back first, and updated, and then the cache."""
    asks = firm_asks(old, new)
    with serving(updatable_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        inboxes = [submit(engine, ask)[1] for ask in asks]
        inboxes[0].wait_for_first()
        served = engine.runner

        def on_device() -> list[bool]:
            weights = jax.tree.leaves(served.inputs.layouts.one)
            return [isinstance(jax.tree.leaves(each)[0], jax.Array) for each in (weights, served.state)]

        engine.sleep(parts)
        assert engine.is_sleeping
        assert on_device() == [True, "kv_cache" not in parts], "a CPU's weights are in the host's memory already"
        with pytest.raises(ConfigError, match=f"off the device: {', '.join(sorted(parts))}; wake it up first"):
            engine.resume()
        _wait_in_vain(inboxes)
        engine.wake(parts)
        assert not engine.is_sleeping
        assert not engine.is_paused
        assert on_device() == [True, True]
        for ask, inbox in zip(asks, inboxes, strict=True):
            old.check(ask, inbox)
        engine.sleep(parts)
        if "weights" in parts:
            with pytest.raises(ConfigError, match="the weights are off the device"):
                engine.update_weights(moved.params)
            engine.wake(["weights"])
        engine.update_weights(moved.params)
        engine.wake(["kv_cache"])
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            new.check(ask, inbox)
        for wrong in ([], ["gpu"]):
            with pytest.raises(ConfigError, match="expected some of weights, kv_cache"):
                engine.sleep(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="mode 'keep': expected one of abort, wait, retract"):
            engine.sleep(mode="keep")  # type: ignore[arg-type]


def test_one_change_after_another_is_made_while_the_cache_sleeps(
    tiny_target: Target, tiny_head: Head, moved: Target
) -> None:
    """Also behind one that brought programs of its own: float32 numbers in the place of such as are bfloat16's."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), tiny_target.params)
    first = dataclasses.replace(tiny_target, params=params)
    runner = make_runner(first, tiny_head, "chain:3", num_slots=2, has_constrained=False)
    compile_programs(runner)
    with serving(updatable_engine(runner, first, tiny_head, "chain:3")) as engine, ThreadPoolExecutor(1) as pool:
        engine.sleep(["kv_cache"])
        for number in ("1", "2"):
            assert pool.submit(engine.update_weights, moved.params).result(PATIENCE) == number
        pool.submit(engine.sleep, ["weights"]).result(PATIENCE)
        engine.wake(["weights", "kv_cache"])
        assert not engine.is_paused


@pytest.mark.parametrize("end", ["abort", "pause", "sleep"])
def test_what_a_change_waits_for_can_be_ended(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference, end: str
) -> None:
    """At once, and not only when it has ended by itself. What is asked behind the change is not ended in its place."""
    ask, inbox, late = firm_asks(old, new)[0], Inbox(), Inbox()
    with serving(updatable_engine(runner, tiny_target, tiny_head, "chain:3")) as engine, ThreadPoolExecutor(2) as pool:
        changes = engine._changes

        def hear(delta: Delta) -> None:
            inbox(delta)
            if len(inbox.deltas) == 1:  # the engine goes on once it is asked for both
                wait_until(lambda: not (changes._asked.empty() or changes._urgent.empty()))

        request = engine.submit(ask.prompt, ask.params, hear)
        inbox.wait_for_first()
        updating = pool.submit(engine.update_weights, moved.params, mode="drain")
        wait_until(lambda: not changes._asked.empty())
        if end == "abort":
            engine.submit(ask.prompt, ask.params, late)
            engine.abort(lambda each: each is request)
        else:
            {"pause": engine.pause, "sleep": lambda mode: engine.sleep(mode=mode)}[end]("abort")
        assert updating.result(PATIENCE) == "1"
        assert inbox.wait().finish_reason == FinishReason.ABORTED
        if end == "abort":
            new.check(ask, late)


def test_nothing_waits_for_an_end_that_cannot_come(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference
) -> None:
    """Of a paused engine: the change is refused, also where the pause came while it waited, and later ones are made."""
    asks = firm_asks(old, new)
    with serving(updatable_engine(runner, tiny_target, tiny_head, "chain:3")) as engine, ThreadPoolExecutor(1) as pool:
        inboxes = [submit(engine, asks[0], partial(holding, engine))[1], *(submit(engine, ask)[1] for ask in asks[1:])]
        inboxes[0].wait_for_first()
        engine.pause("keep")
        for wait in (lambda: engine.update_weights(moved.params, mode="drain"), lambda: engine.pause("wait")):
            with pytest.raises(ConfigError, match="paused, so nothing that has begun will end"):
                pool.submit(wait).result(PATIENCE)
        engine.resume()
        for ask, inbox in zip(asks, inboxes, strict=True):
            old.check(ask, inbox)
