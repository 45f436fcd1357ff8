"""Finds the workers that can run the stages of some work when D runs in one pool, as every policy does first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dispatch.candidates.work import Work
from dispatch.workers.auxiliaries import Auxiliaries, AuxiliaryGroup
from dispatch.workers.memory_fit import FittingDegrees, MemoryCheck
from dispatch.workers.pools import Pool
from tridentserve.plans import Replica
from tridentserve.stages import PlacementType, Stage


@dataclass(frozen=True, slots=True)
class Route:
    """The workers that can run the stages of some work, with D in one pool."""

    primary: PlacementType
    """The type that the pool's workers have for the model."""
    fitting: FittingDegrees
    """The degrees of D whose memory fits."""
    groups: Mapping[Stage, tuple[AuxiliaryGroup, ...]]
    """The auxiliaries that can run E and C, for those that the primary lacks and the work needs; never empty."""

    def free_at_s(self, stage: Stage, model: str, auxiliaries: Auxiliaries) -> float | None:
        """The time at which the first auxiliary for this stage is expected to be free; None where it needs none."""
        if stage not in self.groups:
            return None
        return auxiliaries.free_at_s(self.groups[stage], Replica(model, stage))


def find_route(
    work: Work, pool: Pool, memory: MemoryCheck, auxiliaries: Auxiliaries, may_widen: bool = False
) -> Route | str:
    """The route with D in this pool, which holds D of the work's model; else a sentence that says why there is none.
    `may_widen`: E and C may have groups of their optimal degree. `ProfileError` for what is not profiled."""
    primary = pool.types[work.model]
    groups: dict[Stage, tuple[AuxiliaryGroup, ...]] = {}
    for stage in (Stage.ENCODE, Stage.DECODE):
        if stage in primary.stages or (stage is Stage.ENCODE and not work.needs_encode):
            continue
        find = auxiliaries.find_best if may_widen else auxiliaries.find_able
        groups[stage] = find(work.model, stage, work.shape, work.count_outputs_at_once(stage))
        if not groups[stage]:
            holders = auxiliaries.list_holders(work.model, stage)
            lack = "no auxiliary has the memory for" if holders else "there is no auxiliary for"
            return f"{primary} workers: {lack} {stage}"
    stages = primary.stages if work.needs_encode else primary.stages - {Stage.ENCODE}
    fitting = memory.find_degrees(pool, work.model, stages, work.shape, work.num_outputs, work.batch)
    return fitting if isinstance(fitting, str) else Route(primary, fitting, groups)
