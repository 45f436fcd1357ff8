"""What memory allows, which never changes while the service runs: asked once per size and kind of worker."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dispatch.options import DispatchOptions
from dispatch.pools import Pool
from profiler.memory import held_weights_bytes, peak_bytes_by_degree, stages_peak_bytes
from tridentserve.plans import Replica
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class FittingDegrees:
    """`degrees`: those whose memory fits, ascending. `narrowest_profiled`: the first that covers the size at all."""

    degrees: tuple[int, ...]
    narrowest_profiled: int


class Fits:
    """Memory checks. Peaks and weights are part of the profile and are not learned, unlike times."""

    def __init__(self, times: StageTimes, options: DispatchOptions) -> None:
        self._times = times
        self._options = options
        self._free_bytes: dict[tuple[int, frozenset[Replica]], int] = {}
        self._degrees: dict[tuple[object, ...], FittingDegrees | str] = {}
        self._auxiliaries: dict[tuple[object, ...], bool] = {}

    def degrees(
        self, pool: Pool, model: str, stages: frozenset[Stage], shape: Shape, num_outputs: int, batch: int
    ) -> FittingDegrees | str:
        """The degrees of D at which these stages of a batch fit the memory and the nodes of a pool, or why there are
        none. The members of a batch are decoded one after the other. `ProfileError` for what is not profiled.

        D of a model whose weights are more than a worker's memory never fits: model parallelism is not done, sequence
        parallelism divides activations only.
        """
        widest = min(pool.largest_node, self._options.max_degree or pool.largest_node)
        key = (pool.memory_bytes, pool.replicas, widest, model, stages, shape, num_outputs, batch)
        if (known := self._degrees.get(key)) is None:
            known = self._degrees[key] = self._find(pool, widest, model, stages, shape, num_outputs, batch)
        return known

    def fits_auxiliary(self, pool: Pool, model: str, stage: Stage, shape: Shape, batch: int) -> bool:
        """Whether E or C of so many outputs at once fits the memory of a pool's workers. `ProfileError` for what is not
        profiled."""
        key = (pool.memory_bytes, pool.replicas, model, stage, shape, batch)
        if (known := self._auxiliaries.get(key)) is None:
            need_bytes = stages_peak_bytes(self._times, model, (stage,), shape, batch=batch)
            known = self._auxiliaries[key] = need_bytes <= self._free(pool)
        return known

    def _free(self, pool: Pool) -> int:
        """What a worker has beside its weights and the handoff buffer; may be negative."""
        key = (pool.memory_bytes, pool.replicas)
        if key not in self._free_bytes:
            held_bytes = held_weights_bytes(self._times, pool.replicas)
            self._free_bytes[key] = pool.memory_bytes - held_bytes - self._options.handoff_reserve_bytes
        return self._free_bytes[key]

    def _find(
        self,
        pool: Pool,
        widest: int,
        model: str,
        stages: frozenset[Stage],
        shape: Shape,
        num_outputs: int,
        batch: int,
    ) -> FittingDegrees | str:
        kind = pool.types[model]
        free_bytes = self._free(pool)
        profiled = self._times.degrees(model, Stage.DIFFUSE)
        degrees = [degree for degree in profiled if degree <= widest]
        if not degrees:
            return f"{kind} workers can form degree {widest} at most, {model} was profiled from {profiled[0]} up"
        peaks = self._peaks(model, stages, shape, degrees, num_outputs, batch)
        fitting = tuple(degree for degree, peak_bytes in peaks.items() if peak_bytes <= free_bytes)
        if not fitting:
            need_bytes = min(peaks.values())
            return f"{kind} workers have {free_bytes} bytes free beside their weights and need {need_bytes}"
        return FittingDegrees(fitting, min(peaks))

    def _peaks(
        self,
        model: str,
        stages: Collection[Stage],
        shape: Shape,
        degrees: Collection[int],
        num_outputs: int,
        batch: int,
    ) -> dict[int, int]:
        together = [stage for stage in stages if batch == 1 or stage is not Stage.DECODE]
        peaks = peak_bytes_by_degree(self._times, model, together, shape, degrees, num_outputs * batch)
        if len(together) < len(stages):
            decode_bytes = stages_peak_bytes(self._times, model, (Stage.DECODE,), shape, batch=num_outputs)
            peaks = {degree: max(peak_bytes, decode_bytes) for degree, peak_bytes in peaks.items()}
        return peaks
