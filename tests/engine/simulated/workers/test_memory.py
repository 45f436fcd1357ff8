"""Memory of simulated workers: loads, evictions, placements, what does not fit, workers that are lost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.engine.simulated.scripted import Script, run, simulate, spans
from tridentserve.engine.simulated import FailingWorker, SimulationOptions, WorkerFailure
from tridentserve.errors import ConfigError, OutOfMemoryError, http_status_of
from tridentserve.plans import Replica
from tridentserve.scheduling import events as ev
from tridentserve.testing import make_cluster


def letters(replicas: Iterable[Replica]) -> str:
    return "".join(replica.stage.letter for replica in replicas)


def loads(script: Script) -> list[tuple[float, str, str, str, str]]:
    """The time, the worker, the loaded stage, the evicted stages and the source of each load."""
    return [
        (
            now_s,
            event.worker_id,
            event.loaded.stage.letter,
            letters(event.evicted),
            event.source,
        )
        for now_s, event in script.events
        if isinstance(event, ev.ReplicaLoaded)
    ]


def test_what_is_missing_comes_from_a_peer_of_the_node_or_the_host() -> None:
    script = Script({"r": [run(1, "ED", "n0/a"), run(2, "E", "n0/b"), run(3, "D", "n1/c")]})
    result = simulate(script, {"n0/a": "E", "n0/b": "D", "n1/c": ""}, {"r": 0.0})
    assert loads(script) == [
        (1.0, "n0/a", "D", "", "peer"), (1.0, "n0/b", "E", "", "peer"), (3.0, "n1/c", "D", "", "host"),
    ]  # fmt: skip
    assert spans(result)[1][0] == ("E", 1.0, 1.5)
    assert (result.counts.loads, result.counts.load_bytes, result.counts.load_seconds) == (3, 30, 5.0)


def test_a_placement_moves_weights_when_plans_need_them() -> None:
    _, placement = make_cluster({"a": "E"})
    script = Script({"r": [ev.Place(placement, "test"), run(1, "D", "a"), run(2, "E", "a"), run(3, "D", "a")]})
    result = simulate(script, {"a": "DC"}, {"r": 0.0}, memory_bytes=41)  # two replicas, 5 for a peak, 16 of buffer
    # E takes the place of C, which nobody wants, not of D, which plan 3 needs.
    assert loads(script) == [(7.0, "a", "E", "C", "host")]
    assert spans(result) == {1: [("D", 0.0, 4.0)], 2: [("E", 7.0, 7.5)], 3: [("D", 7.5, 11.5)]}
    assert (result.counts.switches, [at_s for at_s, _ in result.placements]) == (1, [0.0, 0.0])


def test_what_the_placement_wants_goes_last_and_comes_back() -> None:
    script = Script({"r": [run(1, "E", "a"), run(2, "D", "a"), run(3, "C", "a")]})
    simulate(script, {"a": "D"}, {"r": 0.0}, memory_bytes=31)
    assert loads(script) == [(3.0, "a", "E", "D", "host"), (6.5, "a", "D", "E", "host"), (13.5, "a", "C", "D", "host")]


def test_evictions_for_an_activation_are_reported_with_the_next_load() -> None:
    script = Script({"s": [run(1, "D", "a", "r s"), run(2, "E", "a", "r"), run(3, "C", "a", "r")]})
    simulate(script, {"a": "DC"}, {"r": 0.0, "s": 0.0}, memory_bytes=41)
    assert loads(script) == [(11.0, "a", "E", "C", "host"), (14.5, "a", "C", "E", "host")]  # C left for D of two


@pytest.mark.parametrize(("memory_bytes", "fits"), [(31 + 5, True), (31 + 4, False)])
def test_a_plan_that_does_not_fit_fails_for_good(memory_bytes: int, fits: bool) -> None:
    script = Script({"s": [run(1, "D", "a", "r s"), run(2, "D", "a", "s", steps=(0, 1))]})
    result = simulate(script, {"a": "D"}, {"r": 0.0, "s": 0.0}, memory_bytes=memory_bytes)
    assert result.counts.out_of_memory == (not fits)
    if not fits:
        ((_, event),) = script.of(ev.PlanFailed)
        assert isinstance(event, ev.PlanFailed)
        assert (event.retry, event.code) == (False, OutOfMemoryError.code)
        assert "out of memory: D of m for 2 x 512x512 at degree 1 needs 36 bytes on a" in event.error
        assert [request.outcome for request in result.requests] == ["out_of_memory", "out_of_memory"]
        assert spans(result)[2] == [("D", 0.0, 1.0)]  # the worker continues
    assert http_status_of(OutOfMemoryError.code) == 507


def test_a_batch_is_decoded_one_by_one() -> None:
    script = Script({"s": [run(1, "C", "a", "r s")]})
    result = simulate(script, {"a": "C"}, {"r": 0.0, "s": 0.0}, memory_bytes=31)
    assert result.plans[0].used_bytes == (10 + 5 + 16,)
    assert spans(result)[1] == [("C", 0.0, 4.0)]


def test_followers_need_the_weights_of_d_alone() -> None:
    script = Script({"r": [run(1, "EDC", "a b", group="ab")]})
    result = simulate(script, {"a": "EDC", "b": "D"}, {"r": 0.0})
    assert result.counts.loads == 0
    assert result.plans[0].used_bytes == (30 + 5 + 16, 10 + 5 + 16)


def test_a_lost_worker_fails_its_plans_and_comes_back_with_its_placement() -> None:
    script = Script({"r": [run(1, "D", "a b"), run(2, "D", "a"), run(3, "E", "a"), run(4, "D", "b")],
                     "now": [run(5, "D", "a")], "now2": [run(6, "D", "a")]})  # fmt: skip
    failure = WorkerFailure(1.5, "a", 10.0)
    result = simulate(script, {"a": "D", "b": "D"}, {"r": 0.0, "now": 2.0, "now2": 12.0}, failures=(failure,))
    assert [(now_s, type(event).__name__) for now_s, event in script.events if 1.0 < now_s < 2.0] == [
        (1.5, "WorkerLost"), (1.5, "PlanFailed"), (1.5, "PlanFailed"), (1.5, "PlanFailed"),
    ]  # fmt: skip
    failed = [event for _, event in script.of(ev.PlanFailed) if isinstance(event, ev.PlanFailed)]
    assert [(event.plan_id, event.retry) for event in failed] == [(1, True), (2, True), (3, True), (5, True)]
    assert spans(result) == {1: [("D", 0.0, 1.5)], 4: [("D", 1.5, 5.5)], 6: [("D", 12.0, 16.0)]}
    back = script.events[-3]
    assert back[0] == 11.5
    assert isinstance(back[1], ev.WorkerJoined)
    assert back[1].incarnation == 1
    assert result.counts.loads == 0
    assert result.counts.failed_plans == 4


def test_outputs_on_a_lost_worker_are_gone_but_not_those_that_were_pushed_on() -> None:
    failure = WorkerFailure(4.5, "a", 10.0)
    for push_to, outcome in (("c", "finished"), (None, "unfinished")):
        script = Script(
            {"r": [run(1, "D", "a", push_to=push_to)], "now": [run(2, "C", "c", after=1, source="a")]},
        )
        result = simulate(script, {"a": "D", "c": "C"}, {"r": 0.0, "now": 5.0}, failures=(failure,))
        assert result.requests[0].outcome == outcome


def test_a_replica_that_was_under_way_to_a_lost_worker_never_comes() -> None:
    script = Script({"r": [run(1, "D", "a")], "now": [run(2, "D", "b")]})
    failure = WorkerFailure(1.0, "a", 10.0)
    simulate(script, {"a": "", "b": ""}, {"r": 0.0, "now": 6.0}, failures=(failure,))
    assert loads(script) == [(9.0, "b", "D", "", "host")]


def test_what_a_placement_wants_beyond_the_memory_is_not_resident_at_the_start() -> None:
    script = Script({"r": [run(1, "E", "a"), run(2, "D", "a"), run(3, "C", "a")]})
    result = simulate(script, {"a": "EDC"}, {"r": 0.0}, memory_bytes=45)
    assert result.counts.loads > 0
    assert all(plan.used_bytes[0] <= 45 for plan in result.plans)


def test_failures_name_workers_that_exist() -> None:
    with pytest.raises(ConfigError, match="not in the cluster: z"):
        simulate(Script({}), {"a": "D"}, {}, failures=(WorkerFailure(1.0, "z", 1.0),))
    with pytest.raises(ConfigError, match="down_s must be above 0"):
        SimulationOptions(failures=(WorkerFailure(1.0, "a", 0.0),))
    with pytest.raises(ConfigError, match="not in the cluster: z"):
        simulate(Script({}), {"a": "D"}, {}, failing=(FailingWorker("z"),))
    with pytest.raises(ConfigError, match="nor after end_s"):
        SimulationOptions(failing=(FailingWorker("a", 2.0, 1.0),))
