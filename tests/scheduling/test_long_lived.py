"""The garbage collector leaves long-lived objects alone, and collects those that are made later."""

from __future__ import annotations

import gc
import weakref

from tridentserve.long_lived import spare_long_lived


class Node:
    """Can be part of a cycle."""

    other: Node


def cycle() -> weakref.ref[Node]:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return weakref.ref(first)


def test_full_collections_pass_over_what_was_there_and_find_what_came_later() -> None:
    before, kept = cycle(), [Node() for _ in range(1000)]
    try:
        spare_long_lived()
        assert before() is None, "garbage is not kept for good"
        assert gc.get_freeze_count() > len(kept)
        assert not {id(node) for node in kept} & {id(each) for each in gc.get_objects()}
        later = cycle()
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
