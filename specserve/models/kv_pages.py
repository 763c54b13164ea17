"""The paged KV cache: one pair of arrays per layer, one page table for all of them.

A forward never writes: it reads committed pages and returns the keys and values of its own tokens. What is kept of
them (all of a prefill chunk, the accepted path of a tree) is written once, by `write`. So compacting a tree costs no
copy, a rejected node never touches a page, and the buffers can be donated.
"""

import jax
import jax.numpy as jnp

from specserve.kernels.attention import PagedPrefix
from specserve.pytree import pytree, static

LayerKV = tuple[jax.Array, jax.Array]  # keys, values: [batch, n, kv_head, head_dim]


@pytree
class KVPages:
    k: tuple[jax.Array, ...]  # one [page, kv_head, head_dim, page_size] for each layer, as `attend` wants it
    v: tuple[jax.Array, ...]  # one [page, kv_head, page_size, head_dim] for each layer

    @classmethod
    def zeros(
        cls, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> "KVPages":
        return cls(
            k=tuple(jnp.zeros((num_pages, num_kv_heads, head_dim, page_size), dtype) for _ in range(num_layers)),
            v=tuple(jnp.zeros((num_pages, num_kv_heads, page_size, head_dim), dtype) for _ in range(num_layers)),
        )

    @property
    def page_size(self) -> int:
        return self.k[0].shape[3]

    @property
    def num_pages(self) -> int:
        return self.k[0].shape[0]

    def layer(self, i: int, prefix: "Prefix") -> PagedPrefix:
        """What attention in layer i sees of the committed sequences."""
        return PagedPrefix(self.k[i], self.v[i], prefix.page_table, prefix.lens, prefix.first, prefix.is_exact)

    def write(
        self,
        new: tuple[LayerKV, ...],  # one per layer
        page_table: jax.Array,  # [batch, max_pages] int32
        index: jax.Array,  # [batch, n] int32, the sequence index of each new entry
        is_kept: jax.Array,  # [batch, n] bool
    ) -> "KVPages":
        """Write the kept entries; the others, and those past the allocated pages, are dropped."""
        page_slot = index // self.page_size
        in_table = is_kept & (page_slot >= 0) & (page_slot < page_table.shape[1])
        page = jnp.take_along_axis(page_table, jnp.clip(page_slot, 0, page_table.shape[1] - 1), axis=1)
        page = jnp.where(in_table, page, self.num_pages)  # out of range: dropped by the scatter
        offset = index % self.page_size

        return KVPages(
            k=tuple(
                pages.at[page, :, :, offset].set(k.astype(pages.dtype), mode="drop")
                for pages, (k, _) in zip(self.k, new, strict=True)
            ),
            v=tuple(
                pages.at[page, :, offset].set(v.astype(pages.dtype), mode="drop")
                for pages, (_, v) in zip(self.v, new, strict=True)
            ),
        )


@pytree
class Prefix:
    """Which committed entries of which sequences a forward sees."""

    page_table: jax.Array  # [batch, pages] int32, as many as attention reads
    lens: jax.Array  # [batch] int32
    first: int = static(default=0)  # entries before this index are never visible
    is_exact: bool = static(default=False)  # see `kernels.attention.PagedPrefix`
