"""The value of groups: deadlines first, then aging, communication, GPU-seconds and latency."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch import RewardOptions
from dispatch.candidates.rewards import Appraisal, compute_communication_penalty, compute_late_reward
from dispatch.candidates.survey import Candidate
from dispatch.solver.problem import GroupKind
from tridentserve.stages import PlacementType

OPTIONS = RewardOptions()
NO_QUEUE = float("-inf")


def candidate(
    degree: int, diffuse_s: float, *, efficient: bool = True, start_s: float = 0.0, pool: int = 0
) -> Candidate:
    return Candidate(
        group=GroupKind(pool, degree),
        primary=PlacementType.EDC,
        efficient=efficient,
        encode_s=0.0,
        diffuse_s=diffuse_s,
        decode_s=0.0,
        encode_free_s=NO_QUEUE,
        decode_free_s=NO_QUEUE,
        earliest_start_s=start_s,
    )


def values(candidates: list[Candidate], deadline_s: float, idle: int = 8) -> dict[int, float]:
    appraisal = Appraisal(candidates, [idle], tokens=1024.0, now_s=0.0, options=OPTIONS, narrowing=8)
    return {group.degree: value for group, value in appraisal.compute_values(deadline_s).items()}


def test_only_slots_that_make_the_deadline_count_while_it_can_be_made() -> None:
    widths = [candidate(1, 8.0), candidate(2, 4.2), candidate(4, 2.2)]
    assert set(values(widths, deadline_s=10.0)) == {1, 2, 4}
    assert set(values(widths, deadline_s=5.0)) == {2, 4}
    assert all(700 < value <= 1000 for value in values(widths, deadline_s=10.0).values())


def test_an_inefficient_width_is_used_only_where_nothing_else_is_in_time() -> None:
    widths = [candidate(1, 8.0), candidate(2, 6.0, efficient=False), candidate(4, 5.0, efficient=False)]
    assert set(values(widths, deadline_s=10.0)) == {1}
    assert set(values(widths, deadline_s=7.0)) == {2}  # 4 is faster yet, and not worth its workers
    assert set(values(widths, deadline_s=5.5)) == {4}
    assert set(values(widths, deadline_s=4.0)) == {1}


def test_a_request_waits_for_width_that_comes_in_time_and_for_nothing_else() -> None:
    soon = [candidate(1, 8.0), candidate(4, 2.0, start_s=1.0)]
    assert values(soon, deadline_s=5.0, idle=1) == {}
    too_late = [candidate(1, 8.0), candidate(4, 2.0, start_s=4.0)]
    assert set(values(too_late, deadline_s=5.0, idle=1)) == {1}


def test_idle_width_is_used_where_it_is_efficient() -> None:
    efficient = values([candidate(1, 8.0), candidate(2, 4.2)], deadline_s=100.0)
    assert efficient[2] > efficient[1]
    wasteful = values([candidate(1, 8.0), candidate(2, 6.0)], deadline_s=100.0)
    assert set(wasteful) == {1}


def test_late_requests_age_up_to_the_reward_of_those_in_time() -> None:
    assert compute_late_reward(0.0, 2.0, OPTIONS) == 100.0
    assert compute_late_reward(2.0, 2.0, OPTIONS) == 200.0
    assert compute_late_reward(2.4, 2.0, OPTIONS) == 200.0
    assert compute_late_reward(2.5, 2.0, OPTIONS) == 225.0
    assert compute_late_reward(1e6, 2.0, OPTIONS) == 1000.0
    aged = [values([candidate(1, 2.0)], deadline_s)[1] for deadline_s in (1.9, -2.0, -10.0, -1000.0)]
    assert aged == sorted(aged)
    assert aged[0] < 110
    assert aged[-1] > 700


def test_a_request_is_fully_aged_where_its_reward_grows_no_more() -> None:
    def is_fully_aged(deadline_s: float, candidates: list[Candidate]) -> bool:
        return Appraisal(candidates, [0], tokens=1.0, now_s=0.0, options=OPTIONS, narrowing=8).is_fully_aged(deadline_s)

    run = [candidate(1, 2.0)]
    assert not is_fully_aged(3.0, run)
    assert not is_fully_aged(2.0 - 8.9 * 2.0, run)
    assert is_fully_aged(2.0 - 9.0 * 2.0, run)
    assert not is_fully_aged(-1e9, [])


def test_communication_grows_with_the_index_and_stays_far_below_the_rewards() -> None:
    kinds = (PlacementType.EDC, PlacementType.DC, PlacementType.ED, PlacementType.D)
    for tokens in (16.0, 120_000.0):
        penalties = [compute_communication_penalty(kind, tokens, OPTIONS) for kind in kinds]
        assert penalties[0] == 0 < penalties[1] < penalties[2] < penalties[3] < OPTIONS.late / 5


def test_queues_at_auxiliaries_count() -> None:
    plain = candidate(2, 4.0)
    queued = replace(plain, encode_s=1.0, decode_s=0.5, encode_free_s=3.0, decode_free_s=10.0, primary=PlacementType.D)
    assert queued.diffuse_end_s(0.0) == 3.0 + 1.0 + 4.0
    assert queued.finish_s(0.0) == 10.5
    assert queued.finish_s(20.0) == 25.5
    # Both workers of the group wait for E; E and C take one worker elsewhere.
    assert queued.gpu_seconds(0.0) == 2 * 8.0 + 1.0 + 0.5


def test_no_run_is_far_narrower_than_is_optimal_unless_it_is_long_overdue() -> None:
    """Degree 8 is efficient here; by a narrowing of 4 degree 1 is not for requests in time, nor for those just late."""
    candidates = [candidate(degree, 8.0 / degree) for degree in (1, 2, 4, 8)]

    def degrees(deadline_s: float, narrowing: int) -> set[int]:
        appraisal = Appraisal(candidates, [8], tokens=1.0, now_s=0.0, options=OPTIONS, narrowing=narrowing)
        return {group.degree for group in appraisal.compute_values(deadline_s)}

    assert 1 in degrees(100.0, 8)
    for deadline_s in (100.0, 0.5):
        assert min(degrees(deadline_s, 4)) == 2
        assert min(degrees(deadline_s, 1)) == 8
    assert 1 in degrees(-100.0, 1)


def test_runs_whose_workers_are_free_at_once_are_narrowed_half_as_much() -> None:
    """C elsewhere leaves whole groups behind, for which it is worth to wait; a leader that decodes does not."""
    merged = [candidate(degree, 8.0 / degree) for degree in (1, 2, 4, 8)]
    apart = [replace(each, primary=PlacementType.ED, decode_free_s=0.0) for each in merged]

    def narrowest(candidates: list[Candidate], narrowing: int, deadline_s: float = 100.0) -> int:
        appraisal = Appraisal(candidates, [8], tokens=1.0, now_s=0.0, options=OPTIONS, narrowing=narrowing)
        return min(group.degree for group in appraisal.compute_values(deadline_s))

    assert [narrowest(merged, narrowing) for narrowing in (4, 2, 1)] == [2, 4, 8]
    assert [narrowest(apart, narrowing) for narrowing in (4, 2, 1)] == [4, 8, 8]
    assert narrowest(apart, 4, deadline_s=0.5) == 4, "also just late"
    assert narrowest(apart, 4, deadline_s=-100.0) == 1, "long overdue"


def test_of_equals_the_shorter_one_is_worth_more_and_a_deadline_more_than_any_size() -> None:
    short, long = (values([candidate(1, seconds)], 1e6)[1] for seconds in (1.0, 2.0))
    assert 0.9 * OPTIONS.size < short - long < 1.1 * OPTIONS.size
    assert values([candidate(1, 10_000.0)], 1e6)[1] > OPTIONS.late


def test_running_is_worth_something_whatever_the_weights() -> None:
    harsh = RewardOptions(gpu_seconds=1e6)
    appraisal = Appraisal([candidate(1, 8.0)], [1], tokens=1.0, now_s=0.0, options=harsh, narrowing=8)
    assert appraisal.compute_values(100.0)[GroupKind(0, 1)] == pytest.approx(harsh.late / 1000)


def test_nothing_can_run_without_candidates() -> None:
    assert Appraisal([], [], tokens=1.0, now_s=0.0, options=OPTIONS, narrowing=8).compute_values(1.0) == {}
