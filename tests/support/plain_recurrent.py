"""Plain recurrent layers: one sequence, one path, in float64, around the kernels' plain twins."""

import jax
import numpy as np

from specserve.kernels import reference
from specserve.models.config import LayerKind, ModelConfig
from specserve.models.mixers.delta import DeltaNet
from specserve.models.mixers.lightning import LightningAttention, slopes
from specserve.models.mixers.mamba import Mamba
from specserve.models.mixers.recurrent import Recurrent, State
from specserve.models.mixers.short_conv import ShortConv


def plain(
    params: Recurrent, config: ModelConfig, kind: LayerKind, x: np.ndarray, seen: State, first: int
) -> tuple[np.ndarray, State]:
    """x [n, d_model] after `seen` (leaves without batch) -> out [n, d_model] and the state after it. The first token
    stands at position `first`."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    state = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), seen)
    x = np.asarray(x, np.float64)
    if isinstance(params, DeltaNet):
        return _delta(params, config, x, state)
    if isinstance(params, ShortConv):
        out, inputs = reference.convolve((x @ params.k) * (x @ params.v), params.conv, state.conv[0])
        return (x @ params.q) * out @ params.o, State(None, (inputs,))
    if isinstance(params, Mamba):
        return _mamba(params, config, x, state)
    return _lightning(params, config, kind.slope_scale, x, state, first)


def _delta(p: DeltaNet, config: ModelConfig, x: np.ndarray, state: State) -> tuple[np.ndarray, State]:
    delta, n = config.delta, len(x)
    assert delta is not None
    weights = p.conv if len(p.conv) == 3 else np.split(p.conv[0], np.cumsum([p.q.shape[1], p.k.shape[1]]))
    raws = (x @ p.q, x @ p.k, x @ p.v)
    convolved = [reference.convolve(*each) for each in zip(raws, weights, state.conv, strict=True)]
    q, k, v = (_silu(y) for y, _ in convolved)
    q, k = (y.reshape(n, delta.num_k_heads, delta.k_dim) for y in (q, k))
    q, k = (y / np.sqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    beta = _sigmoid(x @ p.beta)
    to_decay = x if p.decay_down is None else x @ p.decay_down
    # one column, or one for each channel
    raw = (to_decay @ p.decay + p.decay_bias).reshape(n, delta.num_v_heads, -1)
    rate = np.exp(p.log_rate).reshape(-1, 1)
    log_decay = delta.decay_bound * _sigmoid(rate * raw) if delta.decay_bound else -rate * np.log1p(np.exp(raw))
    v = v.reshape(n, delta.num_v_heads, delta.v_dim)
    out, matrix = reference.recur(q * delta.k_dim**-0.5, k, v, log_decay, beta, state.matrix)
    gate = ((x if p.gate_down is None else x @ p.gate_down) @ p.gate).reshape(out.shape)
    out = _rms(out, config.norm_eps) * p.norm * (_sigmoid(gate) if delta.by_channel else _silu(gate))
    return out.reshape(n, -1) @ p.o, State(matrix, tuple(seen for _, seen in convolved))


def _mamba(p: Mamba, config: ModelConfig, x: np.ndarray, state: State) -> tuple[np.ndarray, State]:
    sizes, n = config.mamba, len(x)
    assert sizes is not None
    assert p.conv_bias is not None
    ends = np.cumsum([p.v.shape[1], p.k.shape[1]])
    raws, weights, biases = (x @ p.v, x @ p.k, x @ p.q), np.split(p.conv, ends), np.split(p.conv_bias, ends)
    convolved = [reference.convolve(*each) for each in zip(raws, weights, state.conv, strict=True)]
    v, k, q = (_silu(y + bias) for (y, _), bias in zip(convolved, biases, strict=True))
    v, k, q = v.reshape(n, sizes.num_heads, -1), *(y.reshape(n, sizes.num_groups, -1) for y in (k, q))
    step = np.log1p(np.exp(x @ p.decay + p.decay_bias))
    log_decay = (-np.exp(p.log_rate) * step)[..., None]
    out, matrix = reference.recur(q, k, v * step[..., None], log_decay, None, state.matrix)
    out = (out + p.skip[:, None] * v).reshape(n, -1) * _silu(x @ p.gate)
    out = _rms(out.reshape(n, sizes.num_groups, -1), config.norm_eps).reshape(n, -1) * p.norm
    return out @ p.o, State(matrix, tuple(seen for _, seen in convolved))


def _lightning(
    p: LightningAttention, config: ModelConfig, slope_scale: float, x: np.ndarray, state: State, first: int
) -> tuple[np.ndarray, State]:
    lightning, n = config.lightning, len(x)
    assert lightning is not None
    q, k, v = (
        (x @ weight + bias).reshape(n, lightning.num_heads, lightning.head_dim)
        for weight, bias in ((p.q, p.q_bias), (p.k, p.k_bias), (p.v, p.v_bias))
    )
    q = _turn(_rms(q, config.norm_eps) * p.q_norm, lightning.rotary_dim, config.rope.theta, first)
    k = _turn(_rms(k, config.norm_eps) * p.k_norm, lightning.rotary_dim, config.rope.theta, first)
    rates = slope_scale * slopes(lightning.num_heads)
    log_decay = np.broadcast_to(-rates[:, None], (n, lightning.num_heads, 1))
    out, matrix = reference.recur(q * lightning.head_dim**-0.5, k, v, log_decay, None, state.matrix)
    out = _rms(out.reshape(n, lightning.num_norm_groups, -1), config.norm_eps).reshape(n, -1) * p.norm
    return (out * _sigmoid(x @ p.gate)) @ p.o + p.o_bias, State(matrix, ())


def _turn(x: np.ndarray, rotary_dim: int, theta: float, first: int) -> np.ndarray:  # [n, head, head_dim]
    half = rotary_dim // 2
    positions = first + np.arange(len(x))[:, None, None]
    turned = (x[..., :half] + 1j * x[..., half:rotary_dim]) * np.exp(
        1j * positions * theta ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag, x[..., rotary_dim:]], axis=-1)


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)
