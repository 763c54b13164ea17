"""Plain versions of this room's fast paths, in NumPy with loops. Tests compare the fast paths with them."""

from typing import Any

import numpy as np

from specserve.kernels.matmul import BlockedMatrix, QuantizedMatrix
from specserve.kernels.paged import PagedPrefix
from specserve.kernels.pages import LARGEST


def attend(
    q: np.ndarray,  # [batch, n, head, head_dim]
    k: np.ndarray,  # [batch, m, kv_head, head_dim]
    v: np.ndarray,  # [batch, m, kv_head, v_dim]
    mask: np.ndarray,  # [batch or 1, n, m] bool
    prefix: PagedPrefix | None = None,
    *,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,  # [head]
    window: int = 0,
    position_ids: np.ndarray | None = None,  # [batch, m], of the new keys, where there is a window
) -> np.ndarray:  # [batch, n, head, v_dim]; NaN where a query sees no key
    """The plain `attention.attend`: for every query, a softmax over the keys that it sees, all of them as pages keep
    them."""
    if prefix is not None and prefix.pages.is_quantized:
        k = dequantize(*quantize(k, prefix.pages.k.dtype))
        v = k[..., : v.shape[-1]] if prefix.pages.values_are_keys else dequantize(*quantize(v, prefix.pages.k.dtype))
    elif prefix is not None:
        k, v = (x.astype(prefix.pages.k.dtype).astype(x.dtype) for x in (k, v))
    batch, n, num_heads, head_dim = q.shape
    group = num_heads // k.shape[2]
    out = np.full((batch, n, num_heads, v.shape[-1]), np.nan, np.float32)
    for b in range(batch):
        first, past = 0, (k[b, :0], v[b, :0])
        if prefix is not None:
            first, past = prefix.first, _committed(prefix, b, v.shape[-1])
        for i in range(n):
            seen = np.flatnonzero(mask[b if len(mask) > 1 else 0, i])
            old = np.arange(first, first + len(past[0]))
            if window:
                assert position_ids is not None
                position = position_ids[b, k.shape[1] - n + i]
                seen = seen[position - position_ids[b, seen] < window]
                old = old[position - old < window]
            for head in range(num_heads):
                keys = np.concatenate([past[0][old - first, head // group], k[b, seen, head // group]])
                values = np.concatenate([past[1][old - first, head // group], v[b, seen, head // group]])
                if len(keys):
                    scores = keys @ q[b, i, head] * head_dim**-0.5
                    scores = softcap * np.tanh(scores / softcap) if softcap else scores
                    sink = sinks[head : head + 1] if sinks is not None else scores[:0]
                    out[b, i, head] = _softmax(np.concatenate([scores, sink]))[: len(keys)] @ values
    return out


def quantize(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The plain `pages.quantize`, row by row."""
    largest = LARGEST[np.dtype(dtype)]
    data, scale = np.zeros(x.shape, dtype), np.zeros(x.shape[:-1], np.float32)
    for at in np.ndindex(scale.shape):
        scale[at] = np.maximum(np.abs(x[at]).max(), np.float32(1e-30)) * np.float32(1 / largest)
        row = x[at].astype(np.float32) * (1 / scale[at])
        data[at] = (np.rint(row) if dtype == np.int8 else row).clip(-largest, largest).astype(dtype)
    return data, scale


def dequantize(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The numbers that quantised ones stand for."""
    return data.astype(np.float32) * scale[..., None]


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


def _committed(prefix: PagedPrefix, b: int, v_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The committed keys and values from the first visible entry on, each [entry, kv_head, dim], page after page."""
    table, pages = np.asarray(prefix.page_table)[b], prefix.pages
    k_pages = np.asarray(pages.k).swapaxes(2, 3) if pages.layout == "columns" else np.asarray(pages.k)
    if pages.v_first:
        k_pages, v_pages = k_pages[..., : pages.v_first], k_pages[..., pages.v_first :]
    else:
        v_pages = None if pages.v is None else np.asarray(pages.v)
    if pages.k_scale is not None:
        k_pages = dequantize(k_pages, np.asarray(pages.k_scale))
    if v_pages is None:
        v_pages = k_pages[..., :v_dim]
    if pages.v_scale is not None:
        v_pages = dequantize(v_pages, np.asarray(pages.v_scale))

    def entries(array: np.ndarray) -> np.ndarray:  # [page, kv_head, page_size, dim]
        index = range(prefix.first, int(prefix.lens[b]))
        found = [array[table[i // pages.page_size], :, i % pages.page_size][None] for i in index]
        return np.concatenate([np.zeros((0, array.shape[1], array.shape[3]), np.float32), *found])

    return entries(k_pages), entries(v_pages)


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
