"""Step-level policies whose batches have requests of several sizes: packed steps, and a ring for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch import DispatchOptions
from dispatch.policies.related.dit_serve import DitServe
from dispatch.policies.related.job_orders import JOB_ORDERS
from dispatch.policies.related.patchedserve import PatchedServe
from tests.dispatch.cluster import request, worker, workers
from tests.dispatch.policies.step_engine import BATCHES, LARGE, MIDDLE, SMALL, TIMES, running
from tridentserve.protocols import Assignment, ClusterView, Decisions, PendingRequest, RunningRequest, WorkerView
from tridentserve.scheduling.estimation.plan_estimates import mixed_seconds
from tridentserve.stages import Stage

PACKING = DispatchOptions(max_batch=8, pack_sizes=("one",), ring_sizes=("one",))
FOUR_BUSY = [worker(f"n0-w{i}", "EDC", free_at_s=9.0) for i in range(4)]
ONE_BUSY = FOUR_BUSY[:1]


def decide(
    policy: DitServe | PatchedServe,
    pending: list[PendingRequest],
    views: list[WorkerView],
    active: list[RunningRequest] | None = None,
) -> Decisions:
    return policy.decide(ClusterView(0.0, pending, active or (), views))


def dit_serve(options: DispatchOptions = PACKING) -> DitServe:
    return DitServe(TIMES, options, JOB_ORDERS["srptf"])


def names_of(decisions: Decisions) -> list[set[str]]:
    return [set(each.request_ids) for each in decisions.assignments]


def large_on_four() -> list[RunningRequest]:
    return [running(request("long", LARGE), *(view.worker_id for view in FOUR_BUSY))]


def test_short_ones_join_the_batch_of_a_long_one_as_bricks() -> None:
    """Each has one of the four workers, and no step is sent around for it. Of one alone the three others would wait."""
    short = [request(f"short{i}", SMALL) for i in range(3)]
    decisions = decide(dit_serve(), short, FOUR_BUSY, large_on_four())
    (joined,) = decisions.assignments
    assert joined.takes_over
    assert joined.goes_on
    assert {"long", "short0", "short1"} <= set(joined.request_ids)
    assert joined.diffuse == tuple(view.worker_id for view in FOUR_BUSY)
    assert not decisions.preemptions


def test_they_come_first_where_a_batch_with_them_does_not_pay() -> None:
    """By this profile four workers share a middle one as fast as each of them makes one alone."""
    middle = [request(f"middle{i}", MIDDLE) for i in range(4)]
    together_s = mixed_seconds(TIMES, "one", Stage.DIFFUSE, 4, [(LARGE, 1), *[(MIDDLE, 1)] * 4])
    apart_s = sum(TIMES.seconds("one", Stage.DIFFUSE, shape, 4) for shape in (LARGE, *[MIDDLE] * 4))
    assert together_s > apart_s
    decisions = decide(dit_serve(), middle, FOUR_BUSY, large_on_four())
    assert not decisions.assignments
    assert [each.request_id for each in decisions.preemptions] == ["long"]


@pytest.mark.parametrize("options", [BATCHES, replace(PACKING, ring_sizes=())])
def test_nothing_is_mixed_on_several_workers_unless_the_model_is_named(options: DispatchOptions) -> None:
    short = [request(f"short{i}", SMALL) for i in range(3)]
    decisions = decide(dit_serve(options), short, FOUR_BUSY, large_on_four())
    assert not decisions.assignments
    assert decisions.preemptions


@pytest.mark.parametrize("policy", [dit_serve(), PatchedServe(TIMES, PACKING)])
def test_two_sizes_start_together_on_one_worker(policy: DitServe | PatchedServe) -> None:
    pending = [request("small", SMALL, 100.0), request("middle", MIDDLE, 100.0)]
    assert names_of(decide(policy, pending, workers(1, "EDC"))) == [{"small", "middle"}]


@pytest.mark.parametrize("policy", [dit_serve(BATCHES), PatchedServe(TIMES, BATCHES)])
def test_without_the_option_each_size_starts_alone(policy: DitServe | PatchedServe) -> None:
    pending = [request("small", SMALL, 100.0), request("middle", MIDDLE, 100.0)]
    assert [len(names) for names in names_of(decide(policy, pending, workers(1, "EDC")))] == [1]


def test_another_size_joins_a_batch_of_patchedserve() -> None:
    active = [running(request("old", SMALL, 100.0), "n0-w0")]
    (joined,) = decide(PatchedServe(TIMES, PACKING), [request("new", MIDDLE, 100.0)], ONE_BUSY, active).assignments
    assert (joined.request_ids, joined.takes_over) == (("old", "new"), True)
    assert not decide(PatchedServe(TIMES, BATCHES), [request("new", MIDDLE, 100.0)], ONE_BUSY, active).assignments


def test_nobody_becomes_late_by_one_of_another_size() -> None:
    """Steps of both take longer than those of the small one alone, which has no time for them."""
    (alone,) = decide(PatchedServe(TIMES, PACKING), [request("old", SMALL, 100.0)], workers(1, "EDC")).assignments
    tight = request("old", SMALL, alone.expected_finish_s + 0.01)
    new = request("new", MIDDLE, 100.0)
    policy = PatchedServe(TIMES, PACKING)
    assert not decide(policy, [new], ONE_BUSY, [running(tight, "n0-w0")]).assignments
    assert names_of(decide(policy, [tight, new], workers(1, "EDC"))) == [{"old"}]


def test_a_batch_of_two_sizes_takes_a_third_request_of_either() -> None:
    active = [running(request(name, shape), "n0-w0", batch=2) for name, shape in (("a", SMALL), ("b", MIDDLE))]
    decisions = decide(dit_serve(), [request("new", SMALL)], ONE_BUSY, active)
    assert names_of(decisions) == [{"a", "b", "new"}]
    assert not decisions.preemptions


@pytest.mark.parametrize("change", [{"quality": "fast"}, {"alone": True}, {"num_outputs": 2}])
def test_who_may_not_share_packed_steps_stays_alone(change: dict[str, object]) -> None:
    other = request("small", SMALL)
    other = replace(other, spec=replace(other.spec, **change))  # type: ignore[arg-type]
    decisions = decide(dit_serve(), [other, request("middle", MIDDLE)], workers(1, "EDC"))
    assert [len(each) for each in names_of(decisions)] == [1]


def test_the_time_of_a_mixed_batch_is_that_of_its_packed_steps() -> None:
    def made(*requests: PendingRequest) -> Assignment:
        (found,) = decide(dit_serve(), list(requests), workers(1, "EDC")).assignments
        return found

    both = made(request("small", SMALL, steps=10), request("middle", MIDDLE, steps=10))
    step_s = TIMES.packed_seconds("one", [SMALL, MIDDLE])
    decode_s = sum(TIMES.seconds("one", Stage.DECODE, shape) for shape in (SMALL, MIDDLE))
    encode_s = TIMES.seconds("one", Stage.ENCODE, MIDDLE, 1, 2)
    assert both.expected_finish_s == pytest.approx(encode_s + 10 * step_s + decode_s)


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_is_started_twice_and_nobody_shares_while_workers_are_idle(count: int) -> None:
    pending = [request(f"{shape.width}-{i}", shape, 100.0) for shape in (SMALL, MIDDLE) for i in range(2)]
    policy = PatchedServe(TIMES, replace(PACKING, max_batch=2))
    made = decide(policy, pending, workers(count, "EDC")).assignments
    names = [name for each in made for name in each.request_ids]
    assert len(names) == len(set(names))
    assert len(made) == count


def test_a_batch_of_two_sizes_that_was_stopped_resumes_together() -> None:
    """Else one of them would wait for the worker that holds its state."""
    begun = [request(name, shape, 100.0, steps_done=3) for name, shape in (("a", SMALL), ("b", MIDDLE))]
    begun = [replace(each, encoded=True, held_by="n0-w0") for each in begun]
    (made,) = decide(PatchedServe(TIMES, PACKING), begun, workers(1, "EDC")).assignments
    assert set(made.request_ids) == {"a", "b"}


@pytest.mark.parametrize("policy", [dit_serve(), PatchedServe(TIMES, PACKING)])
def test_a_batch_of_which_one_is_about_to_end_is_not_stopped_for_those_that_wait(
    policy: DitServe | PatchedServe,
) -> None:
    """The others go on by themselves, and are joined then."""
    old = [request(name, SMALL, 100.0, steps=steps, steps_done=9) for name, steps in (("ends", 10), ("goes on", 40))]
    active = [running(each, "n0-w0", batch=2) for each in old]
    decisions = decide(policy, [request("new", SMALL, 100.0, steps=40)], ONE_BUSY, active)
    assert not decisions.assignments
    assert not decisions.preemptions
