"""E and C queue at the auxiliary that is ready first, with the loads of weights that this takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dispatch import DispatchOptions
from dispatch.workers.auxiliaries import Auxiliaries, name_replica
from dispatch.workers.memory_fit import MemoryCheck
from tests.dispatch.cluster import worker
from tests.profiler.synthetic import cost_model
from tridentserve.protocols import WorkerView
from tridentserve.stages import Stage

NOW_S = 5.0
DECODE = name_replica("one", Stage.DECODE)
TIMES = cost_model()
LOAD_S = TIMES.load_seconds("one", Stage.DECODE)

# The node, the time at which the worker is free (None: it is idle), and whether the weights are in memory.
states = st.tuples(st.integers(0, 1), st.sampled_from([None, 4.0, 6.0, 7.0]), st.booleans())
# The seconds of a C, and the node that it comes from.
works = st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 2))


def make_workers(drawn: Sequence[tuple[int, float | None, bool]]) -> list[WorkerView]:
    views = [worker(f"w{i}", "C", node=f"n{node}", free_at_s=free_s) for i, (node, free_s, _) in enumerate(drawn)]
    return [
        replace(view, resident=view.replicas if is_there else frozenset())
        for view, (_, _, is_there) in zip(views, drawn, strict=True)
    ]


@given(st.lists(states, min_size=1, max_size=6), st.lists(works, max_size=8))
def test_each_c_goes_to_the_worker_that_is_ready_first_and_near_one_among_equals(
    drawn: list[tuple[int, float | None, bool]], asked: list[tuple[float, int]]
) -> None:
    views = make_workers(drawn)
    node_of = {view.worker_id: view.node_id for view in views}
    auxiliaries = Auxiliaries((), node_of, MemoryCheck(TIMES, DispatchOptions()), TIMES, NOW_S)
    groups = tuple((view,) for view in views)
    free_s = {view.worker_id: NOW_S if view.idle else max(NOW_S, view.free_at_s) for view in views}
    lacking = {view.worker_id for view in views if DECODE not in (view.resident or ())}
    for work_s, near in asked:
        ready_s = {name: free_s[name] + (LOAD_S if name in lacking else 0.0) for name in free_s}
        assert auxiliaries.free_at_s(groups, DECODE) == min(ready_s.values())
        first = min(ready_s, key=lambda name: (ready_s[name], node_of[name] != f"n{near}", name))
        taken, end_s = auxiliaries.take(groups, NOW_S, work_s, f"n{near}", DECODE)
        assert (taken, end_s) == ((first,), ready_s[first] + work_s)
        free_s[first] = end_s
        lacking.discard(first)
