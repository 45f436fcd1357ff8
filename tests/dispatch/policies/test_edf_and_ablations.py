"""EDF and the ablations of section 8.4, by what tells them apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch import IlpDispatcher
from dispatch.policies import make_policy
from tests.dispatch.cluster import request, worker, workers
from tests.dispatch.policies.scenes import LARGE, LOAD, TINY, cluster, started
from tests.profiler.synthetic import cost_model, step_seconds
from tridentserve.stages import PlacementType, Stage

TIMES = cost_model()
EDF, GREEDY, ALIGNED, SWITCHLESS, TURNLESS, DEFAULT = (
    make_policy(name, TIMES, cluster(4), LOAD)
    for name in ("edf", "wo-scheduler", "wo-stage-aware", "wo-switch", "wo-overdue", "default")
)


def run_s(degree: int) -> float:
    """A large request, 20 steps, nothing waits."""
    return 0.02 + 20 * step_seconds(LARGE, degree) + TIMES.seconds("one", Stage.DECODE, LARGE)


@pytest.mark.parametrize(("slo_s", "degree"), [(1000.0, 1), (run_s(2) + 0.01, 2), (run_s(4) + 0.01, 4), (0.1, 4)])
def test_edf_takes_the_narrowest_degree_in_time_and_the_fastest_when_none_is(slo_s: float, degree: int) -> None:
    found = started(EDF.dispatcher, [request("r", LARGE, slo_s)], workers(4, "EDC"))
    assert len(found["r"].diffuse) == degree


def test_edf_does_not_widen_for_nothing() -> None:
    found = started(EDF.dispatcher, [request("r", TINY, slo_s=0.001)], workers(4, "EDC"))
    assert step_seconds(TINY, 4) > step_seconds(TINY, 1) > step_seconds(TINY, 2)
    assert len(found["r"].diffuse) == 2


def test_edf_is_by_deadline() -> None:
    pending = [request("second", TINY, 9.0), request("first", LARGE, 5.0)]
    assert list(started(EDF.dispatcher, pending, workers(1, "EDC"))) == ["first"]


def test_edf_waits_for_the_width_that_makes_the_deadline() -> None:
    tight = request("r", LARGE, run_s(4) + 0.5)
    held = [*workers(2, "EDC"), worker("n0-w2", "EDC", free_at_s=0.2), worker("n0-w3", "EDC", free_at_s=0.2)]
    assert started(EDF.dispatcher, [tight], held) == {}
    assert len(started(EDF.dispatcher, [tight], held, now_s=1.0)["r"].diffuse) == 2


def test_without_its_turn_a_long_overdue_request_waits_for_one_that_can_be_in_time() -> None:
    now_s = 1e6
    pending = [request("overdue", LARGE, 1.0), request("fresh", TINY, arrival_s=now_s)]
    assert list(started(DEFAULT.dispatcher, pending, workers(1, "EDC"), now_s=now_s)) == ["overdue"]
    assert list(started(TURNLESS.dispatcher, pending, workers(1, "EDC"), now_s=now_s)) == ["fresh"]


def test_greedy_keeps_to_the_optimal_degree_on_the_least_communication() -> None:
    held = [*workers(4, "EDC"), *workers(4, "DC", node="n1"), worker("n2-w0", "E", node="n2")]
    pending = [request("first", LARGE), request("second", LARGE, arrival_s=1.0), request("third", LARGE, arrival_s=2.0)]
    found = started(GREEDY.dispatcher, pending, held)
    assert {name: (entry.primary, len(entry.diffuse)) for name, entry in found.items()} == {
        "first": (PlacementType.EDC, 4),
        "second": (PlacementType.DC, 4),
    }
    assert found["first"].encode == found["first"].diffuse
    assert found["first"].decode == found["first"].diffuse[:1]
    assert found["second"].encode == ("n2-w0",)


def test_greedy_prefers_workers_that_hold_the_weights_already() -> None:
    held = [replace(view, resident=frozenset()) for view in workers(4, "EDC")]
    held[2] = replace(held[2], resident=None)
    assert started(GREEDY.dispatcher, [request("r", TINY)], held)["r"].diffuse == ("n0-w2",)


def test_without_stage_awareness_all_stages_have_the_degree_of_d() -> None:
    (found,) = started(ALIGNED.dispatcher, [request("r", LARGE)], workers(4, "EDC")).values()
    assert found.encode == found.diffuse == found.decode
    assert len(found.diffuse) == 4
    assert found.reason.endswith(" s to spare, all stages at its degree, uncontended")


def test_auxiliaries_are_widened_as_far_as_a_node_has_them() -> None:
    held = [*workers(4, "D"), *workers(3, "C", node="n1"), worker("n2-w0", "E", node="n2")]
    (found,) = started(ALIGNED.dispatcher, [request("r", LARGE)], held).values()
    assert (len(found.encode), len(found.diffuse), len(found.decode)) == (1, 4, 3)
    assert found.reason.endswith(" s to spare, E on 1 and C on 3 as no more hold it, uncontended")
    narrow = started(ALIGNED.dispatcher, [request("r", TINY)], held)["r"]
    assert (len(narrow.diffuse), narrow.decode) == (2, ("n1-w0", "n1-w1"))
    (resumed,) = started(ALIGNED.dispatcher, [request("r", LARGE, steps_done=3)], held).values()
    assert resumed.encode == ()


def test_which_policies_follow_the_load() -> None:
    assert isinstance(SWITCHLESS.dispatcher, IlpDispatcher)
    assert not SWITCHLESS.replanner_wanted
    assert all(policy.replanner_wanted for policy in (DEFAULT, GREEDY, ALIGNED, EDF))
    assert all(policy.placement is None for policy in (DEFAULT, SWITCHLESS, GREEDY, ALIGNED, EDF))
