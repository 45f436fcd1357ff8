"""Workers of a node that wait for each other, so that a request gets several at once.

Segments on the workers of a node end at different moments. If each worker were given away when it is idle, requests
would run side by side on one or two workers each, and each would take as long as all of them together, although a wide
group takes hardly more GPU-seconds. So idle workers of a node wait for its others where a request is done sooner by it
and takes hardly more GPU-seconds, those that pass in waiting included. Once a node's workers are together, its segments
end together.

Waiting pays under overload, where what is saved is given to others. So nobody waits while nothing is lost
(`dispatch.candidates.calm`), nor on more than a quarter of a pool's nodes at once: requests that cannot wait need the
others. All waiting takes at most a share of the workers' time.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from dispatch.candidates.candidate import Candidate
from dispatch.candidates.classes import by_deadline
from dispatch.candidates.survey import TickView
from dispatch.candidates.work import Waiting, Work
from dispatch.options import DispatchOptions
from dispatch.workers.pools import Pool, make_busy
from tridentserve.plans import WorkerId
from tridentserve.protocols import PendingRequest, WorkerView

# What may be saved up of the share, in seconds of it.
_SAVED_S = 60.0
# Requests that are looked at for each node with workers that could wait.
_LOOKED_AT = 4
# Workers wait on one of so many nodes of a pool at most: on few nodes requests that cannot wait would miss it.
_NODES_PER_WAITING = 4


class Gathered(NamedTuple):
    """The workers that wait at a tick, and the requests that they wait for."""

    views: dict[WorkerId, WorkerView]
    """The workers as others see them: busy until the D of the request would end."""
    request_ids: frozenset[str]
    """The requests, which wait too."""


_NOBODY = Gathered({}, frozenset())


class _Ways(NamedTuple):
    """The groups of one pool that some work could have."""

    pool: int
    narrow: Candidate
    """The fastest group that could be formed now."""
    wide: tuple[Candidate, ...]
    """Wider ones that take hardly more GPU-seconds, the widest first."""


@dataclass(frozen=True, slots=True)
class _Spot:
    """A node on which a group can be formed."""

    finish_s: float
    start_s: float
    number: int
    candidate: Candidate


class _PartlyIdle:
    """The nodes of one pool of which some workers are idle and some are not."""

    def __init__(self, pool: Pool, now_s: float, left_out: Collection[str]) -> None:
        """`left_out`: ids of nodes that do not count."""
        self._pool = pool
        self._now_s = now_s
        self._free_at_s = {
            number: free_at_s
            for number, (idle, free_at_s) in enumerate(zip(pool.idle_per_node, pool.free_at_s, strict=True))
            if 0 < idle < len(pool.nodes[number]) and pool.nodes[number][0].node_id not in left_out
        }
        self._by_start: dict[int, list[tuple[float, int]]] = {}
        self._left = len(pool.nodes) // _NODES_PER_WAITING

    def __len__(self) -> int:
        return min(self._left, len(self._free_at_s))

    def find_first(self, degree: int) -> tuple[float, int] | None:
        """The time at which this many workers of one node are free first, and the node's number."""
        last = degree // self._pool.unit - 1
        if not self._left:
            return None
        if (starts := self._by_start.get(degree)) is None:
            starts = [(max(self._now_s, at[last]), number) for number, at in self._free_at_s.items() if len(at) > last]
            heapq.heapify(starts)
            self._by_start[degree] = starts
        while starts and starts[0][1] not in self._free_at_s:
            heapq.heappop(starts)
        return starts[0] if starts else None

    def count_waiting_s(self, number: int, degree: int, start_s: float) -> float:
        """The worker-seconds that pass until the group begins."""
        first = self._free_at_s[number][: degree // self._pool.unit]
        return self._pool.unit * sum([start_s - max(self._now_s, free_at_s) for free_at_s in first])

    def take(self, number: int) -> None:
        """The node is given to a request."""
        del self._free_at_s[number]
        self._left -= 1


class Gathering:
    """Remembers how much of its share waiting has taken."""

    def __init__(self, options: DispatchOptions) -> None:
        self._options = options
        self._credit_s = 0.0
        self._waiting: dict[str, int] = {}  # idle workers by the request that they wait for
        self._seen_s = 0.0

    def gather(self, waiting: Waiting, required: Iterable[PendingRequest], tick: TickView) -> Gathered:
        """The workers that wait at this tick: on each node for one request at most, earliest deadline first, but not
        for the `required` ones, which have their groups anyway."""
        if not self._options.gather_share:
            return _NOBODY
        self._pass_time(tick)
        before, self._waiting = self._waiting, {}
        nodes = {} if tick.pressure.is_calm else _find_nodes(tick)
        if not nodes:
            return _NOBODY
        excluded = {request.spec.request_id for request in required}
        ways: dict[Work, list[_Ways]] = {}
        views: dict[WorkerId, WorkerView] = {}
        for work, request in _list_first(waiting, _LOOKED_AT * sum(map(len, nodes.values()))):
            request_id = request.spec.request_id
            if request_id in excluded or (self._credit_s < 0 and request_id not in before):
                continue
            if work not in ways:
                ways[work] = self._list_ways(work, tick, nodes)
            if not ways[work]:
                continue
            place = self._find_place(ways[work], tick.now_s, nodes)
            if place is None:
                ways[work] = []  # the nodes that are left do not become better
                continue
            index, degree = place.candidate.group
            nodes[index].take(place.number)
            members = tick.pools[index].list_first_free(place.number, degree, tick.now_s)
            end_s = place.candidate.diffuse_end_s(place.start_s)
            views.update({each.worker_id: make_busy(each, end_s) for each in members})
            self._waiting[request_id] = sum(each.idle for each in members)
        return Gathered(views, frozenset(self._waiting))

    def _pass_time(self, tick: TickView) -> None:
        passed_s, self._seen_s = max(0.0, tick.now_s - self._seen_s), tick.now_s
        num_workers = sum(len(node) for pool in tick.pools for node in pool.nodes)
        gained_s = self._options.gather_share * num_workers
        earned_s = passed_s * (gained_s - sum(self._waiting.values()))
        self._credit_s = min(self._credit_s + earned_s, _SAVED_S * gained_s)

    def _list_ways(self, work: Work, tick: TickView, nodes: Mapping[int, _PartlyIdle]) -> list[_Ways]:
        efficient = [candidate for candidate in tick.survey(work).candidates if candidate.efficient]
        found = []
        for index in nodes:
            mine = [candidate for candidate in efficient if candidate.group.pool == index]
            now = [candidate for candidate in mine if candidate.group.degree <= tick.widest[index]]
            if not now:
                continue
            narrow = min(now, key=lambda candidate: candidate.run_s)
            budget_s = self._compute_budget_s(narrow)
            wide = [
                candidate
                for candidate in mine
                if candidate.group.degree > narrow.group.degree and _count_gpu_seconds(candidate) <= budget_s
            ]
            if wide:
                found.append(_Ways(index, narrow, tuple(sorted(wide, key=lambda each: -each.group.degree))))
        return found

    def _find_place(self, ways: Iterable[_Ways], now_s: float, nodes: Mapping[int, _PartlyIdle]) -> _Spot | None:
        """The node where the request ends first, of those where that is worth waiting for."""
        places: list[_Spot] = []
        for pool, narrow, wide in ways:
            budget_s = self._compute_budget_s(narrow)
            for candidate in wide:
                degree = candidate.group.degree
                if (first := nodes[pool].find_first(degree)) is None:
                    continue
                start_s, number = first
                finish_s = start_s + candidate.run_s
                waiting_s = nodes[pool].count_waiting_s(number, degree, start_s)
                if finish_s < now_s + narrow.run_s and _count_gpu_seconds(candidate) + waiting_s <= budget_s:
                    places.append(_Spot(finish_s, start_s, number, candidate))
                    break
        return min(places, key=lambda place: place.finish_s, default=None)

    def _compute_budget_s(self, narrow: Candidate) -> float:
        """The GPU-seconds of D that a wider group may take, waiting included."""
        return (1 + self._options.gather_excess) * _count_gpu_seconds(narrow)


def _find_nodes(tick: TickView) -> dict[int, _PartlyIdle]:
    """The nodes on which workers can wait, by pool."""
    pools = tick.snapshot.pools
    # Workers that are kept for short requests look as if they were free at once, and are not.
    kept = {node[0].node_id for pool in tick.pools[len(pools) :] for node in pool.nodes}
    nodes = {index: _PartlyIdle(pool, tick.now_s, kept) for index, pool in enumerate(pools)}
    return {index: partly for index, partly in nodes.items() if len(partly)}


def _list_first(waiting: Waiting, most: int) -> Iterator[tuple[Work, PendingRequest]]:
    """The requests with the earliest deadlines, and their work."""
    entries = [
        (by_deadline(request), number, work, request)
        for number, (work, requests) in enumerate(waiting.items())
        for request in requests[:most]
    ]
    entries.sort()  # quick, as those of each work are in order
    for _, _, work, request in islice(entries, most):
        yield work, request


def _count_gpu_seconds(candidate: Candidate) -> float:
    return candidate.group.degree * candidate.diffuse_s
