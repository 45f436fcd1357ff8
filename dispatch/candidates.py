"""Where a request could run at all, and how long it would take there: types, degrees, memory, auxiliaries.

This is the profile side of constraint C0 (TridentServe, arXiv 2510.02838, section 6.2); which candidates a deadline
leaves is decided in `dispatch.rewards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatch.auxiliaries import Auxiliaries
from dispatch.options import DispatchOptions
from dispatch.pools import Pool
from dispatch.problem import Slot
from profiler.memory import held_weights_bytes, peak_bytes_by_degree
from tridentserve.errors import ProfileError
from tridentserve.protocols import PendingRequest, StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to do of a request: requests with equal work are alike but for their deadlines."""

    model: str
    shape: Shape
    num_outputs: int
    num_steps: int
    needs_encode: bool

    @classmethod
    def of_spec(cls, spec: RequestSpec) -> Work:
        return cls(spec.model, spec.shape, spec.num_outputs, spec.num_inference_steps, needs_encode=True)

    @classmethod
    def of(cls, pending: PendingRequest) -> Work:
        """A request whose D was stopped has its condition already, and fewer steps to go."""
        spec = pending.spec
        num_steps = max(spec.num_inference_steps - pending.steps_done, 0)
        return cls(spec.model, spec.shape, spec.num_outputs, num_steps, needs_encode=not pending.encoded)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One slot for some work. `encode_free_s` and `decode_free_s` say when the auxiliary for that stage is free (minus
    infinity where the primary holds it); `earliest_start_s` when the slot can be formed, now or later."""

    slot: Slot
    primary: PlacementType
    efficient: bool
    encode_s: float
    diffuse_s: float
    decode_s: float
    encode_free_s: float
    decode_free_s: float
    earliest_start_s: float

    @property
    def run_s(self) -> float:
        """Seconds of the three stages without any waiting."""
        return self.encode_s + self.diffuse_s + self.decode_s

    def diffuse_end_s(self, start_s: float) -> float:
        """When D ends if the slot's workers are reserved at `start_s`."""
        return max(start_s, self.encode_free_s) + self.encode_s + self.diffuse_s

    def finish_s(self, start_s: float) -> float:
        """When the request ends, the queues at its auxiliaries counted."""
        return max(self.diffuse_end_s(start_s), self.decode_free_s) + self.decode_s

    def gpu_seconds(self, start_s: float) -> float:
        """Seconds for which workers are taken: all of the slot until D ends (also while it waits for E), and one for
        E elsewhere and for C."""
        elsewhere_s = self.encode_s if self.encode_free_s > float("-inf") else 0.0
        return self.slot.degree * (self.diffuse_end_s(start_s) - start_s) + elsewhere_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Survey:
    """All candidates for some work, and for each pool without one the reason."""

    candidates: tuple[Candidate, ...]
    obstacles: tuple[str, ...]


class Surveyor:
    """Finds candidates; surveys of equal work are made once."""

    def __init__(
        self,
        times: StageTimes,
        options: DispatchOptions,
        pools: Sequence[Pool],
        auxiliaries: Auxiliaries,
        now_s: float,
    ) -> None:
        self._times = times
        self._options = options
        self._pools = pools
        self._auxiliaries = auxiliaries
        self._now_s = now_s
        self._surveys: dict[Work, Survey] = {}
        self._starts_s: dict[Slot, float] = {}

    def survey(self, work: Work) -> Survey:
        """Candidates and obstacles. Work that the profile does not cover has no candidates, and says so."""
        if work not in self._surveys:
            self._surveys[work] = self._survey(work)
        return self._surveys[work]

    def _survey(self, work: Work) -> Survey:
        candidates: list[Candidate] = []
        obstacles: list[str] = []
        try:
            for index, pool in enumerate(self._pools):
                if (primary := pool.types.get(work.model)) is not None:
                    found = self._in_pool(work, index, primary)
                    if isinstance(found, str):
                        obstacles.append(found)
                    else:
                        candidates.extend(found)
        except ProfileError as error:
            return Survey((), (str(error),))
        if not candidates and not obstacles:
            obstacles.append(f"no worker holds the diffuse stage of {work.model}")
        return Survey(tuple(candidates), tuple(dict.fromkeys(obstacles)))

    def _in_pool(self, work: Work, index: int, primary: PlacementType) -> list[Candidate] | str:
        """The candidates in one pool, or why there are none."""
        free_s: dict[Stage, float] = {Stage.ENCODE: float("-inf"), Stage.DECODE: float("-inf")}
        for stage in free_s:
            if stage in primary.stages or (stage is Stage.ENCODE and not work.needs_encode):
                continue
            able = self._auxiliaries.able(work.model, stage, work.shape, work.num_outputs)
            if not able:
                holders = self._auxiliaries.holders(work.model, stage)
                lack = "no auxiliary has the memory for" if holders else "there is no auxiliary for"
                return f"{primary} workers: {lack} {stage}"
            free_s[stage] = self._auxiliaries.free_at_s(able)
        fitting = self._fitting_degrees(work, self._pools[index], primary)
        if isinstance(fitting, str):
            return fitting
        return [
            Candidate(
                slot=Slot(index, degree),
                primary=primary,
                efficient=efficient,
                encode_s=self._seconds(work, Stage.ENCODE) if work.needs_encode else 0.0,
                diffuse_s=work.num_steps * self._seconds(work, Stage.DIFFUSE, degree),
                decode_s=self._seconds(work, Stage.DECODE),
                encode_free_s=free_s[Stage.ENCODE],
                decode_free_s=free_s[Stage.DECODE],
                earliest_start_s=self._earliest_start_s(Slot(index, degree)),
            )
            for degree, efficient in fitting
        ]

    def _fitting_degrees(self, work: Work, pool: Pool, primary: PlacementType) -> list[tuple[int, bool]] | str:
        """Degrees that memory and node size allow, each with whether it is efficient. The narrowest always is: there
        is no cheaper way to run the request there."""
        weights_bytes = held_weights_bytes(self._times, pool.replicas)
        free_bytes = pool.memory_bytes - weights_bytes - self._options.handoff_reserve_bytes
        stages = primary.stages if work.needs_encode else primary.stages - {Stage.ENCODE}
        profiled = self._times.degrees(work.model, Stage.DIFFUSE)
        widest = min(pool.largest_node, self._options.max_degree or pool.largest_node)
        degrees = [degree for degree in profiled if degree <= widest]
        if not degrees:
            return (
                f"{primary} workers can form degree {widest} at most, {work.model} was profiled from {profiled[0]} up"
            )
        peaks = peak_bytes_by_degree(self._times, work.model, stages, work.shape, degrees, work.num_outputs)
        fitting = [degree for degree, peak_bytes in peaks.items() if peak_bytes <= free_bytes]
        if not fitting:
            need_bytes = min(peaks.values())
            return f"{primary} workers have {free_bytes} bytes free beside their weights and need {need_bytes}"
        # Relative to the narrowest degree that covers this size: large sizes need not be profiled at degree 1.
        narrowest_s = self._gpu_seconds_per_step(work, min(peaks))
        return [
            (
                degree,
                degree == fitting[0]
                or narrowest_s / self._gpu_seconds_per_step(work, degree) >= self._options.min_efficiency,
            )
            for degree in fitting
        ]

    def _earliest_start_s(self, slot: Slot) -> float:
        if slot not in self._starts_s:
            self._starts_s[slot] = self._pools[slot.pool].earliest_start_s(slot.degree, self._now_s)
        return self._starts_s[slot]

    def _gpu_seconds_per_step(self, work: Work, degree: int) -> float:
        return degree * self._seconds(work, Stage.DIFFUSE, degree)

    def _seconds(self, work: Work, stage: Stage, degree: int = 1) -> float:
        return self._times.seconds(work.model, stage, work.shape, degree, work.num_outputs)
