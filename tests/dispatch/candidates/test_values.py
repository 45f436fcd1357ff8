"""The value of groups: deadlines first, then what a group does per second, by urgency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from dispatch import ValueOptions
from dispatch.candidates.candidate import Candidate
from dispatch.candidates.values import HOPELESS, OVERDUE, Appraisal, Pressure, find_efficiency
from dispatch.solver.problem import GroupKind
from tridentserve.stages import PlacementType

OPTIONS = ValueOptions()
# Levels of deadlines are a second apart.
HORIZON_S = 8.0
# Nobody needs the workers, so that any group that makes the deadline counts.
IDLE = Pressure(HORIZON_S, 0.0)
BUSY = Pressure(HORIZON_S, 0.8)
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


def appraise(
    candidates: Sequence[Candidate], idle: int = 8, options: ValueOptions = OPTIONS, pressure: Pressure = IDLE
) -> Appraisal:
    """At 0 s, with `idle` idle workers in each of two pools."""
    return Appraisal(candidates, [idle, idle], now_s=0.0, pressure=pressure, options=options)


def compute_values(appraisal: Appraisal, deadline_s: float) -> Mapping[GroupKind, float]:
    return appraisal.compute_values_at(appraisal.find_standing(deadline_s))


def values(
    candidates: Sequence[Candidate], deadline_s: float, idle: int = 8, pressure: Pressure = IDLE
) -> dict[int, float]:
    """By degree."""
    found = compute_values(appraise(candidates, idle, pressure=pressure), deadline_s)
    return {group.degree: value for group, value in found.items()}


def by_pool(candidates: Sequence[Candidate], deadline_s: float) -> list[float]:
    return [value for _, value in sorted(compute_values(appraise(candidates), deadline_s).items())]


WIDTHS = [candidate(1, 8.0), candidate(2, 4.2), candidate(4, 2.2)]


def test_only_groups_that_make_the_deadline_count_while_it_can_be_made() -> None:
    assert set(values(WIDTHS, deadline_s=10.0)) == {1, 2, 4}
    assert set(values(WIDTHS, deadline_s=5.0)) == {2, 4}
    assert set(values(WIDTHS, deadline_s=3.0)) == {4}


def test_any_width_that_is_faster_counts_for_a_request_that_can_be_in_time() -> None:
    wasteful = [candidate(1, 8.0), candidate(2, 6.0, efficient=False), candidate(4, 5.0, efficient=False)]
    assert set(values(wasteful, deadline_s=10.0)) == {1, 2, 4}
    assert set(values(wasteful, deadline_s=5.5)) == {4}


def test_with_time_to_spare_efficient_widths_count_alone() -> None:
    """8 and 8.4 GPU-seconds are as good as any; 12 are not, unless no other width leaves a tenth of the time."""
    widths = [candidate(1, 8.0), candidate(2, 4.2), candidate(4, 3.0)]
    assert set(values(widths, deadline_s=20.0, pressure=BUSY)) == {1, 2}
    assert set(values(widths, deadline_s=8.4, pressure=BUSY)) == {2}
    assert set(values(widths, deadline_s=4.3, pressure=BUSY)) == {2, 4}
    assert set(values(widths, deadline_s=20.0, pressure=Pressure(HORIZON_S, 0.6))) == {1, 2, 4}


def test_less_efficiency_is_asked_for_where_the_load_is_low() -> None:
    assert [find_efficiency(load, 0.8) for load in (0.0, 0.45, 0.9, 5.0)] == [0.0, 0.5, 0.8, 0.8]


def test_a_width_that_is_no_faster_than_a_narrower_one_of_its_pool_is_left_out() -> None:
    slower = [candidate(1, 8.0), candidate(2, 8.0), candidate(4, 9.0)]
    assert set(values(slower, deadline_s=20.0)) == {1}
    elsewhere = compute_values(appraise([candidate(1, 8.0), candidate(2, 8.0, pool=1)]), 20.0)
    assert set(elsewhere) == {GroupKind(0, 1), GroupKind(1, 2)}


def test_a_group_is_worth_what_it_does_per_second() -> None:
    """Twice as wide and twice as fast is worth as much as two such groups; twice as wide and no faster is not."""
    perfect = values([candidate(1, 8.0), candidate(2, 4.0)], 100.0)
    assert perfect[2] == pytest.approx(2 * perfect[1])
    poor = values([candidate(1, 8.0), candidate(2, 6.0)], 100.0)
    assert poor[1] < poor[2] < 2 * poor[1]


def test_a_request_waits_for_width_that_comes_in_time() -> None:
    soon = [candidate(1, 8.0), candidate(4, 2.0, start_s=1.0)]
    assert values(soon, deadline_s=5.0, idle=1) == {}
    assert set(values(soon, deadline_s=10.0, idle=1)) == {1}


def test_a_hopeless_request_runs_at_its_optimal_degree_alone() -> None:
    """The widest that is efficient."""
    widths = [*WIDTHS, candidate(8, 2.0, efficient=False)]
    assert set(values(widths, deadline_s=1.0)) == {4}
    assert values(widths, deadline_s=1.0, idle=2) == {}
    too_late = [candidate(1, 8.0), candidate(4, 2.0, start_s=4.0)]
    assert set(values(too_late, deadline_s=5.0, idle=1)) == set()


def test_a_hopeless_request_is_worth_far_less_than_any_that_can_be_in_time() -> None:
    run = [candidate(1, 2.0)]
    hopeless, least = values(run, 1.0)[1], min(values(run, deadline_s)[1] for deadline_s in (2.0, 2.1, 10.0, 1e9))
    assert 0 < 10 * hopeless < least


def test_of_hopeless_requests_one_with_little_left_is_worth_more() -> None:
    """More than its shorter time alone would make it."""
    short, long = (values([candidate(1, seconds)], -100.0)[1] for seconds in (1.0, 10.0))
    assert short > 10 * long


def test_urgency_falls_with_slack() -> None:
    deadlines_s = [2.0 + HORIZON_S * n / 8 for n in range(33)]
    falling = [values([candidate(1, 2.0)], deadline_s)[1] for deadline_s in deadlines_s]
    assert falling == sorted(falling, reverse=True)
    assert [falling[n] / falling[n + 8] for n in (8, 16)] == pytest.approx([math.e, math.e])


def test_very_distant_deadlines_are_not_told_apart() -> None:
    appraisal = appraise([candidate(1, 2.0)])
    assert appraisal.find_standing(5 * HORIZON_S) == appraisal.find_standing(1e9)
    assert appraisal.find_standing(4 * HORIZON_S) != appraisal.find_standing(1e9)


def test_groups_that_do_as_much_are_worth_the_same_when_both_are_in_time() -> None:
    """C waits for its worker in the second pool."""
    quick = candidate(2, 4.0)
    queued = candidate(2, 4.0, pool=1)._replace(decode_free_s=8.0)
    first, second = by_pool([quick, queued], 10.0)
    assert first == second


def test_requests_with_like_deadlines_are_worth_the_same() -> None:
    appraisal = appraise(WIDTHS)
    assert appraisal.find_standing(9.1) == appraisal.find_standing(9.9)
    assert appraisal.find_standing(9.1) != appraisal.find_standing(10.1)
    assert appraisal.find_standing(4.1) != appraisal.find_standing(4.3), "one more degree is in time"


def test_where_its_turn_has_come_an_overdue_request_may_have_any_efficient_degree() -> None:
    appraisal = appraise([*WIDTHS, candidate(8, 2.0, efficient=False)])
    assert {group.degree for group in appraisal.compute_values_at(OVERDUE)} == {1, 2, 4}
    assert {group.degree for group in appraisal.compute_values_at(HOPELESS)} == {4}


def test_a_request_is_long_overdue_after_many_of_its_own_runtimes() -> None:
    run = [candidate(1, 4.0), candidate(2, 2.0)]
    assert OPTIONS.overdue_runs == 50
    assert not appraise(run).is_long_overdue(3.0)
    assert not appraise(run).is_long_overdue(2.0 - 49.9 * 2.0)
    assert appraise(run).is_long_overdue(2.0 - 50.0 * 2.0)
    assert appraise(run, options=ValueOptions(overdue_runs=3.0)).is_long_overdue(2.0 - 3.0 * 2.0)
    assert not appraise([]).is_long_overdue(-1e9)


def test_queues_at_auxiliaries_count() -> None:
    plain = candidate(2, 4.0)
    queued = plain._replace(encode_s=1.0, decode_s=0.5, encode_free_s=3.0, decode_free_s=10.0, primary=PlacementType.D)
    assert queued.diffuse_end_s(0.0) == 3.0 + 1.0 + 4.0
    assert queued.finish_s(0.0) == 10.5
    assert queued.finish_s(20.0) == 25.5
    # Both workers of the group wait for E; E and C take one worker elsewhere.
    assert queued.compute_gpu_seconds(0.0, 8.0) == 2 * 8.0 + 1.0 + 0.5


def test_workers_that_wait_for_e_do_less_per_second() -> None:
    waiting = candidate(1, 4.0, pool=1)._replace(encode_free_s=3.0)
    at_once, later = by_pool([candidate(1, 4.0), waiting], 100.0)
    assert at_once == pytest.approx(later * 7 / 4)


def test_what_takes_no_time_has_a_value_too() -> None:
    """Of a stopped request nothing but a decode may be left."""
    (value,) = values([candidate(1, 0.0)], 5.0).values()
    assert 0 < value < math.inf


def test_nothing_can_run_without_candidates_or_idle_workers() -> None:
    assert values([], 1.0) == {}
    assert values(WIDTHS, 100.0, idle=0) == {}
