"""Requests whose steps all run in one plan: whatever a policy decides, they are not stopped to go on later."""

from __future__ import annotations

from dataclasses import replace

from tests.scheduling.test_runs import Bench, plan_of
from tridentserve.plans import DispatchPlan
from tridentserve.protocols import Decisions, Preemption
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage
from tridentserve.testing import make_request

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE


def arrive(bench: Bench, *names: str, steps: int = 4) -> None:
    for name in names:
        bench.on(ev.RequestArrived(replace(make_request(name, steps), whole=True)))


def test_a_segment_has_all_steps_and_c_follows() -> None:
    bench = Bench()
    arrive(bench, "r")
    plan = bench.start(decode="", num_steps=1)
    assert (plan.stages, plan.num_steps, plan.saves) == ((E, D, C), 4, None)
    assert isinstance(bench.finish(plan, 5.0)[0], ev.Finish)


def test_c_stays_where_the_policy_wants_it() -> None:
    bench = Bench()
    arrive(bench, "r")
    diffuse = bench.start(decode="c", num_steps=2)
    assert (diffuse.stages, diffuse.num_steps) == ((E, D), 4)
    (effect,) = bench.finish(diffuse, 5.0)
    assert (plan_of(effect).stages, plan_of(effect).workers) == ((C,), ("c",))


def test_d_does_not_yield_and_e_elsewhere_does() -> None:
    bench = Bench()
    arrive(bench, "r", "s")
    bench.start()
    assert bench.decide(Decisions(preemptions=[Preemption("r", "in a hurry")]), 1.0) == []
    encode = bench.start(ids="s", encode="e", diffuse="b", decode="b")
    assert encode.stages == (E,)
    assert bench.decide(Decisions(preemptions=[Preemption("s", "")]), 1.0) == []
    arrive(bench, "t")
    assert bench.decide(Decisions(preemptions=[Preemption("s", "")]), 1.0) == [ev.Yield(encode.plan_id, "")]


def test_a_request_of_a_lost_worker_starts_again() -> None:
    bench = Bench()
    arrive(bench, "r", steps=8)
    plan = bench.start()
    bench.on(ev.WorkerLost("a", "killed"), 3.0)
    bench.on(ev.PlanFailed(plan.plan_id, "a was lost"), 3.0)
    assert bench.pending() == {"r": (0, False, None)}
    again: DispatchPlan = bench.start(3.0, diffuse="b", encode="b", decode="b")
    assert again.members[0].steps == (0, 8)


def test_they_share_no_batch() -> None:
    one, other = (replace(make_request(name), whole=True) for name in "rs")
    assert one.batch_key != other.batch_key
    assert replace(one, whole=False).batch_key == replace(other, whole=False).batch_key
