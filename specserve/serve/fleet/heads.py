"""The head that all replicas of a fleet serve, and how it is swapped: from replica to replica, while requests run.

A version counts the swaps of the fleet. For each client (its API key, else its address) versions never fall: while a
swap goes from replica to replica, a client that has met the new head is sent to replicas that have it. A swap that a
replica refuses is undone by one more, back to the head before.
"""

import asyncio
import logging
from dataclasses import dataclass

from specserve.errors import CapacityError
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.fleet.group import Refused, ReplicaGroup, ReplicaState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Head:
    """The head that the fleet serves."""

    version: int
    folder: str
    draft: DraftInfo | None


class FleetHead:
    """The head of a group of replicas, of which one has been found already."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        newest = max(group.states.values(), key=lambda state: state.version)  # this process may be a second one
        self._head = _Head(newest.version, newest.folder, newest.draft)
        self._floors: dict[str, int] = {}  # of clients that have met a head that not every replica has yet
        self._swap = asyncio.Lock()

    @property
    def draft(self) -> DraftInfo | None:
        """The head of all replicas; during a swap the one before."""
        return self._head.draft

    @property
    def is_swapping(self) -> bool:
        return self._swap.locked()

    def floor(self, client: str) -> int:
        """Return the oldest version that may answer this client."""
        return max(self._head.version, self._floors.get(client, 0))

    def note_met(self, client: str, version: int) -> None:
        """Note that a head of this version answers this client."""
        if version > self._head.version:
            self._floors[client] = max(self._floors.get(client, 0), version)

    async def swap(self, folder: str) -> DraftInfo:
        """Give one replica after the other the head in this folder. Where one refuses it, all go back to the head
        before, and its error is raised: ConfigError or CheckpointError. Raises CapacityError where another swap is
        under way, or there is no replica."""
        if self.is_swapping:
            raise CapacityError("another head is being loaded; try again when it is there")
        async with self._swap:
            before = self._head
            answer = await self._roll(folder, before.version + 1)
            if isinstance(answer, Refused):
                await self._roll(before.folder, before.version + 2)
                self._settle(_Head(before.version + 2, before.folder, before.draft))
                raise answer.error
            if answer is None:
                raise CapacityError("no replica is there to load a head; try again later")
            self._settle(_Head(before.version + 1, folder, answer))
            return answer

    async def catch_up(self, state: ReplicaState) -> None:
        """Give a replica that has begun anew, and reports an older version, the head of the others."""
        if state.version < self._head.version:
            async with self._swap:
                await self._load(state.replica, self._head.folder, self._head.version)

    def _settle(self, head: _Head) -> None:
        self._head = head
        self._floors.clear()

    async def _roll(self, folder: str, version: int) -> DraftInfo | Refused | None:
        """Swap all replicas, one by one. Returns the answer of the last one, or of the first that refuses. A replica
        that ends meanwhile is given the head when it is back."""
        await self._group.look()
        answer = None
        for replica in sorted(self._group.states):
            answer = await self._load(replica, folder, version) or answer
            if isinstance(answer, Refused):
                logger.warning("replica %s refuses the head in %s: %s", replica, folder, answer.message)
                return answer
        return answer

    async def _load(self, replica: str, folder: str, version: int) -> DraftInfo | Refused | None:
        return await self._group.call(replica, "load_draft", folder, version)
