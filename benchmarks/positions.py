"""How much of a head's gain is left far behind the length that it was trained at, with a window and without: tau of
answers to prompts of growing length.

Run from the checkout: train two heads, `specserve train --target pydoc --seq-len 128 --output plain` and the same with
`--window 64 --output windowed`, then `python benchmarks/positions.py --draft plain,windowed --trained 128`. Prompts are
held-out chats of pydoc with more and more answered questions before the last one. Greedy answers are the same tokens
whatever the head, so all heads are measured at the same places.
"""

import argparse
from collections.abc import Sequence

from served_flags import device

from specserve import LLM, SamplingParams
from specserve.checkpoints.source import BUNDLED
from specserve.eval.prompts import load_chats, render
from specserve.speculative.acceptance import Acceptance

MOST_HISTORY = 40  # answered questions before the last one


def prompts_by_length(llm: LLM, lengths: Sequence[int], number: int) -> dict[int, list[list[int]]]:
    """Return so many prompts for each length: the longest that end at most there, and behind half of it."""
    found: dict[int, list[list[int]]] = {length: [] for length in lengths}
    for chat in load_chats("pydoc", 60 * number, MOST_HISTORY):
        prompt = render(llm.tokenizer, chat)
        length = next((each for each in lengths if each // 2 < len(prompt) <= each), 0)
        if length and len(found[length]) < number:
            found[length].append(prompt)
    return found


def measure(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Acceptance:
    """The acceptance of the answers to these prompts."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    return sum((each.outputs[0].stats for each in outputs), Acceptance())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=BUNDLED)
    parser.add_argument("--draft", required=True, help="folders of heads, with commas")
    parser.add_argument("--trained", type=int, default=128, help="tokens of the rows that they were trained on")
    parser.add_argument("--times", default="1,2,4,8,16", help="lengths of prompts, in multiples of that")
    parser.add_argument("--prompts", type=int, default=24, help="of each length")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    lengths = [given.trained * int(each) for each in given.times.split(",")]
    print(f"{device()}; {given.target}; tau by the length of the prompt\n")
    print("| head | " + " | ".join(f"{length // 2} to {length} tokens" for length in lengths) + " |")
    print("|---" * (len(lengths) + 1) + "|")
    for draft in given.draft.split(","):
        settings = {"max_model_len": lengths[-1] + given.max_tokens, "max_slots": 4}
        with LLM(given.target, draft, speculation="chain:3", progress=False, **settings) as llm:
            prompts = prompts_by_length(llm, lengths, given.prompts)
            taus = [measure(llm, prompts[length], given.max_tokens).tau for length in lengths]
        print(f"| {draft} | " + " | ".join(f"{tau:.2f}" for tau in taus) + " |", flush=True)


if __name__ == "__main__":
    main()
