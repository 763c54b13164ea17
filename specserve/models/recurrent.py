"""Placeholder until the recurrent layers land."""

from typing import Any

import jax

from specserve.models.config import LayerKind, ModelConfig
from specserve.pytree import pytree


@pytree
class State:
    pass


@pytree
class DeltaNet:
    pass


@pytree
class LightningAttention:
    pass


def spec(config: ModelConfig, kind: LayerKind, prefix: str) -> Any:
    raise NotImplementedError


def init_state(config: ModelConfig, kind: LayerKind, batch: int) -> State:
    raise NotImplementedError


def mix(params: Any, config: ModelConfig, kind: LayerKind, x: jax.Array, seen: Any, context: Any) -> Any:
    raise NotImplementedError


def advance(state: State, new: Any, is_kept: jax.Array) -> State:
    raise NotImplementedError
