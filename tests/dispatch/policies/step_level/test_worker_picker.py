"""The picker against one that groups the idle workers anew after every set that is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dispatch.policies.step_level.worker_picker import WorkerPicker
from dispatch.workers.idle_workers import IdleWorkers
from dispatch.workers.pools import take_snapshot
from tests.dispatch.cluster import worker
from tridentserve.plans import WorkerId
from tridentserve.protocols import WorkerView

NAMES = [f"n{n}-w{i}" for n in range(5) for i in range(4)]
# A worker, a pair, or workers that lie anywhere.
SETS = st.one_of(
    st.sampled_from([[name] for name in NAMES]),
    st.sampled_from([NAMES[i : i + 2] for i in range(0, len(NAMES), 2)]),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
)


class SimplePicker:
    """The idle workers as a set."""

    def __init__(self, views: Sequence[WorkerView]) -> None:
        self.views = views
        self.idle = {view.worker_id for view in views if view.idle}
        self.blocks: IdleWorkers | None = None

    def keep(self, workers: Sequence[WorkerId]) -> bool:
        if not workers or not self.idle.issuperset(workers):
            return False
        self.idle.difference_update(workers)
        self.blocks = None
        return True

    def take(self, degree: int, preferred: Sequence[WorkerId]) -> tuple[WorkerId, ...] | None:
        if self.blocks is None:
            views = [replace(view, idle=view.worker_id in self.idle) for view in self.views]
            self.blocks = IdleWorkers(take_snapshot(views).pools[0])
        taken = self.blocks.take(degree, preferred)
        self.idle.difference_update(taken or ())
        return taken


@given(
    busy=st.frozensets(st.sampled_from(NAMES), max_size=8),
    # True: these workers are kept; else as many are taken, and these preferred or not.
    calls=st.lists(st.tuples(st.booleans(), SETS, st.booleans()), max_size=20),
)
def test_sets_that_are_kept_leave_the_others_as_they_were(
    busy: frozenset[str], calls: list[tuple[bool, list[WorkerId], bool]]
) -> None:
    views = [worker(name, "EDC", node=name[:2], free_at_s=1.0 if name in busy else None) for name in NAMES]
    picker, simple = WorkerPicker(take_snapshot(views).pools[0]), SimplePicker(views)
    for keeps, names, prefers in calls:
        if keeps:
            assert picker.keep(names) == simple.keep(names)
        else:
            preferred = names if prefers else []
            assert picker.take(len(names), preferred) == simple.take(len(names), preferred)
        assert picker.num_idle == len(simple.idle)
        for name in names:
            assert picker.count_idle_in_node(name) == sum(other[:2] == name[:2] for other in simple.idle)
            assert picker.find_node(name) == f"{name[:2]}-w0"
    assert not picker.holds("elsewhere")
