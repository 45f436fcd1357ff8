"""Divides the workers of a cluster among its cells."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError


def divide_nodes(workers: Sequence[WorkerSpec], num_cells: int) -> list[tuple[WorkerSpec, ...]]:
    """The workers of each cell: whole nodes, in their order, as many workers in each as in the others up to the size of
    a node. Raises `ConfigError` when there are fewer nodes than cells."""
    nodes: dict[str, list[WorkerSpec]] = {}
    for worker in workers:
        nodes.setdefault(worker.node_id, []).append(worker)
    if not 0 < num_cells <= len(nodes):
        raise ConfigError(
            f"{num_cells} cells cannot be made of {len(nodes)} nodes: a cell has whole nodes, at least one of them"
        )
    cells: list[list[WorkerSpec]] = [[] for _ in range(num_cells)]
    cell, num_dealt = 0, 0
    for left, node in zip(range(len(nodes), 0, -1), nodes.values(), strict=True):
        # The next cell begins where this one has its share, and where the nodes that are left are just enough.
        is_full = num_dealt * num_cells >= (cell + 1) * len(workers)
        if cells[cell] and cell + 1 < num_cells and (is_full or left < num_cells - cell):
            cell += 1
        cells[cell] += node
        num_dealt += len(node)
    return [tuple(members) for members in cells]
