"""B1 to B6 by what tells them apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dispatch.policies import make_policy
from dispatch.policies.baselines import choose_static_degrees
from tests.dispatch.cluster import request
from tests.dispatch.policies.scenes import HUGE, LARGE, LOAD, SMALL, TINY, cluster, holding, started, views
from tests.profiler.synthetic import MIB, cost_model, step_seconds
from tridentserve.errors import ConfigError
from tridentserve.stages import PlacementType, Stage

TIMES = cost_model()
OPTIMAL = {shape: TIMES.optimal_degree("one", Stage.DIFFUSE, shape) for shape in (TINY, SMALL, LARGE)}


def test_the_sizes_of_these_tests_have_different_optimal_degrees() -> None:
    assert OPTIMAL == {TINY: 1, SMALL: 2, LARGE: 4}


@pytest.mark.parametrize("name", ["b1", "b2", "b3", "b4"])
def test_pipelines_keep_all_their_workers_in_all_stages(name: str) -> None:
    specs = cluster(4, 4)
    policy = make_policy(name, TIMES, specs, LOAD)
    assert policy.placement is not None
    assert not policy.replanner_wanted
    assignment = started(policy.dispatcher, [request("r", LARGE)], views(specs, policy.placement))["r"]
    assert assignment.primary is PlacementType.EDC
    assert assignment.encode == assignment.diffuse == assignment.decode
    degree = len(assignment.diffuse)
    assert degree == (2 if name == "b1" else 4)
    run_s = 0.02 + 20 * step_seconds(LARGE, degree) + TIMES.seconds("one", Stage.DECODE, LARGE)
    assert assignment.expected_finish_s == pytest.approx(run_s)


def test_b1_has_half_the_optimal_degree_of_the_largest_for_all() -> None:
    assert choose_static_degrees(TIMES, LOAD) == {"one": 2}
    specs = cluster(4, 4)
    policy = make_policy("b1", TIMES, specs, LOAD)
    assert policy.placement is not None
    pending = [request("tiny", TINY), request("large", LARGE)]
    found = started(policy.dispatcher, pending, views(specs, policy.placement))
    assert [len(assignment.diffuse) for assignment in found.values()] == [2, 2]


@pytest.mark.parametrize("name", ["b1", "b2", "b3", "b4"])
def test_pipeline_level_ignores_memory(name: str) -> None:
    specs = cluster(8, memory_bytes=MIB)
    policy = make_policy(name, TIMES, specs, LOAD)
    assert policy.placement is not None
    workers = views(specs, policy.placement)
    assert policy.dispatcher.can_ever_run(request("r", LARGE).spec, workers) is None
    assert started(policy.dispatcher, [request("r", LARGE)], workers)


@pytest.mark.parametrize("name", ["b5", "b6"])
def test_stage_level_does_not(name: str) -> None:
    specs = cluster(8, memory_bytes=MIB)
    policy = make_policy(name, TIMES, specs, LOAD)
    assert policy.placement is not None
    workers = views(specs, policy.placement)
    assert "bytes free" in (why := policy.dispatcher.can_ever_run(request("r", LARGE).spec, workers) or "") or (
        "the memory" in why
    )
    assert not started(policy.dispatcher, [request("r", LARGE)], workers)


def test_the_head_of_the_line_blocks_in_b3_and_not_in_b4() -> None:
    specs = cluster(4)
    pending = [request("large", LARGE, arrival_s=0.0), request("tiny", TINY, arrival_s=1.0)]
    for name, expected in (("b3", []), ("b4", ["tiny"])):
        policy = make_policy(name, TIMES, specs, LOAD)
        assert policy.placement is not None
        workers = views(specs, policy.placement, {"n0-w0": 9.0})
        assert list(started(policy.dispatcher, pending, workers, now_s=2.0)) == expected


def test_workers_are_kept_for_the_longest_overdue_in_b4() -> None:
    specs = cluster(4, 4)
    policy = make_policy("b4", TIMES, specs, LOAD)
    assert policy.placement is not None
    workers = views(specs, policy.placement, {"n0-w0": 5009.0, "n1-w0": 5001.0})
    pending = [request("large", LARGE, slo_s=1.0), *(request(f"t{i}", TINY, slo_s=9000.0) for i in range(8))]
    found = started(policy.dispatcher, pending, workers, now_s=5000.0)
    assert [assignment.diffuse for assignment in found.values()] == [("n0-w1",), ("n0-w2",), ("n0-w3",)]


def test_a_request_goes_to_the_bucket_of_its_degree_and_only_blocks_that() -> None:
    specs = cluster(4, 4)
    policy = make_policy("b2", TIMES, specs, LOAD)
    assert policy.placement is not None
    workers = views(specs, policy.placement)
    pending = [request(f"l{i}", LARGE, arrival_s=i) for i in range(3)] + [request("tiny", TINY, arrival_s=9.0)]
    found = started(policy.dispatcher, pending, workers)
    assert list(found) == ["l0", "tiny"]
    assert not set(found["l0"].diffuse) & set(found["tiny"].diffuse)
    later = views(specs, policy.placement, dict.fromkeys(found["l0"].diffuse, 9.0))
    assert started(policy.dispatcher, pending[1:3], later) == {}


def test_a_bucket_that_is_lost_leaves_its_requests_to_another() -> None:
    specs = cluster(4, 4)
    policy = make_policy("b2", TIMES, specs, LOAD)
    assert policy.placement is not None
    workers = views(specs, policy.placement)
    wide = started(policy.dispatcher, [request("r", LARGE)], workers)["r"].diffuse
    rest = [worker for worker in workers if worker.worker_id not in wide]
    assert policy.dispatcher.can_ever_run(request("r", LARGE).spec, rest) is None
    assert len(started(policy.dispatcher, [request("r", LARGE)], rest)["r"].diffuse) == 2


def test_a_cluster_that_has_lost_primaries_says_what_it_cannot_do() -> None:
    specs = cluster(8, 8)
    policy = make_policy("b5", TIMES, specs, LOAD)
    assert policy.placement is not None
    workers, tiny = views(specs, policy.placement), request("r", TINY)
    while len(narrow := started(policy.dispatcher, [tiny], workers)["r"].diffuse) == 1:
        workers = [worker for worker in workers if worker.worker_id not in narrow]
    assert policy.dispatcher.can_ever_run(tiny.spec, workers) is None
    primaries = holding(policy.placement, [Stage.DIFFUSE])
    auxiliaries = [worker for worker in workers if worker.worker_id not in primaries]
    assert "no worker holds the diffuse stage" in (policy.dispatcher.can_ever_run(tiny.spec, auxiliaries) or "")
    assert not started(policy.dispatcher, [tiny], auxiliaries)


@pytest.mark.parametrize("name", ["b5", "b6"])
def test_stages_have_clusters_of_their_own(name: str) -> None:
    specs = cluster(8, 8)
    policy = make_policy(name, TIMES, specs, LOAD)
    assert policy.placement is not None
    found = started(policy.dispatcher, [request("r", LARGE), request("t", TINY)], views(specs, policy.placement))
    assert {len(found["r"].diffuse), len(found["t"].diffuse)} == {4, 1}
    for assignment in found.values():
        assert assignment.primary is PlacementType.D
        assert set(assignment.encode) <= set(holding(policy.placement, [Stage.ENCODE]))
        assert set(assignment.diffuse) <= set(holding(policy.placement, [Stage.DIFFUSE]))
        assert set(assignment.decode) <= set(holding(policy.placement, [Stage.DECODE]))
        assert len(assignment.encode) == len(assignment.decode) == 1


def test_b5_is_in_order_of_arrival_and_b6_shortest_first() -> None:
    specs = cluster(8, 8)
    pending = [request("small", SMALL, arrival_s=0.0), request("tiny", TINY, arrival_s=1.0)]
    for name, expected in (("b5", ["small", "tiny"]), ("b6", ["tiny", "small"])):
        policy = make_policy(name, TIMES, specs, LOAD)
        assert policy.placement is not None
        assert list(started(policy.dispatcher, pending, views(specs, policy.placement), now_s=2.0)) == expected


def test_auxiliaries_share_the_work_of_a_tick() -> None:
    specs = cluster(8, 8)
    policy = make_policy("b6", TIMES, specs, LOAD)
    assert policy.placement is not None
    decoders = holding(policy.placement, [Stage.DECODE])
    pending = [request(f"t{i}", TINY) for i in range(len(decoders))]
    found = started(policy.dispatcher, pending, views(specs, policy.placement))
    used = Counter(assignment.decode[0] for assignment in found.values())
    assert used.keys() == set(decoders)


@pytest.mark.parametrize("name", ["b1", "b2", "b3", "b4", "b5", "b6"])
def test_what_cannot_run_stops_nobody(name: str) -> None:
    specs = cluster(8, 8)
    policy = make_policy(name, TIMES, specs, LOAD)
    assert policy.placement is not None
    hopeless = request("hopeless", replace(HUGE, height=4 * HUGE.height))
    workers = views(specs, policy.placement)
    assert list(started(policy.dispatcher, [hopeless, request("r", TINY, arrival_s=1.0)], workers)) == ["r"]
    assert "profile" in (policy.dispatcher.can_ever_run(hopeless.spec, workers) or "")


def test_an_unknown_policy_and_an_empty_cluster_are_said() -> None:
    with pytest.raises(ConfigError, match="'b7' is no policy; use one of default, b1"):
        make_policy("b7", TIMES, cluster(4), LOAD)
    with pytest.raises(ConfigError, match="give at least one worker"):
        make_policy("b1", TIMES, [], LOAD)
