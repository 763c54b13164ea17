"""What rounded keys and values change: the target's logits over texts, and how many tokens its head gets accepted.

Run from the checkout: `python benchmarks/kv_cache.py`. Logits are those of prompts, of the bundled target held-out
ones of pydoc, that run in chunks over
pages, each dtype of the pages against plain ones. Tau is that of a chain over the same prompts, greedily answered.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from over_http import processor, questions
from served_flags import add_served, positive, run

from specserve import LLM, SamplingParams
from specserve.checkpoints.load import Target, load_target
from specserve.kernels import native
from specserve.mesh import default_dtype
from specserve.models.cache import Cache, Prefix
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams, forward, logits
from specserve.serve.launch import CACHE_DTYPES
from specserve.speculative.acceptance import Acceptance

CHUNK, PAGE_SIZE, MAX_LEN = 32, 16, 512


@functools.partial(jax.jit, static_argnums=1)
@native.serving
def _chunk(
    params: TargetParams, config: ModelConfig, cache: Cache, token_ids: jax.Array, start: jax.Array
) -> tuple[Cache, jax.Array]:
    index = start + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    table = jnp.arange(cache.num_pages, dtype=jnp.int32)[None]
    mask = jnp.tril(jnp.ones((1, CHUNK, CHUNK), bool))
    out = forward(params, config, token_ids, index, mask, cache=cache, prefix=Prefix(table, start[None]))
    return cache.write(out.new, table, index, jnp.ones_like(index, bool)), logits(params, config, out.hidden_states)


def text_logits(target: Target, token_ids: Sequence[int], cache_dtype: str) -> np.ndarray:  # [n, vocab]
    """The logits of a text that runs in chunks, each over the pages of those before it."""
    config = dataclasses.replace(target.config, cache_dtype=cache_dtype)
    num_pages = -(-len(token_ids) // PAGE_SIZE)
    cache, found = Cache.zeros(config, num_slots=0, num_pages=num_pages, page_size=PAGE_SIZE), []
    for start in range(0, len(token_ids) - CHUNK + 1, CHUNK):
        ids = jnp.asarray([token_ids[start : start + CHUNK]], jnp.int32)
        cache, rows = _chunk(target.params, config, cache, ids, jnp.int32(start))
        found.append(np.asarray(rows[0], np.float32))
    return np.concatenate(found)


def compare(plain: np.ndarray, other: np.ndarray) -> tuple[float, float, float, float]:
    """Root mean square and largest difference of a logit, KL divergence in nats, and the share of equal best tokens."""

    def log_probs(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    off, p, q = other - plain, log_probs(plain), log_probs(other)
    kl = float((np.exp(p) * (p - q)).sum(axis=-1).mean())
    same = float((plain.argmax(axis=-1) == other.argmax(axis=-1)).mean())
    return float(np.sqrt(np.square(off).mean())), float(np.abs(off).max()), kl, same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_served(parser)
    parser.add_argument("--prompts", type=positive, default=12)
    parser.add_argument("--max-tokens", type=positive, default=128)
    parser.add_argument("--speculation", default="chain:3")
    parser.add_argument("--dtypes", default="float32,bfloat16,int8,fp8", help="as of specserve serve --kv-cache-dtype")
    return run(parser, compare_all)


def compare_all(args: argparse.Namespace, folder: Path) -> None:
    """Print what each dtype changes."""
    target = load_target(folder, dtype=default_dtype())
    prompts = questions(folder, args.bench, args.prompts, MAX_LEN - args.max_tokens)
    print(f"{processor()}; {folder}")
    texts = [prompt[: len(prompt) // CHUNK * CHUNK] for prompt in prompts if len(prompt) >= CHUNK]
    plain = [text_logits(target, text, "") for text in texts]
    print(f"{sum(map(len, plain))} positions of {len(texts)} prompts; logits vary by {np.concatenate(plain).std():.2f}")
    for name in args.dtypes.split(","):
        found = [text_logits(target, text, CACHE_DTYPES.get(name, target.config.cache_dtype)) for text in texts]
        rms, largest, kl, same = compare(np.concatenate(plain), np.concatenate(found))
        print(
            f"{name:5} logits off by {rms:.4f} rms, {largest:.3f} at most; KL {kl:.1e}; same best token {same:.2%}",
            flush=True,
        )
        sizes = {"max_slots": 1, "max_model_len": MAX_LEN, "kv_cache_dtype": name}  # few programs to compile
        with LLM(args.target, args.draft, speculation=args.speculation, progress=False, **sizes) as llm:
            asked = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
            outputs = llm.generate(prompts, asked)
        stats = [output.outputs[0].stats for output in outputs]
        found = sum(stats, Acceptance())
        print(f"{name:5} tau {found.tau:.3f} over {found.num_steps} steps", flush=True)


if __name__ == "__main__":
    sys.exit(main())
