"""The entries that an EAGLE-3 network writes of tokens whose hidden states are known: what it keeps of a sequence.

The layers below the last run for them, since those above consume their outputs; the last one runs only for entries that
predict, which is the affair of whoever proposes.
"""

import jax
import jax.numpy as jnp

from specserve.drafters.eagle.config import Eagle3Config
from specserve.drafters.eagle.model import DraftInputs, Eagle3Params, draft_entries, draft_inputs, fuse_features
from specserve.drafters.follow import FIRST_ENTRY
from specserve.kernels.attention import attend
from specserve.models.attention import KV
from specserve.models.cache import Cache, Pages, Prefix
from specserve.pytree import pytree
from specserve.speculative.vocab import DraftVocab


@pytree
class ReadyHead:
    """A head ready to propose."""

    params: Eagle3Params
    vocab: DraftVocab
    embedding: jax.Array  # [vocab, d_model], see `model.token_embedding`


def empty_cache(config: Eagle3Config, *, num_pages: int, page_size: int) -> Cache:
    """Make empty pages for the head's layers."""
    layers = tuple(
        Pages.zeros(num_pages, page_size, config.num_kv_heads, config.head_dim, config.dtype)
        for _ in range(config.num_layers)
    )
    return Cache(layers, num_pages, page_size)


def extend(
    draft: ReadyHead,
    config: Eagle3Config,
    pages: Cache,
    page_table: jax.Array,  # [batch, max_pages], for writing
    read_table: jax.Array,  # [batch, pages], the part that attention reads
    token_ids: jax.Array,  # [batch, n]
    aux_hidden_states: jax.Array,  # [batch, n, taps * target_d_model], of the position before each token
    index: jax.Array,  # [batch, n], of the entries, consecutive
    is_valid: jax.Array,  # [batch, n] bool, the first so many
) -> tuple[Cache, DraftInputs, KV]:  # what the entries bring to the last layer, and their keys and values there
    """Write the draft's entries of tokens whose features are known. The layers below the last run for all of them,
    the last for none: a head of one layer attends to nothing here."""
    features = fuse_features(draft.params, config, aux_hidden_states)
    inputs = draft_inputs(draft.params, config, draft.embedding, token_ids, features, index)
    is_entry = index >= FIRST_ENTRY
    offset = jnp.arange(token_ids.shape[1])
    mask = (offset[:, None] >= offset) & is_entry[:, None]
    before = Prefix(read_table, index[:, 0], FIRST_ENTRY)
    top, entries = draft_entries(
        draft.params, config, inputs, lambda i, q, k, v: attend(q, k, v, mask, pages.attended(i, before))
    )
    is_kept = is_valid & is_entry
    if config.num_layers > 1:
        # always true, but known only once the lower layers have run: see `speculative.step._has_run`
        is_kept &= jnp.isfinite(top.residual[..., 0])
    return pages.write(entries, page_table, index, is_kept), top, entries[-1]
