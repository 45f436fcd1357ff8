"""The actual times of a simulation: stage times with seeded jitter, cached."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from tridentserve.models.decode_tiles import TILED_SLOWDOWN, find_tiled_shape
from tridentserve.models.step_cache import EXPECTED_SHARES
from tridentserve.plans import DispatchPlan, Replica
from tridentserve.protocols import LoadSource, StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.estimation.plan_estimates import mixed_seconds, rank_peaks, stage_degree
from tridentserve.stages import Stage

_NORMAL = NormalDist()
# The shape and the number of outputs of each member of a plan.
_MemberSizes = tuple[tuple[Shape, int], ...]


@dataclass(frozen=True, slots=True)
class RankDemand:
    """Memory that a plan needs on one of its workers: its replicas (of `weights_bytes`) and an activation peak."""

    replicas: tuple[Replica, ...]
    weights_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class PlanDemand:
    """Time and memory that plans of one kind take."""

    degrees: tuple[int, ...]
    """Number of workers that run each stage, in the plan's order."""
    seconds: tuple[float, ...]
    """Seconds of each stage (per step for DIFFUSE)."""
    ranks: tuple[RankDemand, ...]
    """Memory on each worker, in rank order."""
    frugal: PlanDemand | None = None
    """The same where memory is short, with E one request after another and C in tiles; None where that needs no
    less."""


@dataclass(frozen=True, slots=True)
class TimeFactors:
    """Factors on stage times that make them those of a service that was observed."""

    get_stage_factor: Callable[[DispatchPlan, Stage], float]
    """The factor on a stage of a plan."""
    load_factor: float = 1.0
    """The factor on loads of weights."""


class ActualTimes:
    """Asks a `StageTimes` once per question. The scheduler's own copy may learn; this one does not change."""

    def __init__(self, times: StageTimes, jitter: float, seed: int, factors: TimeFactors | None = None) -> None:
        """`factors`: in place of the jitter."""
        self._times = times
        self._seed = seed
        self._factors = factors
        # A lognormal factor with mean 1 and relative standard deviation `jitter`.
        self._sigma = math.sqrt(math.log1p(jitter * jitter))
        self._demands: dict[tuple[str, tuple[Stage, ...], int, _MemberSizes, float], PlanDemand] = {}
        self.output_bytes = cache(times.output_bytes)
        self.transfer_seconds = cache(times.transfer_seconds)
        self._weights: dict[Replica, int] = {}

    def estimate_demand(self, plan: DispatchPlan, specs: tuple[RequestSpec, ...]) -> PlanDemand:
        """The demand of a plan for these requests. Raises `ProfileError` when they were not profiled."""
        members = tuple([(spec.shape, spec.num_outputs) for spec in specs])
        # Factors are of what has run, so that they have it already.
        share = 1.0 if self._factors is not None else max(EXPECTED_SHARES[spec.quality] for spec in specs)
        key = (plan.model, plan.stages, len(plan.workers), members, share)
        found = self._demands.get(key)
        if found is None:
            found = self._demands[key] = self._estimate_demand(*key)
        return found

    def _estimate_demand(
        self, model: str, stages: tuple[Stage, ...], degree: int, members: _MemberSizes, share: float
    ) -> PlanDemand:
        times = self._times
        degrees = tuple([stage_degree(times, model, stage, degree) for stage in stages])
        seconds = tuple(
            [
                mixed_seconds(times, model, stage, k, members) * (share if stage is Stage.DIFFUSE else 1.0)
                for stage, k in zip(stages, degrees, strict=True)
            ]
        )
        peaks, frugal_peaks = (rank_peaks(times, model, stages, degree, members, frugal) for frugal in (False, True))
        frugal = None
        if frugal_peaks != peaks:
            frugal_s = self._estimate_frugal_seconds(model, stages, degrees, seconds, members)
            frugal = PlanDemand(degrees, frugal_s, self._estimate_ranks(model, stages, degrees, frugal_peaks))
        return PlanDemand(degrees, seconds, self._estimate_ranks(model, stages, degrees, peaks), frugal)

    def _estimate_ranks(
        self, model: str, stages: tuple[Stage, ...], degrees: tuple[int, ...], peaks: tuple[int, ...]
    ) -> tuple[RankDemand, ...]:
        ranks = []
        for rank, peak_bytes in enumerate(peaks):
            replicas = tuple(Replica(model, stage) for stage, k in zip(stages, degrees, strict=True) if rank < k)
            ranks.append(RankDemand(replicas, sum(map(self.weights_bytes, replicas)), peak_bytes))
        return tuple(ranks)

    def _estimate_frugal_seconds(
        self,
        model: str,
        stages: tuple[Stage, ...],
        degrees: tuple[int, ...],
        plain: tuple[float, ...],
        members: _MemberSizes,
    ) -> tuple[float, ...]:
        seconds = dict(zip(stages, plain, strict=True))
        if Stage.ENCODE in seconds:
            k = degrees[stages.index(Stage.ENCODE)]
            seconds[Stage.ENCODE] = sum(self._times.seconds(model, Stage.ENCODE, shape, k, n) for shape, n in members)
        if Stage.DECODE in seconds and any(find_tiled_shape(shape) is not None for shape, _ in members):
            seconds[Stage.DECODE] *= TILED_SLOWDOWN
        return tuple(seconds.values())

    def weights_bytes(self, replica: Replica) -> int:
        found = self._weights.get(replica)
        if found is None:
            found = self._weights[replica] = self._times.weights_bytes(replica.model, replica.stage)
        return found

    def unit(self, replica: Replica) -> int:
        """The number of workers that hold the weights of the replica together."""
        return self._times.unit(replica.model, replica.stage)

    def load_seconds(self, replica: Replica, source: LoadSource) -> float:
        seconds = self._times.load_seconds(replica.model, replica.stage, source)
        return seconds if self._factors is None else seconds * self._factors.load_factor

    def host_seconds(self, model: str, stage: Stage, num_bytes: int) -> float:
        """Seconds from host memory to the device, at the speed at which weights come from there."""
        replica = Replica(model, stage)
        weights_bytes = self.weights_bytes(replica)
        return self.load_seconds(replica, "host") * num_bytes / weights_bytes if weights_bytes else 0.0

    def draw_jitter(self, plan: DispatchPlan, stage: Stage) -> float:
        """The factor on a stage of a plan: for its first request the same in all plans, and under all policies."""
        if self._factors is not None:
            return self._factors.get_stage_factor(plan, stage)
        if not self._sigma:
            return 1.0
        digest = hashlib.blake2b(
            f"{self._seed}/{plan.members[0].request_id}/{stage.value}".encode(), digest_size=6
        ).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / 2**48
        return math.exp(self._sigma * _NORMAL.inv_cdf(uniform) - self._sigma**2 / 2)
