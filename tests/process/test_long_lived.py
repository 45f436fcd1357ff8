"""The garbage collector leaves long-lived objects alone, waits for the end of a tick, and finds what came later."""

from __future__ import annotations

import gc
import weakref

import pytest

from tridentserve.process.long_lived import defer_collections, spare_long_lived


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


def test_no_collection_begins_by_itself_in_a_tick_and_the_next_one_finds_what_it_left() -> None:
    gc.collect()
    with defer_collections():
        left = [cycle() for _ in range(10 * gc.get_threshold()[0])]
        assert all(each() is not None for each in left)
    again = [cycle() for _ in range(2 * gc.get_threshold()[0])]
    assert not any(each() for each in left)
    del again


def test_collections_go_on_after_a_tick_that_fails() -> None:
    with pytest.raises(RuntimeError), defer_collections():
        raise RuntimeError
    assert gc.isenabled()


def test_collections_that_were_off_stay_off() -> None:
    gc.disable()
    try:
        with defer_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
