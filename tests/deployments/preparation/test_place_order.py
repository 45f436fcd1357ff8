"""The places of devices in a node: aligned blocks have the fastest links that there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.preparation.place_order import order_devices
from tests.device.links.topologies import BRIDGES, HGX, TWO_SOCKETS, find_address, list_devices
from tridentserve.cluster import DeviceLinks


def link_all(closeness: Sequence[Sequence[int]], names: Sequence[int] | None = None) -> list[DeviceLinks]:
    """Devices with these links; `names` are the numbers in their addresses."""
    addresses = [f"{name:03}" for name in names or range(len(closeness))]
    return [
        DeviceLinks(addresses[one], {addresses[other]: close for other, close in enumerate(row) if other != one})
        for one, row in enumerate(closeness)
    ]


def order_gpus(matrix: str, gpus: list[int]) -> list[int]:
    return [gpus[index] for index in order_devices(list_devices(matrix, gpus))]


def rate(order: Sequence[int], closeness: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """For each size of blocks, the slowest links of the blocks and all their links in sum."""
    rated, size = [], 2
    while size <= len(order):
        blocks = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
        links = [[closeness[one][other] for one in block for other in block if one < other] for block in blocks]
        rated.append((sum(map(min, links)), sum(map(sum, links))))
        size *= 2
    return rated


@pytest.mark.parametrize("gpus", [[0, 1, 2, 3, 4, 5, 6, 7], [6, 2, 7, 0, 1, 5, 3, 4], [5, 1, 2], [3]])
def test_behind_switches_gpus_come_in_their_own_order(gpus: list[int]) -> None:
    assert order_gpus(HGX, gpus) == sorted(gpus)


def test_blocks_share_a_switch_and_a_socket() -> None:
    assert order_gpus(TWO_SOCKETS, [7, 0, 5, 2, 4, 3, 6, 1]) == [0, 2, 1, 3, 4, 7, 5, 6]


def test_a_service_may_have_some_gpus_of_a_node() -> None:
    assert order_gpus(TWO_SOCKETS, [1, 2, 6, 0, 5, 3]) == [0, 2, 1, 3, 5, 6]
    assert order_gpus(TWO_SOCKETS, [4, 1, 7]) == [4, 7, 1], "the pair before the one that is left"
    assert order_gpus(TWO_SOCKETS, [6, 1]) == [1, 6]


def test_bridges_of_nvlink_make_the_pairs() -> None:
    assert order_gpus(BRIDGES, [2, 0, 1, 3]) == [0, 3, 1, 2]


def test_where_no_links_are_known_addresses_count() -> None:
    assert order_devices([DeviceLinks(find_address(gpu)) for gpu in (2, 0, 3, 1)]) == [1, 3, 0, 2]
    assert order_devices([DeviceLinks("same")] * 4) == [0, 1, 2, 3]
    unread = DeviceLinks(find_address(3))
    assert order_devices([*list_devices(BRIDGES, [0, 1, 2]), unread]) == [0, 3, 1, 2], "the others know of it"
    assert order_devices([]) == []


@st.composite
def matrices(draw: st.DrawFn, largest: int) -> list[list[int]]:
    size = draw(st.integers(1, largest))
    closeness = [[0] * size for _ in range(size)]
    for one in range(size):
        for other in range(one):
            closeness[one][other] = closeness[other][one] = draw(st.integers(0, 3))
    return closeness


@settings(max_examples=60, deadline=None)
@given(matrices(6))
def test_no_order_is_better(closeness: list[list[int]]) -> None:
    order = order_devices(link_all(closeness))
    best = max(permutations(range(len(closeness))), key=lambda one: rate(one, closeness))
    assert rate(order, closeness) == rate(best, closeness)


@settings(max_examples=30, deadline=None)
@given(matrices(9), st.randoms())
def test_the_order_is_one_of_all_devices_however_they_come(closeness: list[list[int]], random: object) -> None:
    devices = link_all(closeness)
    order = order_devices(devices)
    assert sorted(order) == list(range(len(devices)))
    shuffled = list(range(len(devices)))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = order_devices([devices[index] for index in shuffled])
    assert [shuffled[index] for index in again] == order


def test_sixteen_devices_in_four_groups() -> None:
    closeness = [
        [3 if one % 8 == other % 8 else 2 if one % 4 == other % 4 else one % 2 == other % 2 for other in range(16)]
        for one in range(16)
    ]
    order = order_devices(link_all(closeness))
    assert order == [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15]
    assert order_devices(link_all([[0] * 17] * 17)) == list(range(17))
