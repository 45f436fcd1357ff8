"""The plans that memory allows. They never change while the service runs: computed once per size and kind of worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dispatch.options import DispatchOptions
from dispatch.workers.pools import Pool
from profiler.memory import (
    compute_peak_bytes_by_degree,
    compute_stages_peak_bytes,
    find_largest_unit,
    list_legs,
    list_ways_apart,
    sum_weights_bytes,
)
from tridentserve.plans import Replica
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.scheduling.estimation.plan_estimates import frugal_decode_bytes
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class FittingDegrees:
    """The degrees of D at which some stages fit the memory of a pool's workers."""

    degrees: tuple[int, ...]
    """Ascending, never empty."""
    narrowest_profiled: int
    """The narrowest degree at which the size was profiled at all."""
    in_tiles: bool = False
    """True where they fit with C in tiles only."""
    apart: Mapping[int, frozenset[Stage]] = field(default_factory=dict)
    """The stages that have to be plans of their own at a degree, where there are any."""


class DenoisingLoad(NamedTuple):
    """All that matters of a batch of requests to the memory that it takes."""

    shape: Shape
    num_outputs: int
    """The outputs of each request."""
    batch: int = 1
    """The number of requests."""
    token_ratio: float = 1.0
    """See `RequestSpec.token_ratio`."""


class MemoryCheck:
    """Memory checks. Peaks and weights are part of the profile and are not learned, unlike times."""

    def __init__(self, times: StageTimes, options: DispatchOptions) -> None:
        self._times = times
        self._options = options
        self._units: dict[frozenset[Replica], int] = {}
        self._free_bytes: dict[tuple[int, frozenset[Replica]], int] = {}
        self._degrees: dict[tuple[object, ...], FittingDegrees | str] = {}
        self._auxiliaries: dict[tuple[object, ...], bool] = {}

    def find_unit(self, replicas: frozenset[Replica]) -> int:
        """The number of workers that belong together when they hold these replicas (`dispatch.workers.pools`)."""
        if replicas not in self._units:
            self._units[replicas] = find_largest_unit(self._times, replicas)
        return self._units[replicas]

    def find_degrees(
        self, pool: Pool, model: str, stages: frozenset[Stage], load: DenoisingLoad
    ) -> FittingDegrees | str:
        """The degrees of D at which these stages of a batch fit the memory and the nodes of a pool, or why there are
        none. The members of a batch are decoded one after the other. `ProfileError` for what is not profiled.

        Sequence parallelism divides activations only: D of a model whose weights are more than a worker's memory fits
        where they are divided among a unit of workers.
        """
        widest = min(pool.largest_node, self._options.max_degree or pool.largest_node)
        key = (pool.memory_bytes, pool.replicas, widest, model, stages, load)
        if (known := self._degrees.get(key)) is None:
            known = self._degrees[key] = self._find_degrees(pool, widest, model, stages, load)
        return known

    def fits_auxiliary(
        self, pool: Pool, model: str, stage: Stage, shape: Shape, batch: int, in_tiles: bool = False
    ) -> bool:
        """True when E or C (`in_tiles`) of this many outputs at once fits the memory of a pool's workers.
        `ProfileError` for what is not profiled."""
        key = (pool.memory_bytes, pool.replicas, model, stage, shape, batch, in_tiles)
        if (known := self._auxiliaries.get(key)) is None:
            if in_tiles and stage is Stage.DECODE:
                need_bytes = frugal_decode_bytes(self._times, model, shape, batch=batch)
            else:
                need_bytes = compute_stages_peak_bytes(self._times, model, (stage,), shape, batch=batch)
            known = self._auxiliaries[key] = need_bytes <= self._compute_free_bytes(pool)
        return known

    def _compute_free_bytes(self, pool: Pool) -> int:
        """Bytes that a worker has in addition to its weights and the handoff buffer; may be negative."""
        key = (pool.memory_bytes, pool.replicas)
        if key not in self._free_bytes:
            held_bytes = sum_weights_bytes(self._times, pool.replicas)
            self._free_bytes[key] = pool.memory_bytes - held_bytes - self._options.handoff_reserve_bytes
        return self._free_bytes[key]

    def _find_degrees(
        self, pool: Pool, widest: int, model: str, stages: frozenset[Stage], load: DenoisingLoad
    ) -> FittingDegrees | str:
        kind = pool.types[model]
        profiled = self._times.degrees(model, Stage.DIFFUSE)
        degrees = [degree for degree in profiled if pool.unit <= degree <= widest]
        if not degrees:
            return f"{kind} workers can form degree {widest} at most, {model} was profiled from {profiled[0]} up"
        for in_tiles in (False, True) if Stage.DECODE in stages else (False,):
            fitting: dict[int, frozenset[Stage]] = {}
            least_bytes = 0
            for apart in list_ways_apart(stages) if pool.unit == 1 else [frozenset[Stage]()]:
                needed = self._compute_needs(pool, model, stages, apart, load, degrees, in_tiles)
                least_bytes = min(needed.values())
                for degree, need_bytes in needed.items():
                    if need_bytes <= pool.memory_bytes - self._options.handoff_reserve_bytes:
                        fitting.setdefault(degree, apart)
            if fitting:
                ordered = dict(sorted(fitting.items()))
                return FittingDegrees(tuple(ordered), min(needed), in_tiles, {k: v for k, v in ordered.items() if v})
        usable_bytes = pool.memory_bytes - self._options.handoff_reserve_bytes
        return (
            f"{kind} workers have {usable_bytes} bytes beside the handoff buffer and need {least_bytes} for weights "
            f"and activations"
        )

    def _compute_needs(
        self,
        pool: Pool,
        model: str,
        stages: frozenset[Stage],
        apart: frozenset[Stage],
        load: DenoisingLoad,
        degrees: Collection[int],
        in_tiles: bool,
    ) -> dict[int, int]:
        """Bytes for weights and activations at each degree, with some stages as plans of their own. In units of several
        workers no weights leave, so those of all replicas count."""
        needs = dict.fromkeys(degrees, 0)
        for leg in list_legs(stages, apart):
            held = pool.replicas if pool.unit > 1 else [Replica(model, stage) for stage in leg]
            weights_bytes = sum_weights_bytes(self._times, held)
            peaks = self._compute_peaks(model, leg, load, list(needs), in_tiles)
            needs = {degree: max(needs[degree], weights_bytes + peak) for degree, peak in peaks.items()}
        return needs

    def _compute_peaks(
        self, model: str, stages: Collection[Stage], load: DenoisingLoad, degrees: Collection[int], in_tiles: bool
    ) -> dict[int, int]:
        shape, num_outputs = load.shape, load.num_outputs
        together = [stage for stage in stages if (load.batch == 1 and not in_tiles) or stage is not Stage.DECODE]
        peaks = dict.fromkeys(degrees, 0)
        if together:
            peaks = compute_peak_bytes_by_degree(
                self._times, model, together, shape, degrees, num_outputs * load.batch, load.token_ratio
            )
        if len(together) < len(stages):
            if in_tiles:
                decode_bytes = frugal_decode_bytes(self._times, model, shape, batch=num_outputs)
            else:
                decode_bytes = compute_stages_peak_bytes(self._times, model, (Stage.DECODE,), shape, batch=num_outputs)
            peaks = {degree: max(peak_bytes, decode_bytes) for degree, peak_bytes in peaks.items()}
        return peaks
