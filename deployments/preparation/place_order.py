"""The order in which the devices of a node get their places, so that aligned blocks of 2, 4, 8 places have the fastest
links: such blocks form process groups and units of divided weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from operator import add

from tridentserve.cluster import DeviceLinks

# Nodes with more devices are not searched: with 16 the search takes about a second.
_MOST_SEARCHED = 16

DeviceNumbers = tuple[int, ...]
# For blocks of 2, then of 4 and so on, two numbers: the slowest link of each block, and all its links; less is faster.
Slowness = tuple[int, ...]


def order_devices(devices: Sequence[DeviceLinks]) -> list[int]:
    """The devices, as indices of the sequence, in the order of their places.

    A collective is as fast as the slowest link of its group. So of all orders the one is taken whose blocks of two have
    the fastest slowest links in sum, and then the fastest links in sum; among several, the same holds for blocks of
    four, and so on. What is then still alike comes in the order of addresses."""
    by_address = sorted(range(len(devices)), key=lambda index: (devices[index].address, index))
    if not 2 < len(devices) <= _MOST_SEARCHED:
        return by_address
    ordered = [devices[index] for index in by_address]
    _, order = _search([[_find_closeness(one, other) for other in ordered] for one in ordered])
    return [by_address[number] for number in order]


def _find_closeness(one: DeviceLinks, other: DeviceLinks) -> int:
    """Either of the two may not have been able to read its links."""
    return max(one.closeness.get(other.address, 0), other.closeness.get(one.address, 0))


def _search(closeness: Sequence[Sequence[int]]) -> tuple[Slowness, DeviceNumbers]:
    """The least slowness of all devices, and the first order that has it."""
    num_sizes = len(closeness).bit_length() - 1

    def rate(block: DeviceNumbers) -> Slowness:
        links = [closeness[one][other] for one, other in combinations(block, 2)]
        level = 2 * (len(block).bit_length() - 2)
        return (0,) * level + (-min(links), -sum(links)) + (0,) * (2 * num_sizes - level - 2)

    @cache
    def halve(block: DeviceNumbers) -> tuple[Slowness, DeviceNumbers]:
        """A block of a power of two, and all that it is divided into. Its first half has its first member."""
        if len(block) == 1:
            return (0,) * (2 * num_sizes), block
        first, *others = block
        found = (
            _join(halve((first, *chosen)), halve(tuple(each for each in others if each not in chosen)))
            for chosen in combinations(others, len(block) // 2 - 1)
        )
        slowness, order = min(found)
        return tuple(map(add, slowness, rate(block))), order

    @cache
    def fill(members: DeviceNumbers) -> tuple[Slowness, DeviceNumbers]:
        """Any number of devices: the widest block that they fill, and the rest after it."""
        widest = 1 << (len(members).bit_length() - 1)
        if widest == len(members):
            return halve(members)
        return min(
            _join(halve(chosen), fill(tuple(each for each in members if each not in chosen)))
            for chosen in combinations(members, widest)
        )

    return fill(tuple(range(len(closeness))))


def _join(one: tuple[Slowness, DeviceNumbers], other: tuple[Slowness, DeviceNumbers]) -> tuple[Slowness, DeviceNumbers]:
    return tuple(map(add, one[0], other[0])), one[1] + other[1]
