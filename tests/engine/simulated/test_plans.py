"""Plans on simulated workers: order, stages, batches, inputs, groups, stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.simulated.scripted import Script, run, simulate, spans
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions
from tridentserve.engine.simulated.options import WorkerFailure
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage, VirtualReplica
from tridentserve.testing import FixedTimes, make_cluster, make_request


def test_stages_of_a_plan_follow_each_other() -> None:
    script = Script({"r": [run(1, "EDC", "a b", group="ab")]})
    result = simulate(script, {"a": "EDC", "b": "EDC"}, {"r": 1.0}, group_setup_s=0.5)
    assert spans(result) == {1: [("E", 1.5, 2.0), ("D", 2.0, 4.0), ("C", 4.0, 6.0)]}
    (request,) = result.requests
    assert (request.outcome, request.latency_s, request.slo_met, request.start_s) == ("finished", 5.0, False, 1.5)
    assert [(stage.stage, stage.workers, stage.steps) for stage in request.timeline] == [
        (Stage.ENCODE, ("a",), None), (Stage.DIFFUSE, ("a", "b"), 4), (Stage.DECODE, ("a",), None),
    ]  # fmt: skip
    assert request.virtual_replica is VirtualReplica.V0
    # E and C on the leader alone, D on both.
    assert result.busy_seconds == {Stage.ENCODE: 0.5, Stage.DIFFUSE: 4.0, Stage.DECODE: 2.0}
    assert result.utilisation == 6.5 / (2 * 6.0)
    assert (result.attainment, result.virtual_replica_shares[VirtualReplica.V0]) == (0.0, 1.0)
    assert (result.counts.plans, result.counts.groups_made, result.duration_s) == (1, 1, 6.0)


def test_a_group_is_made_once() -> None:
    script = Script({"r": [run(1, "D", "a b", group="ab"), run(2, "D", "a b", group="ab")]})
    result = simulate(script, {"a": "D", "b": "D"}, {"r": 0.0}, group_setup_s=0.5)
    assert spans(result) == {1: [("D", 0.5, 2.5)], 2: [("D", 2.5, 4.5)]}


def test_each_worker_runs_its_plans_in_order_and_an_instance_waits_for_all() -> None:
    script = Script({"r": [run(1, "D", "a"), run(2, "D", "b", steps=(0, 1)), run(3, "D", "a b"), run(4, "D", "b")]})
    result = simulate(script, {"a": "D", "b": "D"}, {"r": 0.0})
    assert spans(result) == {
        2: [("D", 0.0, 1.0)], 1: [("D", 0.0, 4.0)], 3: [("D", 4.0, 6.0)], 4: [("D", 6.0, 10.0)],
    }  # fmt: skip


def test_a_batch_takes_the_time_and_memory_of_all_its_outputs() -> None:
    script = Script({"s": [run(1, "EDC", "a", "r s")]})
    result = simulate(script, {"a": "EDC"}, {"r": 0.0, "s": 0.0})
    assert spans(result) == {1: [("E", 0.0, 0.5), ("D", 0.5, 8.5), ("C", 8.5, 12.5)]}
    assert [request.end_s for request in result.requests] == [12.5, 12.5]
    assert result.plans[0].used_bytes == (30 + 2 * 5 + 16,)  # weights, D of both, handoff buffer


def test_outputs_are_pushed_while_the_receiver_works() -> None:
    script = Script(
        {"r": [run(1, "E", "e", push_to="a")], "s": [run(9, "D", "a", "s", steps=(0, 1))]},
        {1: [run(2, "D", "a", after=1, source="e", push_to="a")], 2: [run(3, "C", "a", after=2, source="a")]},
    )
    result = simulate(script, {"e": "E", "a": "DC"}, {"r": 0.0, "s": 0.0})
    assert spans(result)[2] == [("D", 1.0, 5.0)]  # the condition came at 0.75, before D of s had ended
    assert result.requests[0].end_s == 7.0  # latents stay where they are: no transfer
    assert result.requests[0].virtual_replica is VirtualReplica.V1
    assert (result.counts.transfers, result.counts.transfer_bytes) == (1, 8)


def test_a_plan_waits_for_its_inputs() -> None:
    script = Script({"r": [run(1, "D", "n0/a", push_to="n1/c")]}, {1: [run(2, "C", "n1/c", after=1, source="n0/a")]})
    result = simulate(script, {"n0/a": "D", "n1/c": "C"}, {"r": 0.0})
    assert spans(result)[2] == [("C", 5.0, 7.0)]  # a second across nodes


def test_inputs_that_were_pushed_elsewhere_are_fetched() -> None:
    script = Script({"r": [run(1, "D", "a", push_to="b")]}, {1: [run(2, "C", "c", after=1, source="a")]})
    result = simulate(script, {"a": "D", "b": "C", "c": "C"}, {"r": 0.0})
    assert spans(result)[2] == [("C", 4.25, 6.25)]
    assert result.counts.transfers == 2


def test_what_does_not_fit_the_handoff_buffer_waits_in_host_memory() -> None:
    script = Script(
        {"t": [run(1, "D", "a", "r s t", push_to="c")]}, {1: [run(2, "C", "c", "r s t", after=1, source="a")]}
    )
    result = simulate(
        script, {"a": "D", "c": "C"}, {"r": 0.0, "s": 0.0, "t": 0.0}, handoff_capacity_bytes=16, group_bytes=0
    )
    # Two of three fit, and come by themselves. The third is fetched then, from the host: 10 bytes in 3 s, as weights.
    assert spans(result)[2][0][1] == pytest.approx(12.25 + 0.25 + 8 / 10 * 3)
    assert (result.counts.spills, result.counts.transfers) == (1, 3)


def test_an_input_that_is_nowhere_is_a_failure() -> None:
    script = Script({"r": [run(1, "C", "c", after=7, source="a")]})
    simulate(script, {"c": "C"}, {"r": 0.0})
    ((_, event),) = script.of(ev.PlanFailed)
    assert isinstance(event, ev.PlanFailed)
    assert (event.retry, event.error) == (True, "the inputs of r are gone")


def test_a_plan_that_was_not_profiled_fails_for_good() -> None:
    script = Script({"r": [run(1, "D", "a b c"), run(2, "D", "a", steps=(0, 1))]})
    result = simulate(script, {"a": "D", "b": "D", "c": "D"}, {"r": 0.0})
    assert (result.requests[0].outcome, result.requests[0].error) == (
        "bad_profile", "diffuse was not profiled at degree 3",
    )  # fmt: skip
    assert spans(result) == {2: [("D", 0.0, 1.0)]}


@pytest.mark.parametrize(
    ("at_s", "expected_s", "num_steps"),
    [(0.1, 0.5, 0), (0.5, 0.5, 0), (0.7, 1.5, 1), (1.5, 1.5, 1), (2.6, 3.5, 3), (3.6, 6.5, None), (5.0, 6.5, None)],
)
def test_a_yield_stops_at_the_next_step_boundary(at_s: float, expected_s: float, num_steps: int | None) -> None:
    script = Script({"r": [run(1, "EDC", "a")], "now": [ev.Yield(1, "test")]})
    result = simulate(script, {"a": "EDC"}, {"r": 0.0, "now": at_s})
    ((now_s, event),) = script.of(ev.StageFinished)
    assert isinstance(event, ev.StageFinished)
    assert now_s == pytest.approx(expected_s)
    assert event.num_steps == num_steps
    ran = [span.stage.letter for span in event.spans]
    assert ran == (["E", "D", "C"] if num_steps is None else ["E", "D"] if num_steps else ["E"])
    assert result.counts.yields == (num_steps is not None)


def test_a_request_that_yielded_resumes_elsewhere() -> None:
    script = Script(
        {"r": [run(1, "EDC", "a")], "now": [ev.Yield(1, "test")]},
        {1: [run(2, "DC", "b c", steps=(1, 4), after=1, source="a", group="bc")]},
    )
    result = simulate(script, {"a": "EDC", "b": "EDC", "c": "D"}, {"r": 0.0, "now": 1.0})
    # The state is the condition and the latents: two transfers of 0.25 s.
    assert spans(result)[2] == [("D", 2.0, 3.5), ("C", 3.5, 5.5)]
    assert result.requests[0].outcome == "finished"
    assert result.counts.transfer_bytes == 16


@pytest.mark.parametrize("effect", [ev.Yield(2, "test"), ev.Abort("r", 2, "test")])
def test_a_plan_in_the_queue_stops_at_once(effect: ev.Effect) -> None:
    script = Script({"r": [run(1, "D", "a"), run(2, "D", "a b"), run(3, "D", "b")], "now": [effect]})
    result = simulate(script, {"a": "D", "b": "D"}, {"r": 0.0, "now": 1.0})
    assert spans(result) == {1: [("D", 0.0, 4.0)], 3: [("D", 1.0, 5.0)]}
    reports = [event for now_s, event in script.events if now_s == 1.0][1:]
    assert reports == [ev.StageFinished(2, (), 0) if isinstance(effect, ev.Yield) else ev.PlanStopped(2)]


@pytest.mark.parametrize(("at_s", "expected_s"), [(0.2, 0.5), (1.0, 1.5), (4.0, 4.5), (5.0, 6.5)])
def test_an_abort_stops_at_the_next_step_boundary_or_stage(at_s: float, expected_s: float) -> None:
    script = Script({"r": [run(1, "EDC", "a")], "now": [ev.Abort("r", 1, "test")]})
    simulate(script, {"a": "EDC"}, {"r": 0.0, "now": at_s})
    ((now_s, event),) = script.of(ev.PlanStopped)
    assert now_s == pytest.approx(expected_s)
    assert event == ev.PlanStopped(1)


def test_jitter_is_the_same_for_the_same_seed_and_has_the_mean_one() -> None:
    names = [f"r{i}" for i in range(2000)]

    def end_times(seed: int, jitter: float = 0.2) -> list[float]:
        script = Script({name: [run(i + 1, "D", f"w{i}", name)] for i, name in enumerate(names)})
        types = {f"w{i}": "D" for i in range(len(names))}
        result = simulate(script, types, dict.fromkeys(names, 0.0), jitter=jitter, seed=seed)
        return [plan.end_s for plan in sorted(result.plans, key=lambda plan: plan.plan_id)]

    one = end_times(1)
    assert one == end_times(1) != end_times(2)
    mean = sum(one) / len(one)
    deviation = (sum((end_s - mean) ** 2 for end_s in one) / len(one)) ** 0.5
    assert mean == pytest.approx(4.0, rel=0.02)
    assert deviation == pytest.approx(0.8, rel=0.1)


def test_workers_tell_of_the_loras_that_they_hold() -> None:
    """The latest ones, as many as the options say, when they have changed; a worker that was lost holds none."""
    names = {"r1": "a", "r2": "b", "r3": "a", "r4": "c", "r5": "c"}
    script = Script({name: [run(index, "EDC", "w", name)] for index, name in enumerate(names, 1)})
    requests = {name: replace(make_request(name), loras=(f"m:{lora}",)) for name, lora in names.items()}
    lost = WorkerFailure(38.0, "w", 1.0)
    options = SimulationOptions(held_loras=2, failures=(lost,), group_bytes=0, handoff_capacity_bytes=16)
    specs, placement = make_cluster({"w": "EDC"})
    engine = SimulatedEngine(script, specs, placement, FixedTimes(), options)
    engine.run([(10.0 * index, spec) for index, spec in enumerate(requests.values())])
    ended = [event for _, event in script.events if isinstance(event, ev.StageFinished)]
    told = {event.plan_id: [key for _, keys in event.loras for key in keys] for event in ended}
    assert told == {1: ["m:a"], 2: ["m:a", "m:b"], 3: [], 4: ["m:a", "m:c"], 5: ["m:c"]}
