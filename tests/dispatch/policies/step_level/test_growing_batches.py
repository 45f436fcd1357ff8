"""A batch that grows as long as nobody gets late, against one that asks every request anew."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dispatch.policies.greedy.work import count_steps_left
from dispatch.policies.step_level.dispatcher import StepTick
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import take_snapshot
from tests.dispatch.cluster import request, workers
from tests.dispatch.policies.step_engine import BATCHES, SMALL, TIMES
from tridentserve.protocols import ClusterView, PendingRequest
from tridentserve.stages import Stage

STEPS = 20


@st.composite
def requests(draw: st.DrawFn) -> list[PendingRequest]:
    """Requests of one kind. Each may be just in time in a batch of some size, with E or without."""
    made = []
    for i in range(draw(st.integers(1, 12))):
        steps_done = draw(st.sampled_from([0, 5, 5, STEPS]))
        batch, spare_s = draw(st.integers(1, 4)), draw(st.floats(-0.01, 0.04))
        step_s = TIMES.seconds("one", Stage.DIFFUSE, SMALL, batch=batch)
        slo_s = (STEPS - steps_done) * step_s + TIMES.seconds("one", Stage.DECODE, SMALL) + spare_s
        made.append(request(f"r{i}", SMALL, slo_s, steps=STEPS, steps_done=steps_done))
    return made


def may_join(tick: StepTick, members: Sequence[PendingRequest], other: PendingRequest) -> bool:
    """True when no request that would be in time alone is late together with the other."""
    together = [*members, other]
    candidate = tick.find_batch_candidates(together, 0)[1]
    return all(
        tick.expected_finish_s(each, candidate) <= each.deadline_s
        or tick.expected_finish_s(each, tick.find_batch_candidates([each], 0)[1]) > each.deadline_s
        for each in together
    )


@given(waiting=requests())
def test_who_joins_delays_nobody_and_who_could_join_does(waiting: list[PendingRequest]) -> None:
    view = ClusterView(0.0, waiting, (), workers(4, "EDC"))
    snapshot = take_snapshot(view.workers)
    tick = StepTick(TIMES, BATCHES, MemoryCheck(TIMES, BATCHES), snapshot, view, BATCHES.batch_limit)
    first, *others = waiting
    members = [first]
    tick.grow(members, others, 0, 1, strict=True)
    expected = [first]
    for other in others:
        has_room = len(expected) < tick.find_batch_limit(first.spec, 0, 1)
        is_left = count_steps_left(first) > 0 and count_steps_left(other) > 0
        if has_room and is_left and may_join(tick, expected, other):
            expected.append(other)
    assert members == expected
