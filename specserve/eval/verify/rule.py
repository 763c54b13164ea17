"""The token that the target itself would have drawn at each place of an answer, by one forward over the whole text and
the rule of drawing. This file reads no pages and knows no trees and no batches, so it can judge the code that
does."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.mesh import on_mesh
from specserve.models import target as target_model
from specserve.models.cache import Cache, Prefix
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.serve.engine.options import sampler_rows, token_rows
from specserve.serve.requests.request import Request, SamplingParams, TokenMask
from specserve.speculative import sampling
from specserve.speculative.sampling import Nodes, SamplerRows, TokenRows

PADDED_TO = 64  # tokens, so that texts of many lengths take few programs
_ANSWERS_PADDED_TO = 32


class WholeText:
    """The target's logits of whole texts, by one forward over nothing that is committed."""

    def __init__(self, target: Target, mesh: Mesh | None = None) -> None:
        self._params = target.params
        self._run = jax.jit(functools.partial(on_mesh(mesh, text_logits), target.config))

    def logits(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the logits [n, vocab] float32 of each text. Row i is that of the token after token i."""
        longest = max(map(len, texts))
        rows = np.zeros((len(texts), -(-longest // PADDED_TO) * PADDED_TO), np.int32)  # padding changes nothing
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        found = np.asarray(self._run(self._params, jnp.asarray(rows)))
        return [each[: len(text)] for each, text in zip(found, texts, strict=True)]


def text_logits(config: ModelConfig, params: TargetParams, token_ids: jax.Array) -> jax.Array:  # [batch, n, vocab]
    """Return the target's logits of whole texts, [batch, n] int32. Where keys and values are kept rounded
    (`ModelConfig.cache_dtype`), they are so here: the texts follow an empty cache."""
    batch, n = token_ids.shape
    position_ids = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), token_ids.shape)
    cache, prefix = None, None
    if config.cache_dtype:
        cache = Cache.zeros(config, num_slots=batch, num_pages=1, page_size=PADDED_TO)
        none = jnp.zeros(batch, jnp.int32)
        prefix = Prefix(none[:, None], none, slots=jnp.arange(batch, dtype=jnp.int32))
    mask = jnp.tri(n, dtype=bool)[None]
    out = target_model.forward(params, config, token_ids, position_ids, mask, cache=cache, prefix=prefix)
    return target_model.logits(params, config, out.hidden_states)


def rule_scores(
    prompt: Sequence[int],
    params: SamplingParams,  # with a seed, unless it is greedy
    output_ids: Sequence[int],
    logits: np.ndarray,  # [n, vocab] float32, the target's own before each token of the answer
    *,
    stop_ids: Sequence[int] = (),  # every id that would end it
    bad_sequences: Sequence[tuple[int, ...]] = (),  # each spells a bad word
    mask: TokenMask | None = None,  # in its first state; it is not changed
) -> np.ndarray:  # [n, vocab] float32
    """Return the scores whose argmax each token of an answer is, by the rule of drawing (`speculative.sampling`), for
    which the answer is a chain below the prompt's last token."""
    n, vocab = logits.shape
    seed = params.seed if params.temperature else 0
    assert seed is not None, "which noise it was drawn with is not known"
    size = -(-n // _ANSWERS_PADDED_TO) * _ANSWERS_PADDED_TO  # padding changes nothing, and few shapes compile
    token_ids, padded = np.zeros(size, np.int32), np.zeros((size, vocab), np.float32)
    token_ids[:n] = [prompt[-1], *output_ids][:n]
    padded[:n] = logits
    depths = np.arange(size, dtype=np.int32)
    request = Request("", tuple(prompt), params, 1, seed, lambda _delta: None)
    named = token_rows(request, (), sorted(stop_ids), bad_sequences, vocab)
    parents, recent = np.maximum(depths - 1, 0), np.full(sampling.MAX_BAD_TOKENS - 1, -1, np.int32)
    nodes = Nodes(token_ids[None], parents[None], depths[None], np.tri(size, dtype=bool)[None], recent[None])  # type: ignore[arg-type]
    allowed = None
    if mask is not None:
        allowed = mask.masks(parents.tolist(), token_ids.tolist())[None]
    rows = sampler_rows(params, seed, len(prompt))
    args = rows, named or TokenRows.zeros(1, vocab), nodes, padded[None], len(prompt) + depths[None], allowed
    return np.array(_scores(*jax.tree.map(jnp.asarray, args)))[0, :n]


@jax.jit
def _scores(
    rows: SamplerRows,
    tokens: TokenRows,
    nodes: Nodes,
    logits: jax.Array,  # [1, n, vocab]
    position_ids: jax.Array,  # [1, n] int32
    allowed: jax.Array | None,
) -> jax.Array:  # [1, n, vocab]
    logits = sampling.constrain(rows, tokens, nodes, logits, position_ids, allowed)
    noise = sampling.noise(rows, position_ids, jnp.arange(logits.shape[-1], dtype=jnp.uint32))
    return sampling.truncate(rows, sampling.scale(rows, logits)) + noise
