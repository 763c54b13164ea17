"""The weights as compiled steps take them. On CPU the layout of a matrix decides how fast few rows pass through it."""

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.sharding import Mesh

from specserve.checkpoints.head import Head
from specserve.checkpoints.load import Target
from specserve.kernels.matmul import Weight, block
from specserve.mesh import whole
from specserve.models.draft import DraftParams, token_embedding
from specserve.models.target import TargetParams, fuse_for_cpu
from specserve.speculative.propose import Draft
from specserve.speculative.step import Weights
from specserve.speculative.vocab import DraftVocab

Params = TypeVar("Params", TargetParams, DraftParams)

NARROW_ROWS = range(2, 9)  # steps of so many rows run on blocked matrices on CPU (docs/log)
PRODUCTS = frozenset(  # fields of parameters; others are looked up, or taken apart before they are multiplied by
    ("q", "k", "v", "o", "gate", "up", "down", "head", "fc", "q_down", "q_nope", "q_rope", "kv_down")
)
NARROW_BYTES = 2**30  # of weights; where they are larger, memory for a second copy of them is dearer than time


@dataclass(frozen=True)
class Layouts:
    """The weights as programs take them: `narrow` for steps of few rows on CPU, `wide` for the others."""

    wide: Weights
    narrow: Weights

    def for_rows(self, num_rows: int) -> Weights:
        """What a step of so many rows, nodes of all sequences together, takes."""
        return self.narrow if num_rows in NARROW_ROWS else self.wide


def make_layouts(target: Target, head: Head | None, mesh: Mesh | None = None) -> Layouts:
    """Parameters as the steps take them. On CPU the layout follows the number of rows of a step: one row, or dozens,
    stream plain matrices best, a few stream blocked ones (see `kernels.matmul`). What is spread over a mesh stays as
    it was loaded."""
    is_cpu = jax.default_backend() == "cpu" and mesh is None
    params = fuse_for_cpu(target.params) if is_cpu else target.params
    draft = None
    if head is not None:
        embedding = token_embedding(head.params, target.params.embedding)
        target_ids = jax.device_put(head.target_ids, whole(mesh))
        draft = Draft(head.params, DraftVocab(target_ids), embedding)
    wide = Weights(params, draft)
    if not is_cpu or sum(leaf.nbytes for leaf in jax.tree.leaves(wide)) > NARROW_BYTES:
        return Layouts(wide, wide)
    narrow_draft = None if draft is None else dataclasses.replace(draft, params=_block_matrices(draft.params))
    return Layouts(wide, Weights(_block_matrices(params), narrow_draft))


def _block_matrices(params: Params) -> Params:
    """Block the matrices that rows are multiplied by as they are (`kernels.matmul`)."""

    def cut(path: tuple, leaf: jax.Array) -> Weight:
        is_product = jax.tree_util.keystr(path[-1:], simple=True) in PRODUCTS
        return block(leaf) if leaf.ndim == 2 and is_product else leaf

    return jax.tree_util.tree_map_with_path(cut, params)
