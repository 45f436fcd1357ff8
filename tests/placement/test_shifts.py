"""The Replanner under random arrivals: it leaves a steady load alone, and follows a shift within seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from placement import LoadShare
from placement.demands import compute_stage_speeds
from tests.placement.test_replanner import LARGE, SMALL, Service, cluster, orchestrator
from tridentserve.requests import RequestSpec

WORKERS = cluster(1)
# Few long requests, so that chance is large: GPU-seconds go to D.
DIFFUSING = (LoadShare("one", LARGE, 200), LoadShare("one", SMALL, 200, 5.0))
# One step each: C needs as many workers as D.
DECODING = (LoadShare("one", LARGE, 1), LoadShare("one", SMALL, 1, 5.0))
# The time within which a shift is followed: a shortest window and a few looks.
SOON_S = 40.0


def scale(load: Sequence[LoadShare], pressure: float) -> list[LoadShare]:
    """The load at which the slowest workers of its own placement are as busy as this."""
    plan = orchestrator().plan(load, WORKERS, keep=load)
    speeds = compute_stage_speeds(plan, load, orchestrator().build_costs(WORKERS)).values()
    slowest = min(stage.speed for stage in speeds)
    return [replace(share, weight=share.weight * pressure * slowest) for share in load]


class RandomService(Service):
    """Requests come independently of each other, and the Replanner is asked every second."""

    def run_randomly(self, load: Sequence[LoadShare], seconds: float, rng: Random) -> None:
        end_s, due_s = self.now_s + seconds, [self.now_s + rng.expovariate(share.weight) for share in load]
        while self.now_s < end_s:
            self.now_s += 1.0
            for index, share in enumerate(load):
                while due_s[index] <= self.now_s:
                    self.requests += 1
                    spec = RequestSpec(f"r{self.requests}", share.model, share.shape, share.num_inference_steps)
                    self.replanner.arrived(spec, due_s[index])
                    due_s[index] += rng.expovariate(share.weight)
            plan = self.replanner.propose(self.workers, self.plan, self.now_s)
            if plan is not None:
                self.proposed.append((self.now_s, self.plan, plan))
                self.plan = plan


@settings(max_examples=8)
@given(st.integers(0, 1000), st.floats(0.3, 1.5))
def test_chance_makes_no_placement_flap(seed: int, pressure: float) -> None:
    """Twenty minutes of few heavy requests, from far too little work to far too much."""
    load = scale(DIFFUSING, pressure)
    service = RandomService(load, WORKERS)
    service.run_randomly(load, 1200, Random(seed))
    assert len(service.proposed) <= 1


@settings(max_examples=10)
@given(st.integers(0, 1000), st.floats(0.7, 1.5))
def test_a_shift_is_followed_soon_and_once(seed: int, pressure: float) -> None:
    before, after = scale(DIFFUSING, pressure), scale(DECODING, pressure)
    service, rng = RandomService(before, WORKERS), Random(seed)
    service.run_randomly(before, 300, rng)
    assert not service.proposed
    service.run_randomly(after, 120, rng)
    ((switched_s, _, _),) = service.proposed
    assert switched_s - 300 <= SOON_S


def test_a_load_that_grows_is_planned_for_before_it_is_there() -> None:
    """Decoding grows evenly: the switch comes no later than what has come would call for it."""
    start, end = scale(DIFFUSING, 0.8), scale(DECODING, 1.5)
    service, rng = RandomService(start, WORKERS), Random(1)
    service.run_randomly(start, 300, rng)
    for step in range(1, 31):
        mixed = [replace(share, weight=share.weight * (1 - step / 30) + 1e-6) for share in start]
        service.run_randomly([*mixed, *(replace(share, weight=share.weight * step / 30) for share in end)], 10, rng)
    assert 1 <= len(service.proposed) <= 3
