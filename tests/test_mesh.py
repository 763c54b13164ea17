"""A mesh over the test's four devices, and one that does not fit."""

import jax
import pytest

from specserve.errors import ConfigError
from specserve.mesh import make_mesh, sharding


def test_logical_axes_spread_over_the_mesh() -> None:
    mesh = make_mesh(data=2, tensor=2)
    array = jax.device_put(jax.numpy.zeros((8, 6)), sharding(mesh, ("embed", "heads")))
    assert {shard.data.shape for shard in array.addressable_shards} == {(8, 3)}


def test_a_mesh_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 8 devices, this machine has 4"):
        make_mesh(data=4, tensor=2)
