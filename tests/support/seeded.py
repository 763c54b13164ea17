"""Checkpoints that need no file: a tensor is drawn from its name and shape, far from values that hide what it does."""

import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

# Where a unit normal draw scaled by the fan-in would not show what the tensor does. First match.
_SPREAD = (  # (in the name, mean, standard deviation)
    ("norm.weight", 1.0, 0.3),  # also of norms that multiply by 1 + weight
    ("expert_bias", 0.0, 0.3),  # sigmoid scores lie between 0 and 1
    ("e_score_correction_bias", 0.0, 0.3),
    ("gate_up_proj_bias", 0.0, 5.0),  # GPT-OSS clamps at 7
    ("A_log", 0.0, 0.5),
    ("router.scale", 12.0, 3.0),  # Gemma 4 divides it by the root of the width
    ("layer_scalar", 1.0, 0.3),
    ("per_expert_scale", 1.0, 0.3),
)


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The same float32 values on every machine: `RandomState`'s stream is frozen."""
    z = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode())).standard_normal(shape)
    if name.endswith("tid2eid"):  # DeepSeek-V4: other ones of eight experts for each token
        return (np.floor(4 * np.abs(z[:, :1])).astype(np.int64) + np.arange(shape[1])) % 8
    for part, mean, deviation in _SPREAD:
        if part in name:
            return (mean + deviation * z).astype(np.float32)
    if len(shape) == 1:  # biases, sinks, time steps
        return (0.5 * z).astype(np.float32)
    if "embed" in name:
        return (0.7 * z).astype(np.float32)
    sharp = 2.0 if name == "lm_head.weight" or ".gate.weight" in name or ".router.weight" in name else 1.0
    # GPT-OSS keeps its experts [expert, in, out]; every other matrix is [..., out, in]
    fan_in = shape[-2] if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else shape[-1]
    return (sharp * z / math.sqrt(fan_in)).astype(np.float32)


def write_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: str = "float32") -> None:
    tensors = {name: draw(name, shape, seed) for name, shape in shapes.items()}
    rounded = {name: each.astype(jnp.dtype(dtype)) for name, each in tensors.items() if each.dtype == np.float32}
    save_file(tensors | rounded, folder / "model.safetensors")


def tokens(vocab_size: int, seed: int) -> np.ndarray:  # [64] int32
    return np.random.RandomState(seed).randint(0, vocab_size, 64).astype(np.int32)
