"""Everything at once: priorities, salts, shared prefixes, preemptions, cancellations, grammars, flushes, every kind of
step."""

import itertools
import random
import threading
import time

from engines import EOS, VOCAB, Ask, Dice, Letters, Reference, make_engine, serving, submit

from specserve.drafters.speculation import describe
from specserve.serve.engine.interface import EngineStats
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import FinishReason, SamplingParams


def _any_ask(rng: random.Random, families: list[list[int]]) -> Ask:
    prompt = rng.choice(families)[: rng.choice([8, 16, 17, 31])]
    prompt = prompt + rng.choices(range(VOCAB), k=rng.choice([0, 0, 1, 3, 9]))
    is_constrained = rng.random() < 0.2
    has_penalty = rng.random() < 0.3
    return Ask(
        tuple(prompt),
        SamplingParams(
            max_tokens=rng.choice([1, 2, 5, 12, 30, 50]),
            temperature=rng.choice([0.0, 0.7, 1.2]),
            seed=rng.getrandbits(63),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([0, 0, 12]),
            presence_penalty=rng.choice([-0.5, 1.0]) if has_penalty else 0.0,
            repetition_penalty=1.3 if has_penalty else 1.0,
            logit_bias={EOS: rng.choice([1.0, 4.0])} if rng.random() < 0.3 else {},
            bad_words=[rng.choice(Letters.alphabet)] if rng.random() < 0.2 else (),
            speculation=rng.choice([None, None, None, 0, 1]),
            logprobs=rng.choice([None, None, 2]),
            ignore_eos=rng.random() < 0.5,
        ),
        salt=rng.choice(["", "", "", "alice", "bob"]),
        priority=rng.choice([0, 0, 0, -1, 3]),
        is_constrained=is_constrained,
    )


def storm(
    runner: Runner,
    reference: Reference,
    num_requests: int,
    num_distinct: int,
    num_pages: int | None = None,  # the engine believes to have as many
    most_steps: int | None = None,
) -> tuple[EngineStats, set[FinishReason | None]]:
    """Serve all of that. When it is over nothing is held, nothing was compiled, and every answer is the one that plain
    decoding gives to that request alone. Returns the counts of the engine, and how requests have ended."""
    rng = random.Random(num_requests)
    families = [rng.choices(range(VOCAB), k=60) for _ in range(4)]
    asked = reference.firm(_any_ask(rng, families) for _ in itertools.count())
    distinct = list(itertools.islice(asked, num_distinct))
    options = {"num_pages": num_pages, "most_steps": most_steps, "max_queue": num_requests, "prefers_cached": True}
    engine = make_engine(runner, Dice(1), **options)
    asks = [rng.choice(distinct) for _ in range(num_requests)]
    cancelled = set(rng.sample(range(num_requests), k=num_requests // 8))
    too_late = min(cancelled)  # this one is cancelled when its answer is whole
    inboxes = []
    with serving(engine):
        for i, ask in enumerate(asks):
            request, inbox = submit(engine, ask)
            inboxes.append(inbox)
            if i in cancelled and i != too_late:
                threading.Timer(rng.random() * 0.3, request.cancel).start()
            if rng.random() < 0.1:
                time.sleep(rng.random() * 0.05)
            if i == too_late:
                inbox.wait()
                request.cancel()
            if rng.random() < 0.01:
                engine.flush_cache()
        for i, (ask, inbox) in enumerate(zip(asks, inboxes, strict=True)):
            reference.check(ask, inbox, is_cancelled=i in cancelled - {too_late})
    stats, reasons = engine.stats(), [inbox.wait().finish_reason for inbox in inboxes]
    assert set(stats.num_steps_by_speculation) == {describe(tree) for tree in runner.shapes.trees}
    assert stats.num_rebuilds == 0
    assert reasons[too_late] != FinishReason.CANCELLED
    return stats, set(reasons)
