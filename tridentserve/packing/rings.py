"""Rings of different sizes over the same workers, for requests of different lengths in one batch (DiT-Serve's Brick
Attention). A long request has a wide ring, a short one a narrow ring or one worker alone, so that all workers hold
about as much and short requests are not sent around."""

from __future__ import annotations

from collections.abc import Sequence

# A ring that holds this much more than its share on each worker is still narrow enough: a wider one sends more.
_TOLERANCE = 1.25


def plan_rings(costs: Sequence[float], size: int) -> list[range]:
    """Choose the ring of each request: aligned neighbours among `size` workers (a power of two), by what each request
    costs, all of it on one worker. Every worker is in a ring at least.

    Each ring has as many workers, a power of two, as bring its cost down to the mean of all workers, or nearly. The
    most expensive request comes first, and each goes to the workers of which the fullest has the least.
    """
    target = sum(costs) / size
    widths = [_choose_width(cost, target, size) for cost in costs]
    while True:
        loads, rings = [0.0] * size, [range(0)] * len(costs)
        for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
            ring = _find_emptiest(widths[index], loads)
            rings[index] = ring
            for worker in ring:
                loads[worker] += costs[index] / widths[index]
        covered = {worker for ring in rings for worker in ring}
        if len(covered) == size:
            return rings
        narrow = [index for index, width in enumerate(widths) if width < size]
        widest = max(narrow, key=lambda index: costs[index] / widths[index])
        widths[widest] *= 2


def _choose_width(cost: float, target: float, size: int) -> int:
    width = 1
    while width < size and cost / width > _TOLERANCE * target:
        width *= 2
    return width


def _find_emptiest(width: int, loads: Sequence[float]) -> range:
    rings = [range(first, first + width) for first in range(0, len(loads), width)]
    return min(rings, key=lambda ring: (max(loads[worker] for worker in ring), ring.start))
