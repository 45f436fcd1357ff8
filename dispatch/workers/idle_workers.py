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

    def take(self, degree: int, preferred: Collection[WorkerId] = ()) -> tuple[WorkerId, ...] | None:
        """`degree` idle workers of the node with the fewest that suffice (best fit); None when no node has as many.

        The node and the block in it with the most of the `preferred` workers come before that. `degree` is a multiple
        of the pool's unit.
        """
        unit, degree = self._unit, degree // self._unit
        nodes = next(filter(None, self._by_idle[degree:]), None)
        if nodes is None:
            return None
        found = self._find_node_with_most(degree, preferred) if preferred else None
        number, wanted = found or (next(iter(nodes)), 0)
        idle = self._count_idle(number)
        node = self._nodes[number]
        chosen, bits = _find_block(len(node) // unit, idle, degree, wanted)
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

    def _find_node_with_most(self, degree: int, preferred: Collection[WorkerId]) -> tuple[int, int] | None:
        """The node, and the idle units in it with preferred workers; None where no node has any."""
        wanted: dict[int, int] = {}
        for number, bits in self._find_units(frozenset(preferred)).items():
            idle = self._count_idle(number)
            if idle.bit_count() >= degree and bits & idle:
                wanted[number] = bits & idle
        if len(wanted) < 2:  # as always where a request's state is all that is preferred
            return next(iter(wanted.items()), None)
        most = max(min(bits.bit_count(), degree) for bits in wanted.values())
        best = {number for number, bits in wanted.items() if min(bits.bit_count(), degree) == most}
        number = next(number for nodes in self._by_idle[degree:] for number in nodes if number in best)
        return number, wanted[number]

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
def _find_block(size: int, idle: int, degree: int, wanted: int) -> tuple[tuple[int, ...], int]:
    """The places to take of a node's `size` places, and the same as bits; `idle` and `wanted` (a part of it) are bits
    by place.

    Prefer an aligned block of the node's sorted workers (of 8: 4 pairs, 2 quads), with the most that are wanted, and
    then from the smallest larger block that is broken already. So the same sets recur and their process groups are
    there, and wide blocks stay whole.
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

    def rank(start: int) -> tuple[int, int, int]:
        return -(wanted & mask(start, degree)).bit_count(), whole_block_around(start), start

    starts = [start for start in range(0, size, degree) if is_idle(start, degree)]
    if starts:
        start = min(starts, key=rank)
        return tuple(range(start, start + degree)), mask(start, degree)
    places = [place for place in range(size) if idle >> place & 1]
    chosen = tuple(sorted(sorted(places, key=lambda place: (not wanted >> place & 1, place))[:degree]))
    return chosen, sum([1 << place for place in chosen])
