"""What is found in the text of a compiled program."""

import re

import jax

from specserve.kernels.pages import Pages
from specserve.serve.programs.runner import Runner

COPIES = {"copy", "copy-start", "copy-done", "transpose", "slice-start", "dynamic-slice-start", "scatter"}


def copies_of_pages(text: str, runner: Runner) -> set[str]:
    """The operations of an optimised program that make an array of the size of a layer's pages anew, of those that move
    memory. A scatter is one on a TPU alone, whose compiler lays its result out otherwise than kernels do."""
    layers = runner.state.cache.layers
    arrays = [leaf for layer in layers if isinstance(layer, Pages) for leaf in (layer.k, layer.v) if leaf is not None]
    own = {",".join(map(str, shape)) for shape in {_on_each(array) for array in arrays}}
    made = {kind for shape in own for kind in re.findall(rf"= \(?\w+\[{shape}\]\S* (?:\S+ )*?([\w-]+)\(", text)}
    return made & COPIES


def _on_each(array: jax.Array) -> tuple[int, ...]:
    """The shape of an array's part on one device."""
    return array.sharding.shard_shape(array.shape)
