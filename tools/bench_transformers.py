"""transformers' own `generate` on a target, greedy, one stream: a yardstick for plain decoding (`oracle` extra)."""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM

from specserve.checkpoints.source import resolve_target
from specserve.eval.prompts import load_questions
from specserve.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="pydoc")
    parser.add_argument("--bench", default="pydoc")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    folder: Path = resolve_target(args.target).folder
    tokenizer = Tokenizer.load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rates = []
    for question in load_questions(args.bench, args.limit):
        prompt = torch.tensor([tokenizer.render_chat([{"role": "user", "content": question.turns[0]}])])
        begin = time.perf_counter()
        out: Any = model.generate(prompt, max_new_tokens=args.max_tokens, do_sample=False)
        rates.append((out.shape[1] - prompt.shape[1]) / (time.perf_counter() - begin))
    print(f"transformers generate, float32: {statistics.median(rates[1:]):.0f} tokens/s (median over prompts)")


if __name__ == "__main__":
    main()
