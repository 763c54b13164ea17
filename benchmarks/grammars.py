"""What a grammar costs a step, and what it does to acceptance.

Run from the checkout: `python benchmarks/grammars.py`. Held-out questions of pydoc are answered by the bundled pair in
turns: freely; under a grammar that allows everything, whose answers are the same, so that the difference is the cost of
the masks and of the two programs that a constrained step takes; and under a JSON schema.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass

from specserve import LLM, SamplingParams
from specserve.eval.prompts import load_chats
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="1,8", help="prompts at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--speculation", default="chain:3")
    options = parser.parse_args()
    print(
        "| clients | speculation | | ms for each step | to free | tau | same answers |\n|---|---|---|---|---|---|---|"
    )
    with LLM(speculation=options.speculation, constrained=True, max_slots=8, max_model_len=1024, progress=False) as llm:
        render = llm.tokenizer.render_chat
        for clients in map(int, options.clients.split(",")):
            chats = load_chats("pydoc", clients * options.rounds, history=0)
            prompts = [render(chat) for chat in chats]
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
    main()
