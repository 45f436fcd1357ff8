"""TetriServe's dynamic program against enumeration."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.policies.related.group_knapsack import GroupKnapsack, choose_best
from dispatch.policies.related.round_packing import (
    RoundOption,
    RoundRequest,
    count_steps_in_round,
    find_minimal_allocation,
    list_options,
    pack_round,
    survives,
)


@st.composite
def round_requests(draw: st.DrawFn) -> RoundRequest:
    """Wider degrees cost more GPU-seconds and are mostly faster."""
    alone_s, overhead_s = draw(st.floats(0.1, 2.0)), draw(st.floats(0.0, 0.1))
    step_s = {k: alone_s / k + overhead_s * (k - 1) for k in (1, 2, 4)}
    budget_s, encode_s = draw(st.floats(0.0, 12.0)), draw(st.sampled_from([0.0, 0.3]))
    return RoundRequest(draw(st.integers(1, 7)), step_s, min(step_s.values()), budget_s, encode_s)


@given(groups=st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3), max_size=4))
def test_the_knapsack_is_optimal_for_every_width(groups: list[list[tuple[int, int]]]) -> None:
    full = [[(0, 0), *group] for group in groups]
    knapsack = GroupKnapsack(full, 6)
    for width, total in enumerate(knapsack.totals):
        sums = [
            sum(value for _, value in picked) for picked in product(*full) if sum(each for each, _ in picked) == width
        ]
        assert total == max(sums, default=float("-inf"))
        if sums:
            chosen = [group[index] for group, index in zip(full, knapsack.list_choices(width), strict=True)]
            assert sum(each for each, _ in chosen) == width
            assert sum(value for _, value in chosen) == total


@given(groups=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=5), capacity=st.integers(0, 12))
def test_the_best_selection_is_that_of_the_program_whether_all_have_room_or_not(
    groups: list[list[int]], capacity: int
) -> None:
    options = [list(enumerate(values)) for values in groups]
    knapsack = GroupKnapsack(options, capacity)
    assert choose_best(options, capacity) == knapsack.list_choices(knapsack.best_width)


@given(request=round_requests())
def test_the_allocation_has_the_fewest_gpu_seconds_of_all_in_two_degrees(request: RoundRequest) -> None:
    allocation = find_minimal_allocation(request)
    assert sum(allocation.values()) == request.steps_left

    def run_s(steps: dict[int, int]) -> float:
        return request.encode_s + sum(n * request.step_s[k] for k, n in steps.items())

    def gpu_s(steps: dict[int, int]) -> float:
        return sum(n * k * request.step_s[k] for k, n in steps.items())

    mixes = [
        {a: n, b: request.steps_left - n}
        for a, b in combinations(request.step_s, 2)
        for n in range(request.steps_left + 1)
    ]
    in_time = [mix for mix in mixes if run_s(mix) <= request.budget_s + 1e-9]
    if in_time:
        assert run_s(allocation) <= request.budget_s + 1e-8
        assert gpu_s(allocation) == pytest.approx(min(map(gpu_s, in_time)))
    else:
        assert gpu_s(allocation) == pytest.approx(min(map(gpu_s, mixes)))


# Steps last 0.1 to 2.3 s: rounds are shorter than all steps of some examples, and longer than all of others.
@given(requests=st.lists(round_requests(), max_size=4), capacity=st.integers(0, 6), round_s=st.floats(0.0, 4.0))
def test_as_many_survive_as_can(requests: list[RoundRequest], capacity: int, round_s: float) -> None:
    packed = pack_round(requests, capacity, round_s)
    assert sum(option.degree for option in packed if option) <= capacity
    choices = [[None, *list_options(request, round_s)] for request in requests]
    best = max(
        sum(survives(request, option, round_s) for request, option in zip(requests, picked, strict=True))
        for picked in product(*choices)
        if sum(option.degree for option in picked if option) <= capacity
    )
    assert sum(survives(r, option, round_s) for r, option in zip(requests, packed, strict=True)) == best
    for request, option in zip(requests, packed, strict=True):
        if option is not None:
            assert 0 < option.steps <= request.steps_left
            run_s = request.encode_s + option.steps * request.step_s[option.degree]
            assert option.steps == 1 or run_s <= round_s + 1e-8


@given(requests=st.lists(round_requests(), min_size=1, max_size=4), round_s=st.floats(0.0, 4.0))
def test_no_request_is_left_out_that_still_fits(requests: list[RoundRequest], round_s: float) -> None:
    packed = pack_round(requests, 6, round_s)
    room = 6 - sum(option.degree for option in packed if option)
    for request, option in zip(requests, packed, strict=True):
        narrowest = min(each.degree for each in list_options(request, round_s))
        assert option is not None or narrowest > room


def test_a_step_longer_than_the_round_is_chosen_at_the_degree_that_the_deadline_asks_for() -> None:
    relaxed = RoundRequest(steps_left=4, step_s={1: 4.0, 2: 2.2}, fastest_s=2.2, budget_s=20.0)
    tight = RoundRequest(steps_left=4, step_s={1: 4.0, 2: 2.2}, fastest_s=2.2, budget_s=9.0)
    packed = pack_round([relaxed, tight], 3, round_s=0.5)
    assert packed == [RoundOption(degree=1, steps=1), RoundOption(degree=2, steps=1)]
    assert count_steps_in_round(relaxed, 1, round_s=0.5) == 1


def test_a_request_that_has_nothing_left_but_c_is_not_left_out() -> None:
    ended = RoundRequest(steps_left=0, step_s={1: 1.0}, fastest_s=1.0, budget_s=5.0)
    assert pack_round([ended], 1, round_s=1.0) == [RoundOption(degree=1, steps=0)]


def test_a_request_becomes_definitely_late_when_it_is_not_advanced() -> None:
    request = RoundRequest(steps_left=4, step_s={1: 1.0, 2: 0.6}, fastest_s=0.6, budget_s=3.0)
    assert not survives(request, None, round_s=1.0)
    (option,) = pack_round([request], 2, round_s=1.0)
    assert option is not None
    assert survives(request, option, round_s=1.0)
    assert find_minimal_allocation(request) == {1: 1, 2: 3}
