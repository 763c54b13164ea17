"""The choice of the replica that answers, and of the number of replicas, by the rules of Ray Serve. Ray copies this
file into its own processes, so it holds no state of ours and imports little.

A request goes to the replica whose cache holds the longest beginning of its prompt, unless that one has too many more
requests than the others.
"""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specserve.cluster import load

TARGET_USE = 0.7  # of a replica's slots or pages, whichever is fuller, that autoscaling aims at
FRESH_SECONDS = 5.0  # how long a prompt counts as cached where it was sent, until the replica's own report has it


class PrefixRouter(load("ray.serve.request_router").RequestRouter):
    """Chooses a replica by what its cache holds, by load, and by the version of its head.

    A request may name, as keyword arguments: `to`, the one replica that it is for; `floor`, the oldest version of the
    head that may answer it; and `pages`, the digests of its prompt's pages (`pages.prefix_digests`). Replicas report
    (`record_routing_stats`) the digests of the pages that they hold, and their version.
    """

    def initialize_state(self, slack: int = 4) -> None:
        """Take the router's settings. A replica that holds a prompt's pages may have `slack` more open requests than
        the least loaded one."""
        self._slack = slack
        self._sent: dict[Any, dict[bytes, float]] = {}  # pages that replicas have been sent lately, and when
        self._reports: dict[Any, tuple[object, frozenset[bytes]]] = {}

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return ranks of replicas: the least loaded one of the first rank that has room gets the request."""
        asked: Mapping[str, Any] = {}
        if pending_request:
            asked = pending_request.kwargs
            pending_request.routing_context.should_backoff = True
        if to := asked.get("to"):
            return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == to]]
        floor = asked.get("floor", 0)
        able = [replica for replica in candidate_replicas if replica.routing_stats.get("version", 0) >= floor]
        if not able:
            return []
        ranks = [random.sample(able, min(2, len(able))), able]
        holder = self._holder(able, asked.get("pages", ()))
        if holder is not None:
            ranks.insert(0, [holder])
        return ranks

    def _holder(self, replicas: Sequence[Any], pages: Sequence[bytes]) -> Any | None:
        """Return the replica that holds most of these pages and is not overloaded, the least loaded of several, or
        None where there is none."""
        num_open = {replica: self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in replicas}
        found, most = None, (0, 0)
        for replica in replicas:
            if num_open[replica] - min(num_open.values()) > self._slack:
                continue
            held = (self._num_held(replica, pages), -num_open[replica])
            if held[0] and (found is None or held > most):
                found, most = replica, held
        return found

    def _num_held(self, replica: Any, pages: Sequence[bytes]) -> int:
        key, reported = replica.replica_id, replica.routing_stats.get("pages", ())
        report = self._reports.get(key)
        if report is None or report[0] is not reported:
            report = self._reports[key] = reported, frozenset(reported)
        sent, oldest = self._sent.get(key, {}), time.monotonic() - FRESH_SECONDS
        number = 0
        for number, page in enumerate(pages, 1):
            if page not in report[1] and sent.get(page, 0.0) < oldest:
                return number - 1
        return number

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:  # noqa: ARG002 (Ray's)
        """Note, as Ray reports it, that a request is on its way to a replica."""
        now, sent = time.monotonic(), self._sent.setdefault(replica_id, {})
        for page in pending_request.kwargs.get("pages", ()):
            sent.pop(page, None)
            sent[page] = now  # the newest last
        while sent and next(iter(sent.values())) < now - FRESH_SECONDS:
            del sent[next(iter(sent))]

    def update_replicas(self, replicas: list[Any]) -> None:
        """Note, as Ray reports it, which replicas there are."""
        super().update_replicas(replicas)
        there = {replica.replica_id for replica in replicas}
        for books in (self._sent, self._reports):
            for gone in set(books) - there:
                del books[gone]


def scale(context: Any) -> tuple[float, dict[str, Any]]:
    """Return how many replicas there should be, as an autoscaling policy of Ray Serve: as many as bring the mean use
    of their slots or pages to TARGET_USE. Ray applies bounds and delays. Requests that wait count as slots, so use may
    exceed 1."""
    use = (context.aggregated_metrics or {}).get("use", {})
    if not use:
        return context.target_num_replicas, {}
    mean = sum(use.values()) / len(use)
    return context.current_num_replicas * mean / TARGET_USE, {}
