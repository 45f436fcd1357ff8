"""Idle workers of a node that wait for its others: for whom, where, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch import DispatchOptions, IlpDispatcher
from dispatch.candidates.classes import group_by_work
from dispatch.candidates.survey import TickView
from dispatch.holding.gathering import Gathered, Gathering
from tests.dispatch.cluster import decide, request, worker
from tridentserve.protocols import ClusterView, PendingRequest, WorkerView
from tridentserve.requests import Shape
from tridentserve.testing.fixed_times import FixedTimes

NOW_S = 100.0
SHAPE = Shape(1024, 1024)
TIMES = FixedTimes(encode_s=0.0, decode_s=0.0, diffuse_degrees=(1, 2))
OPTIONS = DispatchOptions(keep_free=False)
# 20 steps of a second: a request takes 20 GPU-seconds at both degrees, and another second may pass in waiting.
SOON_S, LATE_S = NOW_S + 0.9, NOW_S + 1.1


def cluster(*free_at_s: float | None, num_nodes: int = 4) -> list[WorkerView]:
    """Nodes of two workers; `free_at_s` of those of the first ones, None for an idle worker. The others are busy."""
    times = [*free_at_s, *[NOW_S + 1000.0] * (2 * num_nodes - len(free_at_s))]
    return [
        worker(f"n{place // 2}-w{place % 2}", "EDC", node=f"n{place // 2}", free_at_s=free_s)
        for place, free_s in enumerate(times)
    ]


def wait_for(
    pending: Sequence[PendingRequest],
    views: Sequence[WorkerView],
    gathering: Gathering | None = None,
    now_s: float = NOW_S,
    calm: bool = False,
    required: Sequence[PendingRequest] = (),
) -> Gathered:
    tick = TickView(TIMES, OPTIONS, views, now_s)
    tick.pressure.is_calm = calm
    return (gathering or Gathering(OPTIONS)).gather(group_by_work(pending, frozenset({"one"})), required, tick)


@pytest.mark.parametrize(("free_at_s", "waits"), [(SOON_S, True), (LATE_S, False)])
def test_a_worker_waits_while_that_takes_few_gpu_seconds(free_at_s: float, waits: bool) -> None:
    gathered = wait_for([request("one", SHAPE)], cluster(None, free_at_s))
    assert gathered.request_ids == ({"one"} if waits else frozenset())
    assert sorted(gathered.views) == (["n0-w0", "n0-w1"] if waits else [])
    assert {view.idle for view in gathered.views.values()} == ({False} if waits else set())
    assert [view.free_at_s for view in gathered.views.values()] == pytest.approx([SOON_S + 10.0] * 2 if waits else [])


def test_nobody_waits_where_nothing_is_lost_or_nodes_are_few_or_nothing_is_gained() -> None:
    pending, views = [request("one", SHAPE)], cluster(None, SOON_S)
    assert wait_for(pending, views).views
    assert not wait_for(pending, views, calm=True).views
    assert not wait_for(pending, cluster(None, SOON_S, num_nodes=3)).views
    assert not wait_for(pending, views, required=pending).views
    assert not wait_for(pending, views, Gathering(replace(OPTIONS, gather_share=0.0))).views
    assert not wait_for(pending, cluster(None, None)).views, "the group is there"
    assert not wait_for(pending, cluster(None, SOON_S, None, None)).views, "another node has the group"


def test_the_earliest_deadline_has_the_node_that_is_free_first_and_a_quarter_of_the_nodes_wait() -> None:
    pending = [request("later", SHAPE, 2000.0), request("first", SHAPE, 1000.0)]
    views = cluster(None, NOW_S + 0.5, None, NOW_S + 0.3)
    gathered = wait_for(pending, views)
    assert gathered.request_ids == {"first"}
    assert sorted(gathered.views) == ["n1-w0", "n1-w1"]
    gathered = wait_for(pending, cluster(None, NOW_S + 0.5, None, NOW_S + 0.3, num_nodes=8))
    assert gathered.request_ids == {"first", "later"}
    assert len(gathered.views) == 4


def test_waiting_takes_a_share_of_the_time_and_what_has_begun_goes_on() -> None:
    gathering = Gathering(replace(OPTIONS, gather_share=0.01))
    pending = [request(name, SHAPE, slo_s) for name, slo_s in (("a", 1000.0), ("b", 2000.0))]
    # 8 workers earn 0.08 s in a second, of which 60 seconds are saved at most.
    for now_s in (NOW_S, NOW_S + 6.0):
        gathered = wait_for(pending, cluster(None, now_s + 0.9), gathering, now_s)
        assert gathered.request_ids == {"a"}, "one worker waits for `a` at each tick"
    now_s = NOW_S + 12.0
    assert wait_for(pending, cluster(None, now_s + 0.9), gathering, now_s).request_ids == {"a"}, "it has begun"
    assert not wait_for(pending[1:], cluster(None, now_s + 0.9), gathering, now_s).views, "the share is used up"
    now_s += 600.0
    assert wait_for(pending[1:], cluster(None, now_s + 0.9), gathering, now_s).request_ids == {"b"}


@pytest.mark.parametrize(("share", "served"), [(0.05, []), (0.0, ["short"])])
def test_others_do_not_get_the_workers_that_wait(share: float, served: list[str]) -> None:
    """`lost` could have been in time and is hopeless now, so there is no calm; it needs its optimal degree."""
    dispatcher = IlpDispatcher(TIMES, replace(OPTIONS, gather_share=share))
    pending = [request("lost", SHAPE, 60.0), request("short", SHAPE, 1000.0, steps=2, arrival_s=NOW_S)]
    chosen = decide(dispatcher, pending, cluster(None, SOON_S), NOW_S)
    assert [assignment.request_ids[0] for assignment in chosen] == served


def test_once_the_workers_are_together_the_request_has_them() -> None:
    dispatcher = IlpDispatcher(TIMES, OPTIONS)
    pending = [request("lost", SHAPE, 60.0)]
    assert not decide(dispatcher, pending, cluster(None, SOON_S), NOW_S)
    (assignment,) = decide(dispatcher, pending, cluster(None, None), SOON_S)
    assert assignment.diffuse == ("n0-w0", "n0-w1")


@given(data=st.data())
def test_whatever_waits_assignments_keep_the_rules(data: st.DataObject) -> None:
    """Ticks one after another: only idle workers are given away, each once, and none that waits for another request."""
    dispatcher = IlpDispatcher(TIMES, OPTIONS)
    now_s = NOW_S
    for tick in range(data.draw(st.integers(1, 4))):
        frees = st.one_of(st.none(), st.floats(now_s, now_s + 3.0))
        views = cluster(*data.draw(st.lists(frees, min_size=16, max_size=16)), num_nodes=8)
        pending = [
            request(f"{tick}-{number}", SHAPE, slo_s, steps=steps, arrival_s=arrival_s)
            for number, (slo_s, steps, arrival_s) in enumerate(
                data.draw(
                    st.lists(st.tuples(st.floats(1.0, 200.0), st.integers(1, 20), st.floats(0.0, now_s)), max_size=12)
                )
            )
        ]
        view = ClusterView(now_s, pending, (), views)
        assignments = dispatcher.decide(view).assignments
        used = [worker_id for assignment in assignments for worker_id in assignment.diffuse]
        idle = {each.worker_id for each in views if each.idle}
        assert len(used) == len(set(used))
        assert set(used) <= idle
        served = [name for assignment in assignments for name in assignment.request_ids]
        assert len(served) == len(set(served))
        # Whoever can run at all is served where there is more room than requests.
        if len([number for number in range(8) if {f"n{number}-w0", f"n{number}-w1"} <= idle]) >= len(pending):
            assert set(served) == {each.spec.request_id for each in pending}
        now_s += data.draw(st.floats(0.01, 5.0))
