"""The plain twin of every fast path in this room: NumPy, loops, no cleverness. Tests hold the two equal."""

import numpy as np

from specserve.kernels.attention import PagedPrefix
from specserve.kernels.matmul import BlockedMatrix, QuantizedMatrix


def attend(
    q: np.ndarray,  # [batch, n, head, head_dim]
    k: np.ndarray,  # [batch, m, kv_head, head_dim]
    v: np.ndarray,  # [batch, m, kv_head, head_dim]
    mask: np.ndarray,  # [batch or 1, n, m] bool
    prefix: PagedPrefix | None = None,
) -> np.ndarray:  # [batch, n, head, head_dim]; NaN where a query sees no key
    """`attention.attend`: for every query, a softmax over the keys that it sees."""
    batch, n, num_heads, _ = q.shape
    group = num_heads // k.shape[2]
    out = np.full(q.shape, np.nan, np.float32)
    for b in range(batch):
        past_k, past_v = _committed(prefix, b) if prefix is not None else (k[b, :0], v[b, :0])
        for i in range(n):
            seen = np.flatnonzero(mask[b if len(mask) > 1 else 0, i])
            for head in range(num_heads):
                keys = np.concatenate([past_k[:, head // group], k[b, seen, head // group]])
                values = np.concatenate([past_v[:, head // group], v[b, seen, head // group]])
                if len(keys):
                    out[b, i, head] = _softmax(keys @ q[b, i, head] * q.shape[-1] ** -0.5) @ values
    return out


def attend_rollout(
    q: np.ndarray,  # [batch, seq, head, head_dim]
    k: np.ndarray,  # [batch, seq, kv_head, head_dim]
    v: np.ndarray,
    mask: np.ndarray,  # [batch, seq, seq] bool
    steps_k: tuple[np.ndarray, ...],  # each [batch, seq, kv_head, head_dim]
    steps_v: tuple[np.ndarray, ...],
) -> np.ndarray:  # [batch, seq, head, head_dim]
    """`attention.attend_rollout`: the keys of all steps laid side by side, of later steps each slot sees its own."""
    own = np.broadcast_to(np.eye(q.shape[1], dtype=bool), mask.shape)
    return attend(
        q,
        np.concatenate([k, *steps_k], axis=1),
        np.concatenate([v, *steps_v], axis=1),
        np.concatenate([mask] + [own] * len(steps_k), axis=2),
    )


def matmul(x: np.ndarray, weight: BlockedMatrix | QuantizedMatrix) -> np.ndarray:  # [..., d_in] -> [..., d_out]
    """`matmul.matmul` of a matrix that was cut or quantised: put together again, then multiplied."""
    if isinstance(weight, BlockedMatrix):
        return x @ np.concatenate(list(np.asarray(weight.blocks)), axis=1)
    plain = np.asarray(weight.values).astype(np.float32)
    for i in range(plain.shape[0]):
        plain[i] *= np.asarray(weight.scale)[i // weight.block]
    return x @ plain


def _committed(prefix: PagedPrefix, b: int) -> tuple[np.ndarray, np.ndarray]:  # each [seen, kv_head, head_dim]
    """The entries of one sequence that its queries see, page after page."""
    table, length = np.asarray(prefix.page_table)[b], int(prefix.lens[b])
    k_pages, v_pages = np.asarray(prefix.k_pages), np.asarray(prefix.v_pages)
    page_size = v_pages.shape[2]
    where = [(table[i // page_size], i % page_size) for i in range(prefix.first, length)]
    empty = np.zeros((0, v_pages.shape[1], v_pages.shape[3]), v_pages.dtype)
    keys = [k_pages[page, :, :, offset][None] for page, offset in where]
    values = [v_pages[page, :, offset][None] for page, offset in where]
    return np.concatenate([empty, *keys]), np.concatenate([empty, *values])


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
