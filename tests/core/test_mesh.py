"""Meshes over the test's eight devices, what is spread over them, and what does not fit."""

import itertools
import re
from dataclasses import dataclass

import jax
import pytest
from jax.sharding import PartitionSpec

from specserve.errors import ConfigError
from specserve.mesh import (
    SERVING_AXES,
    Size,
    check_divides,
    fitting,
    free_memory,
    make_mesh,
    over_parts,
    parse_mesh,
    sharding,
    shardings,
    sum_parts,
)


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def test_logical_axes_spread_over_the_mesh() -> None:
    mesh = make_mesh(data=2, tensor=2)
    array = jax.device_put(jax.numpy.zeros((8, 6)), sharding(mesh, ("embed", "heads")))
    assert {shard.data.shape for shard in array.addressable_shards} == {(8, 3)}


def test_what_does_not_divide_is_whole_everywhere() -> None:
    mesh = make_mesh(tensor=4, expert=2)
    assert fitting(mesh, ("embed", "vocab"), (6, 12)) == sharding(mesh, ("embed", "vocab"))
    assert fitting(mesh, ("embed", "vocab"), (6, 13)) == sharding(mesh, ("embed", None))
    tree = {
        "q": Spec((6, 32), ("embed", "heads")),
        "k": Spec((6, 16), ("embed", "kv_heads")),
        "up": Spec((6, 4, 8), ("experts", "embed", "mlp")),
    }
    # 16 divides, and yet no device would have a whole one of two KV heads
    places = shardings(tree, mesh, {"heads": 4, "kv_heads": 2})
    assert places == {
        "q": sharding(mesh, ("embed", "heads")),
        "k": sharding(mesh, ("embed", None)),
        "up": sharding(mesh, ("experts", "embed", "mlp")),
    }


def test_devices_add_up_in_the_order_of_the_mesh() -> None:
    """So every process of a run, and each of its starts, compiles the same program."""
    with jax.set_mesh(make_mesh(data=2, tensor=2, expert=2)):
        for cut in itertools.permutations(["batch", "heads", "experts"]):
            added = over_parts(lambda x, cut=cut: sum_parts(x, cut), cut, PartitionSpec(), PartitionSpec())
            text = str(jax.make_jaxpr(added)(jax.numpy.ones(4)))
            (names,) = re.findall(r"psum\w*\[\s*axes=\(([^)]*)\)", text)
            assert names == "'data', 'fsdp', 'tensor', 'expert'", text


def test_meshes_are_read_in_any_order() -> None:
    mesh = parse_mesh("expert=2, tensor=4")
    assert mesh is not None
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "sequence": 1, "tensor": 4, "expert": 2}
    assert parse_mesh("") is parse_mesh("tensor=1,data=1") is None, "one device needs no mesh"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=2", "--mesh model=2: got 'model=2', expected data=N, fsdp=N, sequence=N, tensor=N, expert=N"),
        ("tensor", "got 'tensor', expected"),
        ("tensor=two", "got 'tensor=two', expected .* N a number of at least 1"),
        ("tensor=0", "got 'tensor=0', expected"),
        ("tensor=2,tensor=4", "got 'tensor=4', expected .* each at most once"),
        ("data=3,tensor=3", "data=3,tensor=3 needs 9 devices, this machine has 8"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_mesh(text)


def test_a_server_does_not_cut_sequences() -> None:
    with pytest.raises(ConfigError, match="got 'sequence=2', expected data=N, tensor=N, expert=N, each"):
        parse_mesh("sequence=2", SERVING_AXES)


def test_sizes_that_a_mesh_does_not_divide_are_refused_together() -> None:
    sizes = [Size("heads", "attention heads", 12), Size("mlp", "channels", 20), Size("mlp", "others", 16)]
    check_divides(make_mesh(data=2, tensor=4), sizes)
    with pytest.raises(ConfigError, match=r"has 12 attention heads, 20 channels, which tensor=8 does not.* 1, 2 or 4$"):
        check_divides(make_mesh(tensor=8), sizes)
    with pytest.raises(ConfigError, match="nothing that expert=2 would spread"):
        check_divides(make_mesh(expert=2), sizes)


def test_devices_share_the_memory_of_their_host() -> None:
    """On CPU."""
    assert 2**20 < free_memory() < 2**50
    assert free_memory(make_mesh(tensor=8)) < free_memory() / 4
