"""What a router makes of KV events: an index of the prefixes that are cached. It knows nothing of pages or hashes but
what events say."""

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.serve.fleet import kv_events


class Mirror:
    """The cached prefixes by their hashes: a salt, and all tokens from the start."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.num_removed = self.num_cleared = self.num_marks = 0

    def hear(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.prefixes.clear()
            self.num_cleared += 1
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.prefixes[block]
            self.num_removed += len(event["block_hashes"])
            self.num_marks += not event["block_hashes"]
        else:
            self._store(event)

    def _store(self, event: Mapping[str, Any]) -> None:
        size, blocks, token_ids = event["block_size"], event["block_hashes"], event["token_ids"]
        keys = event.get("extra_keys") or [None] * len(blocks)
        assert len(token_ids) == size * len(blocks)
        assert len(keys) == len(blocks)
        assert not any(keys[1:]), "only a first page has a salt"
        if event["parent_block_hash"] is None:
            salt, before = (keys[0][0] if keys[0] else ""), ()
        else:
            salt, before = self.prefixes[event["parent_block_hash"]]
        for number, block in enumerate(blocks):
            assert block not in self.prefixes, "stored twice, or two prefixes of one hash"
            assert 0 <= block < 2**64
            before = (*before, *token_ids[number * size : (number + 1) * size])
            self.prefixes[block] = salt, before

    def match(self, token_ids: Sequence[int], salt: str, size: int) -> int:
        """How many tokens of a prompt are cached: whole pages from the start."""
        known = set(self.prefixes.values())
        found = 0
        while found + size <= len(token_ids) and (salt, tuple(token_ids[: found + size])) in known:
            found += size
        return found


class Heard:
    """A watcher of a pool that hands the events to a mirror at once."""

    def __init__(self, page_size: int) -> None:
        self._page_size, self.mirror = page_size, Mirror()

    def stored(self, before: bytes | None, digests: Sequence[bytes], token_ids: Sequence[int], salt: str) -> None:
        self.mirror.hear(kv_events.stored(before, digests, token_ids, salt, self._page_size))

    def removed(self, digests: Sequence[bytes]) -> None:
        self.mirror.hear(kv_events.removed(digests))

    def cleared(self) -> None:
        self.mirror.hear(kv_events.cleared())
