"""The decoder layers of a fresh head, as the settings ask for them, and the target's where they say nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.errors import ConfigError
from specserve.models.config import LayerKind, ModelConfig
from specserve.models.rope import plain_rope


def layers_like(target: ModelConfig, settings: Any, num_layers: int) -> dict[str, Any]:
    """Return the fields of the `ModelConfig` of a head's layers, but their width. Beside latent attention a head is a
    plain one, with keys as wide as the target's own without position. Raises ConfigError."""
    num_heads = settings.num_heads or target.num_heads
    num_kv_heads = settings.num_kv_heads or min(num_heads if target.latent else target.num_kv_heads, num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"draft.num_heads is {num_heads}, which {num_kv_heads} draft.num_kv_heads do not divide")
    return {
        "vocab_size": target.vocab_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": target.latent.nope_dim if target.latent else target.head_dim,
        "d_ff": settings.d_ff or target.d_ff,
        "max_len": target.max_len,
        "norm_eps": target.norm_eps,
        "rope": plain_rope(target.rope),
        "layers": _kinds(settings, num_layers),
    }


def _kinds(settings: Any, num_layers: int) -> tuple[LayerKind, ...]:
    """Return the kinds of the layers, which differ by their windows. Raises ConfigError."""
    if any(not 0 <= i < num_layers for i in settings.window_layers):
        raise ConfigError(f"draft.window_layers {settings.window_layers}: the head has layers 0..{num_layers - 1}")
    if settings.window_layers and not settings.window:
        raise ConfigError(f"draft.window_layers {settings.window_layers} have no window; give draft.window too")
    slides = settings.window_layers or range(num_layers)
    return windowed([settings.window if i in slides else 0 for i in range(num_layers)])


def check_taps(aux_layers: tuple[int, ...], target: ModelConfig) -> None:
    """Raises ConfigError where the target has no such layers."""
    if any(not 0 <= i < target.num_layers for i in aux_layers):
        raise ConfigError(f"draft.aux_layers {aux_layers}: the target has layers 0..{target.num_layers - 1}")


def windowed(windows: Sequence[int]) -> tuple[LayerKind, ...]:
    """Return the kinds of layers with these windows, in tokens; 0: none."""
    return tuple(LayerKind(window=window) for window in windows) if any(windows) else ()


def windows_of(config: ModelConfig) -> tuple[int, ...]:
    """Return the window of each layer, in tokens; 0 means none."""
    return tuple(config.kind(i).window for i in range(config.num_layers))


def facts_of(config: ModelConfig) -> Mapping[str, Any]:
    """Return the shape of the layers by the names of `registry.DraftSettings`."""
    sizes, windows = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads"), windows_of(config)
    return {
        **{name: getattr(config, name) for name in sizes},
        "window": max(windows),
        "window_layers": tuple(i for i, window in enumerate(windows) if window),
    }
