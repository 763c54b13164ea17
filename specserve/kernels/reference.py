"""Plain versions of this room's fast paths, in NumPy with loops. Tests compare the fast paths with them."""

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
    """The plain `attention.attend`: for every query, a softmax over the keys that it sees."""
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
    """The plain `rows.attend_rollout`: the keys of all rollout steps laid side by side. Of the later steps' keys each
    position sees its own."""
    own = np.broadcast_to(np.eye(q.shape[1], dtype=bool), mask.shape)
    return attend(
        q,
        np.concatenate([k, *steps_k], axis=1),
        np.concatenate([v, *steps_v], axis=1),
        np.concatenate([mask] + [own] * len(steps_k), axis=2),
    )


def matmul(x: np.ndarray, weight: BlockedMatrix | QuantizedMatrix) -> np.ndarray:  # [..., d_in] -> [..., d_out]
    """The plain `matmul.matmul` with a blocked or quantised matrix, which is first put together again."""
    if isinstance(weight, BlockedMatrix):
        return x @ np.concatenate(list(np.asarray(weight.blocks)), axis=1)
    plain = np.asarray(weight.values).astype(np.float32)
    for i in range(plain.shape[0]):
        plain[i] *= np.asarray(weight.scale)[i // weight.block]
    return x @ plain


def recur(
    q: np.ndarray,  # [n, k_head, k_dim], scaled
    k: np.ndarray,  # [n, k_head, k_dim]
    v: np.ndarray,  # [n, head, v_dim]
    log_decay: np.ndarray,  # [n, head, 1 or k_dim]
    beta: np.ndarray | None,  # [n, head]
    matrix: np.ndarray,  # [head, k_dim, v_dim]
) -> tuple[np.ndarray, np.ndarray]:  # o [n, head, v_dim] and the matrix after the last token
    """The plain `recurrence.recur` and `recurrence.advance` along one path of one sequence, token after token."""
    matrix, out = matrix.copy(), np.empty(v.shape, matrix.dtype)
    share = v.shape[1] // k.shape[1]
    for i in range(len(v)):
        for h in range(v.shape[1]):
            key, decayed = k[i, h // share], np.exp(log_decay[i, h])[:, None] * matrix[h]
            u = v[i, h] if beta is None else beta[i, h] * (v[i, h] - key @ decayed)
            matrix[h] = decayed + np.outer(key, u)
            out[i, h] = q[i, h // share] @ matrix[h]
    return out, matrix


def convolve(
    x: np.ndarray,  # [n, channel]
    weight: np.ndarray,  # [channel, 1, width]
    seen: np.ndarray,  # [width - 1, channel]
) -> tuple[np.ndarray, np.ndarray]:  # [n, channel] and the last width - 1 inputs
    """The plain `recurrence.convolve` along one path of one sequence, and the inputs that the next call will see."""
    inputs, width = np.concatenate([seen, x]), weight.shape[-1]
    out = [(inputs[i : i + width] * weight[:, 0].T).sum(axis=0) for i in range(len(x))]
    return np.stack(out), inputs[len(x) :]


def _committed(prefix: PagedPrefix, b: int) -> tuple[np.ndarray, np.ndarray]:  # each [seen, kv_head, head_dim]
    """The committed keys and values of one sequence that its queries see, page after page."""
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
