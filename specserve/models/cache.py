"""The cache: what committed tokens leave behind in each layer, keys and values in pages or a recurrent state for each
slot.

A forward never writes: it reads the committed entries and returns the new ones of its own tokens. Those that are kept
(all of a prefill chunk, the accepted path of a tree) are written once, by `Cache.write`. So compacting a tree costs no
copy, a rejected node never touches a page or a state, and the buffers can be donated.

Layers with a window may have fewer pages than the others: only those that some query can still see need to be there. A
page then has a window page of its own in these layers, for as long as it is given one (`serve.engine.windows`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.gather import take_each, take_rows
from specserve.kernels.paged import PagedPrefix
from specserve.kernels.pages import Pages, write_pages
from specserve.models.config import RECURRENT, ModelConfig
from specserve.models.mixers import compressed, recurrent
from specserve.models.mixers.recurrent import State
from specserve.pytree import pytree, static


@pytree
class Prefix:
    """The committed entries of each sequence that a forward sees."""

    page_table: jax.Array  # [batch, pages] int32, as many as attention reads
    lens: jax.Array  # [batch] int32
    first: int = static(default=0)  # entries before this index are never visible
    is_exact: bool = static(default=False)  # see `kernels.paged.PagedPrefix`
    slots: jax.Array | None = None  # [batch] int32, whose states; needed where layers are recurrent


# of layers with a window that have pages of their own: the window's tokens, and the pages of each data rank
WindowSizes = tuple[tuple[int, int], ...]
DRAFT_REACH = 2  # tokens before a window of the target that a draft's layer may see (`interop.assistant`)


@pytree
class Cache:
    layers: tuple[Pages | State | None, ...]  # None: of one without entries of its own
    num_pages: int = static()
    page_size: int = static()
    kept: tuple[State | None, ...] = ()  # recurrent states of prefixes, by layer, leaves [place, ...]; none: not kept
    windows: tuple[int, ...] = static(default=())  # by layer, the window whose pages it has; 0: those of all tokens
    # by window, the window page of each page, [page] int32; none: every layer has pages of all tokens
    window_pages: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    @classmethod
    def zeros(
        cls,
        config: ModelConfig,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        num_kept: int = 0,
        windows: WindowSizes = (),
        num_ranks: int = 1,
    ) -> "Cache":
        """Make an empty cache for a target, as `of_layers` does. It has room for `num_kept` states of prefixes."""

        def layer(i: int, pages: int) -> Pages | State | None:
            kind, dtype = config.kind(i), config.cache_dtype or config.dtype
            if kind.kv_from is not None:
                return None
            if kind.mixer == "compressed":
                return Pages.zeros(pages, page_size, 1, compressed.entry_dim(config, kind), dtype, has_values=False)
            if kind.mixer == "latent":
                assert config.latent is not None
                return Pages.zeros(pages, page_size, 1, config.latent.of(kind).entry_dim, dtype, has_values=False)
            if kind.mixer == "attention":
                own = config.of(kind)
                return Pages.zeros(pages, page_size, own.num_kv_heads, own.key_dim, dtype, v_dim=own.value_dim)
            return recurrent.init_state(config, kind, num_slots) if kind.mixer in RECURRENT else None

        def kept(i: int) -> State | None:
            kind = config.kind(i)
            return recurrent.init_state(config, kind, num_kept) if kind.mixer in RECURRENT else None

        layers = range(config.num_layers)
        kinds, sizes = [config.kind(i) for i in layers], {"num_pages": num_pages, "page_size": page_size}
        seen = [kind.window if kind.kv_from is None else 0 for kind in kinds]
        cache = cls.of_layers(layer, seen, **sizes, windows=windows, num_ranks=num_ranks)
        return dataclasses.replace(cache, kept=tuple(map(kept, layers)) if num_kept else ())

    @classmethod
    def of_layers(
        cls,
        make: Callable[[int, int], Pages | State | None],
        seen: Sequence[int],
        *,
        num_pages: int,
        page_size: int,
        windows: WindowSizes = (),
        num_ranks: int = 1,
    ) -> "Cache":
        """Make an empty cache, every array of entries zero, of layers that `make` makes, of their number and that of
        their pages. `seen` are the layers' windows, in tokens; 0: none. Layers with a window have the pages of the
        shortest of `windows` that is no shorter, of each of so many data ranks; or of all tokens where there is
        none."""
        number = {window: num_ranks * of_rank for window, of_rank in windows}
        own = tuple(min((each for each in number if each >= window > 0), default=0) for window in seen)
        return cls(
            tuple(make(i, number.get(window, num_pages)) for i, window in enumerate(own)),
            num_pages,
            page_size,
            windows=own if any(own) else (),
            window_pages={each: _any_pages(num_pages, number[each], num_ranks) for each in sorted({*own} - {0})},
        )

    def layer(self, i: int, prefix: Prefix) -> PagedPrefix | State | None:
        """The committed entries that layer i sees: a `PagedPrefix`, the rows of a recurrent state for the prefix's
        slots, or None."""
        layer = self.layers[i]
        if isinstance(layer, Pages):
            return self.attended(i, prefix)
        return None if layer is None else _rows(layer, prefix.slots)

    def attended(self, i: int, prefix: Prefix) -> PagedPrefix:
        """The committed keys and values that layer i sees, as a `PagedPrefix`. The layer must have pages."""
        layer = self.layers[i]
        assert isinstance(layer, Pages)
        return PagedPrefix(layer, self._own(i, prefix.page_table), prefix.lens, prefix.first, prefix.is_exact)

    def _own(self, i: int, pages: jax.Array) -> jax.Array:
        """Return the pages that these, [...] int32, are in layer i. Those out of range stay so."""
        layer, window = self.layers[i], self._window(i)
        if not window:
            return pages
        assert isinstance(layer, Pages), "only pages have windows"
        return self.window_pages[window].at[pages].get(mode="fill", fill_value=layer.k.shape[0])

    def _window(self, i: int) -> int:
        return self.windows[i] if self.windows else 0

    def write(
        self,
        new: tuple[Any, ...],  # one per layer, what the forward returned, leaves [batch, m, ...]
        page_table: jax.Array,  # [batch, max_pages] int32
        index: jax.Array,  # [batch, n] int32, the sequence index of each entry to write
        is_kept: jax.Array,  # [batch, n] bool; for recurrent layers the kept ones come first, in order
        slots: jax.Array | None = None,  # [batch] int32, needed where layers are recurrent
        path: jax.Array | None = None,  # [batch, n] int32, which of the m new entries; None: all of them in order
    ) -> "Cache":
        """Commit the kept entries. The other entries are dropped, and so are those past the allocated pages."""
        page_slot = index // self.page_size
        in_table = is_kept & (page_slot >= 0) & (page_slot < page_table.shape[1])
        page = take_each(page_table, jnp.clip(page_slot, 0, page_table.shape[1] - 1))
        page = jnp.where(in_table, page, self.num_pages)  # out of range: dropped by the scatter
        offset = index % self.page_size

        def advance(state: State, entries: Any) -> State:
            assert slots is not None
            if path is not None:
                entries = jax.tree.map(functools.partial(take_each, index=path), entries)
            rows = recurrent.advance(_rows(state, slots), entries, is_kept)
            return jax.tree.map(lambda all_rows, row: all_rows.at[slots].set(row, mode="drop"), state, rows)

        done: dict[int, Pages | State] = {}
        for window in (0, *self.window_pages):
            paged = [i for i, layer in enumerate(self.layers) if isinstance(layer, Pages) and self._window(i) == window]
            layers: Any = [self.layers[i] for i in paged]
            if paged:
                own = self._own(paged[0], page)
                written = write_pages(layers, [new[i] for i in paged], own, offset, path)
                done.update(zip(paged, written, strict=True))
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Pages | None):
                done[i] = advance(layer, new[i])
        return dataclasses.replace(self, layers=tuple(map(done.get, range(len(self.layers)))))

    def reset(self, slot: jax.Array, place: jax.Array | None = None) -> "Cache":
        """Prepare a slot ([] int32) for a new sequence: its recurrent states become zero, or those that are kept at a
        place ([] int32) of at least 0. Pages are left as they are."""

        def clear(layer: Pages | State | None, kept: State | None) -> Pages | State | None:
            if isinstance(layer, Pages | None):
                return layer
            if kept is None:
                return jax.tree.map(lambda x: x.at[slot].set(0), layer)
            return jax.tree.map(lambda x, own: x.at[slot].set(_at(own, place)), layer, kept)

        pairs = zip(self.layers, self.kept or [None] * len(self.layers), strict=True)
        return dataclasses.replace(self, layers=tuple(clear(*pair) for pair in pairs))

    def keep(self, slot: jax.Array, place: jax.Array) -> "Cache":
        """Copy the recurrent states of a slot to a place, both [] int32."""

        def copy(layer: Pages | State | None, kept: State | None) -> State | None:
            return None if kept is None else jax.tree.map(lambda x, own: own.at[place].set(x[slot]), layer, kept)

        return dataclasses.replace(self, kept=tuple(map(copy, self.layers, self.kept)))


def _any_pages(num_pages: int, num_window_pages: int, num_ranks: int) -> jax.Array:
    """Return one of so many window pages for each page, [page] int32, of the same data rank. Several may have the same
    one, as none is in use."""
    rank, place = jnp.divmod(jnp.arange(num_pages, dtype=jnp.int32), max(1, num_pages // num_ranks))
    of_rank = num_window_pages // num_ranks
    return rank * of_rank + place % max(1, of_rank)


def _at(kept: jax.Array, place: jax.Array | None) -> jax.Array:
    """Return what is kept at a place; zeros where it is below 0, or none."""
    return jnp.zeros_like(kept[0]) if place is None else jnp.where(place >= 0, kept[place], 0)


def _rows(state: State, slots: jax.Array | None) -> State:
    assert slots is not None, "recurrent layers need the slots"
    return take_rows(state, slots)
