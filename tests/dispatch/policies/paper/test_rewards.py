"""The paper's program: its objective by hand, by its own integer program with big-M, and by brute force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import DispatchOptions
from dispatch.policies import make_policy
from dispatch.policies.paper.rewards import PAPER_WEIGHTS, compute_communication_penalty, compute_late_reward
from tests.dispatch.cluster import decide, request, worker, workers
from tests.dispatch.policies.scenes import LOAD, cluster
from tests.profiler.synthetic import SHAPES, cost_model, step_seconds
from tridentserve.protocols import PendingRequest
from tridentserve.requests import Shape
from tridentserve.stages import PlacementType, Stage

TIMES = cost_model()
ALONE = DispatchOptions(max_batch=1, time_limit_s=30.0)
PAPER = make_policy("tridentserve-paper", TIMES, cluster(4), LOAD, ALONE).dispatcher
SMALL, MIDDLE, LARGE = SHAPES[:3]
STEPS, NOW_S, MIN_EFFICIENCY = 20, 100.0, 0.8
# Ties and the order of deadlines, both below any penalty.
TIES = 2 * PAPER_WEIGHTS.tie
BIG_M = 1e5


class Way(NamedTuple):
    """A primary type and a degree."""

    primary: PlacementType
    degree: int


def run_s(shape: Shape, way: Way) -> float:
    """Seconds of the stages that the type holds."""
    total_s = STEPS * step_seconds(shape, way.degree)
    for stage in (Stage.ENCODE, Stage.DECODE):
        if stage in way.primary.stages:
            total_s += TIMES.seconds("one", stage, shape)
    return total_s


def ways_of(shape: Shape, idle: Mapping[PlacementType, int]) -> list[Way]:
    """Efficient degrees (C0). Width within the node of four."""
    return [
        Way(kind, degree)
        for kind in idle
        for degree in (1, 2, 4)
        if degree == 1 or step_seconds(shape, 1) / (degree * step_seconds(shape, degree)) >= MIN_EFFICIENCY
    ]


def reward(entry: PendingRequest, way: Way, ways: Sequence[Way]) -> float:
    """By hand, after appendix C.2."""
    shape = entry.spec.shape
    best_s = min(run_s(shape, other) for other in ways)
    overtime = max(0.0, (NOW_S + best_s - entry.deadline_s) / best_s)
    in_time = NOW_S + run_s(shape, way) <= entry.deadline_s
    tokens = shape.height * shape.width / 256
    penalty = {PlacementType.EDC: 0.0, PlacementType.DC: 1e-5 * tokens, PlacementType.ED: 1e-4 * tokens}[way.primary]
    return (1000.0 if in_time else min(1000.0, 100.0 * (1 + overtime))) - penalty


def choices(pending: Sequence[PendingRequest], idle: Mapping[PlacementType, int]) -> Iterator[tuple[Way | None, ...]]:
    """All that keep to the idle workers (C1, C2)."""
    for chosen in product(*([None, *ways_of(entry.spec.shape, idle)] for entry in pending)):
        taken = dict.fromkeys(idle, 0)
        for way in filter(None, chosen):
            taken[way.primary] += way.degree
        if all(taken[kind] <= idle[kind] for kind in idle):
            yield chosen


def evaluate(
    pending: Sequence[PendingRequest], chosen: Sequence[Way | None], idle: Mapping[PlacementType, int]
) -> float:
    pairs = zip(pending, chosen, strict=True)
    return sum(reward(entry, way, ways_of(entry.spec.shape, idle)) for entry, way in pairs if way is not None)


def solve_as_written(pending: Sequence[PendingRequest], idle: Mapping[PlacementType, int]) -> float:
    """The best objective of the program of section 6.2, with the variables y and the big-M constraint."""
    model, objective = pulp.LpProblem("paper", pulp.LpMaximize), []
    taken: dict[PlacementType, list[object]] = {kind: [] for kind in idle}
    for index, entry in enumerate(pending):
        ways = ways_of(entry.spec.shape, idle)
        x = {way: model.add_variable(f"x_{index}_{way.primary}_{way.degree}", cat=pulp.LpBinary) for way in ways}
        y = model.add_variable(f"y_{index}", cat=pulp.LpBinary)
        model += pulp.lpSum(x.values()) <= 1  # C1
        spent_s = pulp.lpSum(run_s(entry.spec.shape, way) * x[way] for way in ways)
        model += NOW_S + spent_s <= entry.deadline_s + BIG_M * (1 - y)  # C3a
        model += y <= pulp.lpSum(x.values())  # C3b
        best_s = min(run_s(entry.spec.shape, way) for way in ways)
        late = min(1000.0, 100.0 * (1 + max(0.0, (NOW_S + best_s - entry.deadline_s) / best_s)))
        objective.append(1000.0 * y + late * (pulp.lpSum(x.values()) - y))
        tokens = entry.spec.shape.tokens
        objective += [-compute_communication_penalty(way.primary, tokens) * x[way] for way in ways]
        for way in ways:
            taken[way.primary].append(way.degree * x[way])
    for kind, number in idle.items():
        model += pulp.lpSum(taken[kind]) <= number  # C2
    model.setObjective(pulp.lpSum(objective))
    model.solve(pulp.HiGHS(msg=False, threads=1))
    return float(pulp.value(model.objective))


entries = st.tuples(st.sampled_from((SMALL, MIDDLE, LARGE)), st.sampled_from((0.1, 1.0, 3.0, 8.0, 20.0, 99.0, 130.0)))


@settings(max_examples=40)
@given(st.lists(entries, min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 4))
def test_no_other_choice_is_worth_more(asked: list[tuple[Shape, float]], num_edc: int, num_dc: int) -> None:
    views = [*workers(num_edc, "EDC"), *workers(num_dc, "DC", first=num_edc), worker("e", "E")]
    views += [worker(f"busy{i}", "EDC", free_at_s=1e6) for i in range(4 - num_edc)]
    views += [worker(f"busy-dc{i}", "DC", free_at_s=1e6) for i in range(4 - num_dc if num_dc else 0)]
    idle = {PlacementType.EDC: num_edc} | ({PlacementType.DC: num_dc} if num_dc else {})
    pending = [request(f"r{i}", shape, slo_s) for i, (shape, slo_s) in enumerate(asked)]
    given_ways = {
        entry.request_ids[0]: Way(entry.primary, len(entry.diffuse)) for entry in decide(PAPER, pending, views, NOW_S)
    }
    value = evaluate(pending, [given_ways.get(entry.spec.request_id) for entry in pending], idle)
    best = max(evaluate(pending, chosen, idle) for chosen in choices(pending, idle))
    assert best == pytest.approx(solve_as_written(pending, idle), abs=1e-3)
    assert best - len(pending) * TIES <= value <= best + 1e-6


def test_late_rewards_age_up_to_that_of_a_request_in_time() -> None:
    assert [compute_late_reward(overtime) for overtime in (0.0, 1.0, 4.5, 9.0, 50.0)] == [100, 200, 550, 1000, 1000]


def test_penalties_grow_with_the_index_of_the_virtual_replica() -> None:
    order = (PlacementType.EDC, PlacementType.DC, PlacementType.ED, PlacementType.D)
    penalties = [compute_communication_penalty(kind, 4096.0) for kind in order]
    assert penalties == pytest.approx([0.0, 0.04096, 0.4096, 0.45056])


def test_more_requests_in_time_beat_one_that_ends_earlier() -> None:
    """The known weakness of the objective: starts count, so that all run at degree 1."""
    pending = [request(f"r{i}", LARGE) for i in range(4)]
    assert [len(entry.diffuse) for entry in decide(PAPER, pending, workers(4, "EDC"), NOW_S)] == [1, 1, 1, 1]
    assert len(decide(PAPER, pending[:1], workers(4, "EDC"), NOW_S)[0].diffuse) == 4


def test_d_runs_to_its_end_and_equal_requests_are_batched_before_the_solve() -> None:
    pending = [request(f"r{i}", SMALL, steps=1000) for i in range(2)]
    assert [entry.num_steps for entry in decide(PAPER, pending, workers(2, "EDC"), 0.0)] == [None, None]


def test_what_idle_workers_of_several_nodes_make_together_waits_for_one_node() -> None:
    """C2 counts workers; the group is looked for afterwards."""
    tight_s = NOW_S + run_s(LARGE, Way(PlacementType.EDC, 4)) + 0.01
    apart = [*workers(2, "EDC"), *workers(2, "EDC", node="n1")]
    apart += [worker(f"{node}-busy{i}", "EDC", node=node, free_at_s=1e6) for node in ("n0", "n1") for i in range(2)]
    assert decide(PAPER, [request("r", LARGE, tight_s)], apart, NOW_S) == []
    (entry,) = decide(PAPER, [request("r", LARGE, tight_s)], workers(4, "EDC"), NOW_S)
    assert len(entry.diffuse) == 4
