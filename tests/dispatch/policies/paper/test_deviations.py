"""The deviations as switches: their names, none of them, all of them, and batches before the solve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import DispatchOptions
from dispatch.assignment.batching import batch_first
from dispatch.candidates.work import Work
from dispatch.policies import find_policy, make_policy
from dispatch.policies.paper.deviations import (
    EVERY_DEVIATION,
    NAMES,
    NO_DEVIATION,
    Deviations,
    list_alone,
    list_without,
    parse_deviations,
)
from tests.dispatch.cluster import request
from tests.dispatch.policies.scenes import LOAD, cluster
from tests.dispatch.test_dispatcher import requests, views
from tests.profiler.synthetic import SHAPES, cost_model
from tridentserve.errors import ConfigError
from tridentserve.protocols import ClusterView, PendingRequest, WorkerView
from tridentserve.testing import FixedTimes, find_violations, simulate_dispatcher

TIMES = cost_model()
PATIENT = DispatchOptions(time_limit_s=30.0)


@settings(max_examples=60)
@given(st.lists(st.tuples(requests, views), min_size=1, max_size=3), st.floats(0, 30), st.sampled_from((None, 4)))
def test_with_all_deviations_it_is_the_default(
    ticks: list[tuple[list[PendingRequest], list[WorkerView]]], now_s: float, max_batch: int | None
) -> None:
    options = replace(PATIENT, max_batch=max_batch)
    default, every = (make_policy(name, TIMES, cluster(4), LOAD, options) for name in ("default", EVERY_DEVIATION.name))
    for number, (pending, workers) in enumerate(ticks):
        view = ClusterView(now_s + number, pending, (), workers)
        assert every.dispatcher.decide(view) == default.dispatcher.decide(view)


def test_all_deviations_leave_placement_queues_and_batches_as_in_the_default() -> None:
    default, every = (make_policy(name, TIMES, cluster(4), LOAD) for name in ("default", EVERY_DEVIATION.name))
    assert replace(every, dispatcher=default.dispatcher, name="default") == default
    assert find_policy(EVERY_DEVIATION.name).default_max_batch == find_policy("default").default_max_batch


def test_none_is_the_paper() -> None:
    policy = make_policy("tridentserve-paper", TIMES, cluster(4), LOAD)
    assert (policy.one_pool, policy.all_together, policy.shares_by_work) == (False, False, False)
    assert (policy.decode_order, policy.replanner_wanted, policy.placement) == ("planned", True, None)
    assert parse_deviations("tridentserve-paper") == NO_DEVIATION


@pytest.mark.parametrize("deviations", [each for _, each in (*list_alone(), *list_without())])
def test_names_are_read_as_they_are_written(deviations: Deviations) -> None:
    assert parse_deviations(deviations.name) == deviations
    assert make_policy(deviations.name, TIMES, cluster(4), LOAD).name == deviations.name


def test_a_wrong_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="'width' is no deviation; use all, pooling, "):
        find_policy("tridentserve-paper+width")
    with pytest.raises(ConfigError, match="is no policy"):
        find_policy("tridentserve-paper+")
    assert parse_deviations("tridentserve-paper+all-nodes+nodes") == EVERY_DEVIATION


@pytest.mark.parametrize("name", ["tridentserve-paper", *(f"tridentserve-paper+{name}" for name in NAMES)])
def test_each_serves_in_the_simulator(name: str) -> None:
    times = FixedTimes(step_s=0.5)
    arrivals = {f"r{i}": 0.3 * i for i in range(12)}
    policy = make_policy(name, times, cluster(2, 2), LOAD, DispatchOptions(handoff_reserve_bytes=0))
    kinds = {"n0/a": "EDC", "n0/b": "EDC", "n1/c": "DC", "n1/d": "E"}
    result, workers = simulate_dispatcher(policy.dispatcher, kinds, arrivals, times)
    assert find_violations(result, workers) == []
    assert result.outcomes["finished"] == len(arrivals)


def test_equal_requests_are_batched_in_order_and_no_batch_waits_to_be_full() -> None:
    pending = [request(f"r{i}", SHAPES[0], slo_s=10.0 + i) for i in range(5)]
    work = Work.from_pending(pending[0])
    waiting, batches = batch_first({work: pending}, lambda work: 2)
    assert waiting == {work._replace(batch=2): [pending[0], pending[2]], work: [pending[4]]}
    assert {name: len(members) for name, members in batches.items()} == {"r0": 2, "r2": 2, "r4": 1}
