"""Cells are made of whole nodes, in equal parts as far as nodes allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridentserve.cells.division import divide_nodes
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError


def make_workers(sizes: list[int]) -> list[WorkerSpec]:
    return [
        WorkerSpec(f"n{node}w{place}", f"n{node}", 1, place=place)
        for node, size in enumerate(sizes)
        for place in range(size)
    ]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.data())
def test_each_cell_has_whole_nodes_and_none_is_left_out(sizes: list[int], data: st.DataObject) -> None:
    workers = make_workers(sizes)
    num_cells = data.draw(st.integers(1, len(sizes)))
    cells = divide_nodes(workers, num_cells)
    assert len(cells) == num_cells
    assert all(cells)
    assert [worker for cell in cells for worker in cell] == workers
    homes = [{worker.node_id for worker in cell} for cell in cells]
    assert sum(map(len, homes)) == len(sizes)


@given(st.integers(1, 8), st.integers(1, 12), st.data())
def test_cells_of_equal_nodes_differ_by_one_node_at_most(size: int, nodes: int, data: st.DataObject) -> None:
    cells = divide_nodes(make_workers([size] * nodes), data.draw(st.integers(1, nodes)))
    assert max(map(len, cells)) - min(map(len, cells)) <= size


@pytest.mark.parametrize("num_cells", [0, 3])
def test_a_cell_without_a_node_is_refused(num_cells: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_cells} cells cannot be made of 2 nodes"):
        divide_nodes(make_workers([8, 8]), num_cells)
