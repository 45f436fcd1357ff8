"""Keeping a snapshot from tick to tick changes nothing: one that has seen changes equals a new one of the same
views."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dispatch import DispatchOptions, IlpDispatcher
from dispatch.workers.pools import take_snapshot
from tests.dispatch.cluster import decide, request, worker, workers
from tests.profiler.synthetic import SHAPES, cost_model
from tridentserve.protocols import WorkerView

TIMES = cost_model()
PENDING = [request(f"r{i}", SHAPES[i % 3], 5.0 + i) for i in range(8)]

kinds = st.sampled_from(["EDC", "DC", "ED", "D", "E", "C", "two:EDC"])
states = st.none() | st.floats(0, 9)
ticks = st.lists(st.lists(st.tuples(st.integers(0, 5), kinds, states), max_size=3), max_size=5)


def first_views() -> list[WorkerView]:
    return [*workers(3, "EDC"), worker("e", "E", node="n1"), worker("c", "C", node="n1"), worker("d", "D", node="n1")]


@given(ticks)
def test_a_dispatcher_that_has_seen_other_ticks_decides_like_a_new_one(
    changes: list[list[tuple[int, str, float | None]]],
) -> None:
    """Past arrivals are another matter: they say which workers to keep free."""
    options = DispatchOptions(keep_free=False)
    kept, views = IlpDispatcher(TIMES, options), first_views()
    for tick in changes:
        for place, kind, free_at_s in tick:
            old = views[place]
            views[place] = worker(old.worker_id, kind, node=old.node_id, free_at_s=free_at_s)
        assert decide(kept, PENDING, views, 4.0) == decide(IlpDispatcher(TIMES, options), PENDING, views, 4.0)
        seen = take_snapshot(first_views()).update(views)
        assert (seen.all_pools, list(seen.workers)) == (take_snapshot(views).all_pools, views)


def test_pools_without_a_change_are_shared() -> None:
    views = first_views()
    snapshot = take_snapshot(views)
    assert snapshot.update(list(views)) is snapshot
    busy = replace(views[0], idle=False, free_at_s=3.0)
    seen = snapshot.update([busy, *views[1:]])
    assert sum(new is old for new, old in zip(seen.all_pools, snapshot.all_pools, strict=True)) == 3
    assert (
        seen.all_pools
        == snapshot.replace_views({busy.worker_id: busy}).all_pools
        == take_snapshot([busy, *views[1:]]).all_pools
    )


def test_workers_that_come_and_go_are_grouped_anew() -> None:
    views = first_views()
    snapshot = take_snapshot(views)
    assert snapshot.update(views[1:]).all_pools == take_snapshot(views[1:]).all_pools
    moved = replace(views[0], node_id="n1")
    assert snapshot.update([moved, *views[1:]]).all_pools == take_snapshot([moved, *views[1:]]).all_pools
