"""What a grammar costs a step, and what it does to acceptance.

Run from the checkout: `python benchmarks/grammars.py`. Questions, of the bundled pair held-out ones of pydoc, are
answered in turns: freely; under a grammar that allows everything, whose answers are the same, so that the difference is
the cost of the masks and of the two programs that a constrained step takes; and under a JSON schema.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from over_http import CONTEXT, MARGIN, processor, questions
from served_flags import add_served, numbers, positive, run

from specserve import LLM, SamplingParams
from specserve.serve.requests.request import GrammarSpec
from specserve.speculative.acceptance import Acceptance

SCHEMA = {
    "type": "object",
    "properties": {
        "summary": {"type": "string", "maxLength": 400},
        "parameters": {"type": "array", "items": {"type": "string", "maxLength": 80}, "maxItems": 6},
        "raises": {"type": "boolean"},
    },
    "required": ["summary", "parameters", "raises"],
    "additionalProperties": False,
}
ARMS = {
    "free": None,
    "everything is allowed": GrammarSpec("regex", r"(?s:.*)"),
    "JSON schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
}


@dataclass(frozen=True)
class Round:
    """One arm's answers to one batch of prompts."""

    token_ids: list[tuple[int, ...]]
    milliseconds: float  # for each target forward of a sequence, that of its batch mates counted with it
    stats: Acceptance


def measure(llm: LLM, prompts: list[list[int]], grammar: GrammarSpec | None, max_tokens: int) -> Round:
    """Answer all prompts at once, greedily."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, grammar=grammar)
    start = time.perf_counter()
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    seconds = time.perf_counter() - start - max(output.stats.seconds_to_first_token for output in outputs)
    num_steps = max(output.stats.num_steps for output in outputs)
    total = sum((output.stats for output in outputs), Acceptance())
    return Round([output.token_ids for output in outputs], 1e3 * seconds / num_steps, total)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_served(parser)
    parser.add_argument("--clients", type=numbers, default="1,8", help="prompts at once")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--max-tokens", type=positive, default=96)
    parser.add_argument("--speculation", default="chain:3")
    return run(parser, answer_all)


def answer_all(options: argparse.Namespace, target: Path) -> None:
    """Print the table."""
    print(f"{processor()}; {target}\n")
    print(
        "| clients | speculation | | ms for each step | to free | tau | same answers |\n|---|---|---|---|---|---|---|"
    )
    settings = {"constrained": True, "max_slots": max(8, *options.clients), "max_model_len": CONTEXT, "progress": False}
    with LLM(options.target, options.draft, speculation=options.speculation, **settings) as llm:
        for clients in options.clients:
            longest = CONTEXT - options.max_tokens - MARGIN
            prompts = questions(target, options.bench, clients * options.rounds, longest, history=0)
            found: dict[str, list[Round]] = {name: [] for name in ARMS}
            for number in range(options.rounds):
                batch = prompts[number * clients :][:clients]
                for name, grammar in ARMS.items():
                    found[name].append(measure(llm, batch, grammar, options.max_tokens))
            for name, rounds in found.items():
                ratio = statistics.median(
                    ours.milliseconds / free.milliseconds for ours, free in zip(rounds, found["free"], strict=True)
                )
                same = sum(
                    a == b
                    for ours, free in zip(rounds, found["free"], strict=True)
                    for a, b in zip(ours.token_ids, free.token_ids, strict=True)
                )
                middle = statistics.median(each.milliseconds for each in rounds)
                tau = sum((each.stats for each in rounds), Acceptance()).tau
                print(
                    f"| {clients} | {options.speculation} | {name} | {middle:.2f} | {ratio:.2f} | {tau:.2f} "
                    f"| {same} of {clients * options.rounds} |"
                )


if __name__ == "__main__":
    sys.exit(main())
