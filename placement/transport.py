"""The transportation problem: who supplies whom at the least total cost. Exact, in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Flow = list[list[int]]


def transport(supply: Sequence[int], demand: Sequence[int], cost: Sequence[Sequence[int]]) -> _Flow:
    """`flow[i][j]` units from source i to sink j, of least total cost, in whole numbers.

    Successive shortest paths: each sends as much as fits along the cheapest path that is left. Small instances only (as
    many steps as sources and sinks together, times their product, or a little more). Raises `ValueError` when supply
    and demand differ.
    """
    if sum(supply) != sum(demand):
        raise ValueError(f"{sum(supply)} supplied and {sum(demand)} demanded")
    flow = [[0] * len(demand) for _ in supply]
    left, open_demand = list(supply), list(demand)
    while any(left):
        path = _cheapest_path(left, open_demand, cost, flow)
        source, sink = path[0], path[-1]
        # Edges go from a source to a sink, and back from a sink to a source that supplies it.
        back = list(zip(path[2::2], path[1::2], strict=False))
        amount = min(left[source], open_demand[sink], *(flow[i][j] for i, j in back))
        for i, j in zip(path[::2], path[1::2], strict=True):
            flow[i][j] += amount
        for i, j in back:
            flow[i][j] -= amount
        left[source] -= amount
        open_demand[sink] -= amount
    return flow


def _cheapest_path(
    left: Sequence[int], open_demand: Sequence[int], cost: Sequence[Sequence[int]], flow: _Flow
) -> list[int]:
    """Source, sink, source, ..., sink: the cheapest way to bring one unit more (Bellman-Ford, as returned units have
    negative costs)."""
    sources, sinks = range(len(left)), range(len(open_demand))
    to_source: list[float] = [0 if left[i] else math.inf for i in sources]
    to_sink: list[float] = [math.inf for _ in sinks]
    from_sink: list[int | None] = [None for _ in sources]
    from_source = [0 for _ in sinks]
    changed = True
    while changed:
        changed = False
        for i in sources:
            for j in sinks:
                if to_source[i] + cost[i][j] < to_sink[j]:
                    to_sink[j], from_source[j], changed = to_source[i] + cost[i][j], i, True
        for i in sources:
            for j in sinks:
                if flow[i][j] and to_sink[j] - cost[i][j] < to_source[i]:
                    to_source[i], from_sink[i], changed = to_sink[j] - cost[i][j], j, True
    sink: int | None = min((j for j in sinks if open_demand[j]), key=lambda j: to_sink[j])
    path: list[int] = []
    while sink is not None:
        source = from_source[sink]
        path += [sink, source]
        sink = from_sink[source]
    return path[::-1]
