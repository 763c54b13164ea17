"""Where what a step takes and gives lives: on one device, or spread over a mesh. What recurs is sent once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specserve.mesh import fitting, whole
from specserve.models.sharding import place_cache
from specserve.speculative.step import SlotState


@dataclasses.dataclass(frozen=True)
class Placement:
    """On a mesh the caches are spread by heads and a step's slots by batch; everything else that is no weight is whole
    on every device. Without one, JAX puts all of it on its default device."""

    mesh: Mesh | None

    @property
    def whole(self) -> NamedSharding | None:
        return whole(self.mesh)

    @property
    def devices(self) -> list[Any]:
        return jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)

    def put(self, host: Any) -> Any:
        """A pytree of NumPy arrays, whole."""
        return jax.device_put(host, self.whole)

    def scalar(self, value: int) -> jax.Array:
        return _put(value, np.int32, self.whole)

    def flag(self, value: bool) -> jax.Array:  # [1]
        return _put((value,), np.bool_, self.whole)

    def slots(self, slots: tuple[int, ...]) -> jax.Array:
        """What a step computes for its slots follows them: where the batch divides, each device has a part of it."""
        return _put(slots, np.int32, None if self.mesh is None else fitting(self.mesh, ("batch",), (len(slots),)))

    def state(self, make: Callable[[], SlotState]) -> SlotState | None:
        """Where the arrays of such a state live."""
        if self.mesh is None:
            return None
        state: Any = jax.eval_shape(make)
        draft = None if state.draft_cache is None else place_cache(state.draft_cache, self.mesh)
        places = jax.tree.map(lambda _leaf: self.whole, state)
        return dataclasses.replace(places, cache=place_cache(state.cache, self.mesh), draft_cache=draft)


@functools.lru_cache(maxsize=4096)
def _put(value: Any, dtype: type, place: NamedSharding | None) -> jax.Array:
    """The same slots run step after step: their array is made once, and a step then sends nothing to the device."""
    return jax.device_put(np.asarray(value, dtype), place)
