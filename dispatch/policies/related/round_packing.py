"""TetriServe's two steps of a round, free of workers: minimal allocations, then Algorithm 1 (arXiv 2510.01565,
sections 4.2.1 and 4.2.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dispatch.policies.related.group_knapsack import choose_best

# Slack for rounding errors, in seconds.
_EPSILON_S = 1e-9


class RoundRequest(NamedTuple):
    """A request at the start of a round."""

    steps_left: int
    """Denoising steps that are still to do."""
    step_s: Mapping[int, float]
    """Seconds per step at each degree that it may use now."""
    fastest_s: float
    """Seconds per step at the fastest degree that it may ever use."""
    budget_s: float
    """Seconds until its D must have ended."""
    encode_s: float = 0.0
    """Seconds until E has ended; 0 where E is done."""


class RoundOption(NamedTuple):
    """The part that a request may have in this round."""

    degree: int
    """The degree at which the request does its steps."""
    steps: int
    """The number of steps that the request does in this round."""


def find_minimal_allocation(request: RoundRequest) -> dict[int, int]:
    """Steps per degree with the fewest GPU-seconds that end within the budget, in one or two degrees.

    Two are enough: it is a linear program with two constraints, the number of steps and the time. A request that
    cannot end in time (definitely late) gets its cheapest degree.
    """
    steps, step_s = request.steps_left, request.step_s
    budget_s = request.budget_s - request.encode_s + _EPSILON_S
    in_time = [degree for degree, seconds in step_s.items() if steps * seconds <= budget_s]
    if not in_time:
        return {min(step_s, key=lambda degree: (degree * step_s[degree], degree)): steps}
    best: dict[int, int] = {}
    best_cost = math.inf
    for degree in in_time:
        cost = steps * degree * step_s[degree]
        if cost < best_cost:
            best, best_cost = {degree: steps}, cost
    # A mix of two that are in time is no cheaper than one of them, and a mix of two that are late is late.
    for slow in [degree for degree in step_s if degree not in in_time]:
        for fast in in_time:
            n_fast = math.ceil((steps * step_s[slow] - budget_s) / (step_s[slow] - step_s[fast]))
            if n_fast < steps:
                cost = (steps - n_fast) * slow * step_s[slow] + n_fast * fast * step_s[fast]
                if cost < best_cost:
                    best, best_cost = {slow: steps - n_fast, fast: n_fast}, cost
    return best


def count_steps_in_round(request: RoundRequest, degree: int, round_s: float) -> int:
    """The number of steps at this degree that end within the round, after E; no more than are left. At least one, where
    any are left: a step that is longer than the round spans several."""
    whole = math.floor((round_s - request.encode_s + _EPSILON_S) / request.step_s[degree])
    return min(request.steps_left, max(1, whole))


def list_options(request: RoundRequest, round_s: float) -> list[RoundOption]:
    """The degrees of the minimal allocation, each with the steps that it does in the round.

    The paper runs no more steps at a degree than its allocation says; here the workers, which are taken for the round
    anyway, continue to its end. That never hurts: fewer steps are left at the same time. The paper's rounds are longer
    than a step at any degree that it uses; where ours are not, a step holds its workers beyond the round.
    """
    return [
        RoundOption(degree, count_steps_in_round(request, degree, round_s))
        for degree in sorted(find_minimal_allocation(request))
    ]


def survives(request: RoundRequest, option: RoundOption | None, round_s: float) -> bool:
    """True when the request is not definitely late at the end of the round: the steps left then, at the fastest degree,
    end in time (Algorithm 1, lines 9 to 11). A request that ends within the round survives when it ends in time."""
    if option is None:
        return round_s + request.encode_s + request.steps_left * request.fastest_s <= request.budget_s + _EPSILON_S
    run_s = request.encode_s + option.steps * request.step_s[option.degree]
    left = request.steps_left - option.steps
    end_s = max(round_s, run_s) + left * request.fastest_s if left else run_s
    return end_s <= request.budget_s + _EPSILON_S


def pack_round(requests: Sequence[RoundRequest], capacity: int, round_s: float) -> list[RoundOption | None]:
    """Algorithm 1: at most one option per request, `capacity` GPUs, the most survivors.

    The paper leaves ties open. Here, of plans with as many survivors, the one that advances the most survivors, then
    the most requests, then the first ones is chosen: so GPUs that no one needs now still do work.
    """
    n = len(requests)
    most = float((n + 1) ** 2)
    options = [[None, *list_options(request, round_s)] for request in requests]
    groups: list[list[tuple[int, float]]] = []
    for rank, (request, choices) in enumerate(zip(requests, options, strict=True)):
        precedence = (1 - rank / n) / (n + 1)
        group = []
        for option in choices:
            alive = survives(request, option, round_s)
            value = most if alive else 0.0
            if option is not None:
                value += (n + 1 if alive else 1) + precedence
            group.append((option.degree if option else 0, value))
        groups.append(group)
    return [choices[index] for choices, index in zip(options, choose_best(groups, capacity), strict=True)]
