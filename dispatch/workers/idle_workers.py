"""The concrete workers of a pool that plans get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from dispatch.workers.pools import Pool
from tridentserve.plans import Replica, WorkerId
from tridentserve.stages import Stage


class IdleWorkers:
    """Hands out the idle workers of one pool. Ask for wide groups first: then all that `Problem.fits` allows fits."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._nodes = pool.nodes
        self._unit = pool.unit
        # Nodes by how many of their units are idle, so that the best fit is found without a search over all nodes.
        self._by_idle: list[dict[int, None]] = [{} for _ in range(pool.largest_node // pool.unit + 1)]
        for number, count in enumerate(pool.idle_per_node):
            self._by_idle[count // pool.unit][number] = None
        # The idle units of a node, as bits by their place in it; nodes that were never asked for are missing.
        self._idle: dict[int, int] = {}
        self._places: dict[WorkerId, tuple[int, int]] | None = None  # made when workers are preferred
        self._units: dict[frozenset[WorkerId], Mapping[int, int]] = {}
        self._resident: dict[frozenset[Replica], frozenset[WorkerId]] = {}
        self._holders: Mapping[str, frozenset[WorkerId]] | None = None  # of LoRAs; made when one is asked for

    def take(
        self, degree: int, preferred: Collection[WorkerId] = (), liked: Collection[WorkerId] = ()
    ) -> tuple[WorkerId, ...] | None:
        """`degree` idle workers of the node with the fewest that suffice (best fit); None when no node has as many.

        The node and the block in it with the most of the `preferred` workers come before that; of those with as many,
        the ones with the most of the `liked` workers. `degree` is a multiple of the pool's unit.
        """
        unit, degree = self._unit, degree // self._unit
        nodes = next(filter(None, self._by_idle[degree:]), None)
        if nodes is None:
            return None
        found = self._find_node_with_most(degree, preferred, liked) if preferred or liked else None
        number, wanted, nice = found or (next(iter(nodes)), 0, 0)
        idle = self._count_idle(number)
        node = self._nodes[number]
        chosen, bits = _find_block(len(node) // unit, idle, degree, wanted, nice)
        count = idle.bit_count()
        self._idle[number] = idle & ~bits
        del self._by_idle[count][number]
        self._by_idle[count - degree][number] = None
        if unit > 1:
            chosen = tuple(unit * place + rank for place in chosen for rank in range(unit))
        return tuple([node[place].worker_id for place in chosen])

    def find_resident(self, model: str, stages: Iterable[Stage]) -> frozenset[WorkerId]:
        """The workers that need not load any of these stages, idle or not; nobody where all workers of the pool have
        their whole placement in memory, since none of them comes before another then."""
        if self._pool.is_resident:
            return frozenset()
        wanted = frozenset(Replica(model, stage) for stage in stages)
        if wanted not in self._resident:
            self._resident[wanted] = frozenset(
                worker.worker_id
                for node in self._nodes
                for worker in node
                if worker.resident is None or wanted <= worker.resident
            )
        return self._resident[wanted]

    def find_holders(self, loras: Collection[str]) -> frozenset[WorkerId]:
        """The workers that were idle at first and hold all of these LoRAs; where none does, those that hold any."""
        if not loras:
            return frozenset()
        if self._holders is None:
            holders: defaultdict[str, set[WorkerId]] = defaultdict(set)
            for worker in (worker for node in self._nodes for worker in node if worker.idle):
                for key in worker.loras:
                    holders[key].add(worker.worker_id)
            self._holders = {key: frozenset(workers) for key, workers in holders.items()}
        found = [self._holders.get(key, frozenset()) for key in loras]
        return frozenset.intersection(*found) or frozenset.union(*found)

    def _find_node_with_most(
        self, degree: int, preferred: Collection[WorkerId], liked: Collection[WorkerId]
    ) -> tuple[int, int, int] | None:
        """The node, and the idle units in it with preferred and with liked workers; None where no node has any."""
        wanted, nice = self._find_idle_units(degree, preferred), self._find_idle_units(degree, liked)
        if not liked and len(wanted) < 2:  # as always where a request's state is all that is preferred
            return next(((number, bits, 0) for number, bits in wanted.items()), None)

        def count(number: int) -> tuple[int, int]:
            most, more = wanted.get(number, 0), nice.get(number, 0)
            firsts = min(most.bit_count(), degree)
            both, others = (most & more).bit_count(), (more & ~most).bit_count()
            return firsts, min(both, firsts) + min(others, degree - firsts)

        counts = {number: count(number) for number in (*wanted, *nice)}
        if not counts:
            return None
        most = max(counts.values())
        number = next(number for nodes in self._by_idle[degree:] for number in nodes if counts.get(number) == most)
        return number, wanted.get(number, 0), nice.get(number, 0)

    def _find_idle_units(self, degree: int, workers: Collection[WorkerId]) -> dict[int, int]:
        """The idle units with some of these workers, as bits, of the nodes with enough idle units."""
        found: dict[int, int] = {}
        for number, bits in self._find_units(frozenset(workers)).items() if workers else ():
            idle = self._count_idle(number)
            if idle.bit_count() >= degree and bits & idle:
                found[number] = bits & idle
        return found

    def _find_units(self, preferred: frozenset[WorkerId]) -> Mapping[int, int]:
        """The units with preferred workers that were idle at first, as bits, by node."""
        if preferred not in self._units:
            units: defaultdict[int, int] = defaultdict(int)
            for worker_id in preferred:
                if (place := self._find_place(worker_id)) is not None:
                    units[place[0]] |= 1 << place[1]
            self._units[preferred] = units
        return self._units[preferred]

    def _find_place(self, worker_id: WorkerId) -> tuple[int, int] | None:
        """The node of a worker, and its unit there; None where it is not idle, or of another pool."""
        if self._places is None:
            self._places = {
                worker.worker_id: (number, place // self._unit)
                for numbers in self._by_idle[1:]
                for number in numbers
                for place, worker in enumerate(self._nodes[number])
                if worker.idle
            }
        return self._places.get(worker_id)

    def _count_idle(self, number: int) -> int:
        if number not in self._idle:
            is_idle = [worker.idle for worker in self._nodes[number]]
            self._idle[number] = _pack_bits(self._reduce_units(is_idle, all))
        return self._idle[number]

    def _reduce_units(self, flags: Sequence[bool], of: Callable[[Sequence[bool]], bool]) -> Iterable[bool]:
        """Flags of a node's workers as flags of its units."""
        if self._unit == 1:
            return flags
        return [of(flags[start : start + self._unit]) for start in range(0, len(flags), self._unit)]


def _pack_bits(flags: Iterable[bool]) -> int:
    return sum([1 << place for place, flag in enumerate(flags) if flag])


@lru_cache(maxsize=1 << 14)
def _find_block(size: int, idle: int, degree: int, wanted: int, nice: int = 0) -> tuple[tuple[int, ...], int]:
    """The places to take of a node's `size` places, and the same as bits; `idle`, and `wanted` and `nice` (parts of
    it), are bits by place.

    Prefer an aligned block of the node's sorted workers (of 8: 4 pairs, 2 quads), with the most that are wanted, then
    with the most that are nice, and then from the smallest larger block that is broken already. So the same sets recur
    and their process groups are there, and wide blocks stay whole.
    """

    def mask(start: int, length: int) -> int:
        return ((1 << length) - 1) << start

    def is_idle(start: int, length: int) -> bool:
        return start + length <= size and idle & mask(start, length) == mask(start, length)

    def whole_block_around(start: int) -> int:
        length = degree
        while is_idle(start - start % (2 * length), 2 * length):
            length *= 2
        return length

    def rank(start: int) -> tuple[int, int, int, int]:
        block = mask(start, degree)
        return -(wanted & block).bit_count(), -(nice & block).bit_count(), whole_block_around(start), start

    starts = [start for start in range(0, size, degree) if is_idle(start, degree)]
    if starts:
        start = min(starts, key=rank)
        return tuple(range(start, start + degree)), mask(start, degree)
    places = [place for place in range(size) if idle >> place & 1]
    places.sort(key=lambda place: (not wanted >> place & 1, not nice >> place & 1, place))
    chosen = tuple(sorted(places[:degree]))
    return chosen, sum([1 << place for place in chosen])
