"""Finds the ways in which requests could run in one tick, and their times: types, degrees, memory, auxiliaries.

Every policy first asks for the route: the workers that can run the stages when D runs in one pool. The survey of all
pools is the profile side of constraint C0 (TridentServe, arXiv 2510.02838, section 6.2); which candidates a deadline
leaves is decided in `dispatch.candidates.values`, which the view of a tick asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dispatch.candidates.candidate import MERGED_S, Candidate, PoolRule, Survey
from dispatch.candidates.program import DEFAULT_PROGRAM, Program
from dispatch.candidates.values import Appraisal, Pressure, find_efficiency
from dispatch.candidates.work import Waiting, Work
from dispatch.options import DispatchOptions
from dispatch.solver.problem import GroupKind
from dispatch.workers.auxiliaries import Auxiliaries, AuxiliaryGroup, TransferSeconds, name_replica
from dispatch.workers.memory_fit import DenoisingLoad, FittingDegrees, MemoryCheck
from dispatch.workers.pools import Pool, WorkerSnapshot, take_snapshot
from dispatch.workers.residency import LoadTimes
from tridentserve.errors import ProfileError
from tridentserve.protocols import StageTimes, WorkerView
from tridentserve.scheduling.estimation.plan_estimates import stage_degree
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
        return auxiliaries.free_at_s(self.groups[stage], name_replica(model, stage))


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
    load = DenoisingLoad(work.shape, work.num_outputs, work.batch, work.token_ratio)
    fitting = memory.find_degrees(pool, work.model, stages, load)
    return fitting if isinstance(fitting, str) else Route(primary, fitting, groups)


# The candidates of some work in each pool that holds its model, or why there are none.
_PerPool = Mapping[int, list[Candidate] | str]


class Surveyor:
    """Finds candidates; surveys of equal work are made once."""

    def __init__(
        self,
        times: StageTimes,
        options: DispatchOptions,
        pools: Sequence[Pool],
        auxiliaries: Auxiliaries,
        memory: MemoryCheck,
        now_s: float,
        rules: Mapping[int, PoolRule],
        urgent_decodes: bool,
    ) -> None:
        """`rules`: those of some pools, by number. `urgent_decodes`: see `Program`."""
        self._rules = rules
        self._urgent_decodes = urgent_decodes
        self._times = times
        self._options = options
        self._pools = pools
        self._auxiliaries = auxiliaries
        self._memory = memory
        self._now_s = now_s
        self._surveys: dict[Work, Survey] = {}
        self._of_one_step: dict[Work, _PerPool | str] = {}
        self._starts_s: dict[GroupKind, float] = {}
        self._loads: dict[tuple[int, str, bool], LoadTimes] = {}

    def survey(self, work: Work) -> Survey:
        """Candidates and obstacles. Work that the profile does not cover has no candidates, and says so."""
        if (known := self._surveys.get(work)) is None:
            known = self._surveys[work] = self._survey(work)
        return known

    def _survey(self, work: Work) -> Survey:
        of_one_step = self._survey_one_step(work._replace(num_steps=1, weight=1.0))
        if isinstance(of_one_step, str):
            return Survey((), (of_one_step,))
        candidates: list[Candidate] = []
        obstacles: list[str] = []
        for index, found in of_one_step.items():
            if isinstance(found, str):
                obstacles.append(found)
                continue
            whole = [candidate.with_steps(work.num_steps) for candidate in found]
            if (rule := self._rules.get(index)) is not None:
                whole = [candidate for candidate in whole if rule.admits(work, candidate)]
            candidates.extend(whole)
        if not candidates and not obstacles:
            obstacles.append(f"no worker holds the diffuse stage of {work.model}")
        # C in tiles is slower and not quite the same: where something else fits, that it is.
        untiled = [candidate for candidate in candidates if not candidate.in_tiles]
        return Survey(tuple(untiled or candidates), tuple(dict.fromkeys(obstacles)))

    def _survey_one_step(self, work: Work) -> _PerPool | str:
        """The candidates of work with one step, before any rule; or why its times are not known. Requests that were
        stopped at different steps differ in nothing else, and there are many of them."""
        if (known := self._of_one_step.get(work)) is None:
            costs = _WorkCosts(self._times, work)
            try:
                known = {
                    index: self._survey_pool(work, costs, index, primary)
                    for index, pool in enumerate(self._pools)
                    if (primary := pool.types.get(work.model)) is not None
                }
            except ProfileError as error:
                known = str(error)
            self._of_one_step[work] = known
        return known

    def _survey_pool(self, work: Work, costs: _WorkCosts, index: int, primary: PlacementType) -> list[Candidate] | str:
        """The candidates in one pool, or why there are none."""
        pool = self._pools[index]
        route = find_route(work, pool, self._memory, self._auxiliaries, may_widen=True)
        if isinstance(route, str):
            return route
        to_diffuse, to_decode = Stage.ENCODE in route.groups, Stage.DECODE in route.groups
        encode_degree = len(route.groups[Stage.ENCODE][0]) if to_diffuse else 1
        if to_decode:
            most = len(route.groups[Stage.DECODE][0])
        else:
            most = self._times.unit(work.model, Stage.DECODE)
            most = max(most, self._auxiliaries.optimal_degree(work.model, Stage.DECODE, work.shape))
        stages = primary.stages if work.needs_encode else primary.stages - {Stage.ENCODE}
        encode_free_s = route.free_at_s(Stage.ENCODE, work.model, self._auxiliaries)
        decode_free_s = self._find_decode_start_s(route, work.model)
        encode_s = costs.stage_s(Stage.ENCODE, encode_degree) if work.needs_encode else 0.0
        return [
            Candidate(
                group=group,
                primary=primary,
                efficient=costs.is_efficient(degree, route.fitting, self._options.min_efficiency),
                encode_s=encode_s,
                diffuse_s=work.num_steps * costs.step_s(degree),
                decode_s=costs.stage_s(Stage.DECODE, decode_degree),
                encode_free_s=MERGED_S if encode_free_s is None else encode_free_s,
                decode_free_s=decode_free_s,
                earliest_start_s=self._earliest_start_s(group),
                load_s=0.0 if pool.is_resident else self._load_s(index, work.model, stages, degree),
                condition_s=costs.transfer_s(Stage.ENCODE) if to_diffuse else (0.0, 0.0),
                latents_s=costs.transfer_s(Stage.DIFFUSE) if to_decode else (0.0, 0.0),
                encode_degree=encode_degree,
                decode_degree=decode_degree,
                in_tiles=route.fitting.in_tiles,
                apart=route.fitting.apart.get(degree, frozenset()),
            )
            for degree in route.fitting.degrees
            for group in (GroupKind(index, degree),)
            for decode_degree in (
                most if to_decode else stage_degree(self._times, work.model, Stage.DECODE, min(most, degree)),
            )
        ]

    def _find_decode_start_s(self, route: Route, model: str) -> float:
        """The time at which an auxiliary could begin C; `MERGED_S` where the primary does."""
        if (groups := route.groups.get(Stage.DECODE)) is None:
            return MERGED_S
        replica = name_replica(model, Stage.DECODE)
        if self._urgent_decodes:
            return self._auxiliaries.find_first_start_s(groups, replica)
        return self._auxiliaries.free_at_s(groups, replica)

    def _earliest_start_s(self, group: GroupKind) -> float:
        if group not in self._starts_s:
            self._starts_s[group] = self._pools[group.pool].earliest_start_s(group.degree, self._now_s)
        return self._starts_s[group]

    def _load_s(self, index: int, model: str, stages: frozenset[Stage], degree: int) -> float:
        key = (index, model, Stage.ENCODE in stages)
        if (loads := self._loads.get(key)) is None:
            loads = self._loads[key] = LoadTimes(self._pools[index], model, stages, self._times)
        return loads.find_least_s(degree)


class TickView:
    """The workers at `now_s`, grouped and surveyed. The pools and their order depend on what the workers hold, not on
    which of them are idle."""

    def __init__(
        self,
        times: StageTimes,
        options: DispatchOptions,
        workers: Sequence[WorkerView] | WorkerSnapshot,
        now_s: float,
        memory: MemoryCheck | None = None,
        kept: Sequence[Pool] = (),
        rules: Mapping[int, PoolRule] | None = None,
        program: Program = DEFAULT_PROGRAM,
        pressure: Pressure | None = None,
    ) -> None:
        """A `WorkerSnapshot` of the workers and memory checks that were made before save time; they change nothing.
        `pressure`: that of another view of the same tick; without it the dispatcher sets it, by what waits."""
        self.program = program
        self.now_s = now_s
        memory = memory or MemoryCheck(times, options)
        self.snapshot = workers if isinstance(workers, WorkerSnapshot) else take_snapshot(workers, memory.find_unit)
        self.pools = (*self.snapshot.pools, *kept)
        self.auxiliaries = Auxiliaries(self.snapshot.all_pools, self.snapshot.node_of, memory, times, now_s)
        self.idle: tuple[tuple[int, ...], ...] = tuple(pool.idle_per_node for pool in self.pools)
        if not program.per_node:
            self.idle = tuple((sum(nodes),) for nodes in self.idle)
        self.widest = [max(nodes) for nodes in self.idle]
        """The most idle workers that a node of each pool has."""
        self._surveyor = Surveyor(
            times, options, self.pools, self.auxiliaries, memory, now_s, rules or {}, program.urgent_decodes
        )
        self._values = options.objective
        self._appraisals: dict[Work, Appraisal] = {}
        self._min_efficiency = options.min_efficiency
        self.pressure = pressure or Pressure(1.0, 0.0)

    @property
    def any_idle(self) -> bool:
        """True when some primary could start something now."""
        return any(self.widest)

    def list_idle_models(self) -> frozenset[str]:
        """The models of which some primary is idle."""
        return frozenset(
            model for pool, widest in zip(self.pools, self.widest, strict=True) if widest for model in pool.types
        )

    def set_pressure(self, waiting: Waiting, load: float) -> None:
        """Urgency falls in proportion to the mean time from arrival to deadline of what waits; efficiency is asked for
        in proportion to the load."""
        patience_s = [max(0.0, r.deadline_s - r.arrival_s) for requests in waiting.values() for r in requests]
        mean_s = sum(patience_s) / len(patience_s) if patience_s else 1.0
        self.pressure.horizon_s = max(1e-6, self._values.horizon * mean_s)
        self.pressure.efficiency = find_efficiency(load, self._min_efficiency)

    def survey(self, work: Work) -> Survey:
        """The ways in which the work could run, now or later."""
        return self._surveyor.survey(work)

    def appraise(self, work: Work) -> Appraisal:
        """The value of each group to requests with this work; computed once."""
        if (known := self._appraisals.get(work)) is None:
            candidates = self.survey(work).candidates
            known = self._appraisals[work] = self.program.appraise(
                work, candidates, self.widest, self.now_s, self.pressure, self._values
            )
        return known


class _WorkCosts:
    """Times of one kind of work on any workers, each looked up once."""

    def __init__(self, times: StageTimes, work: Work) -> None:
        self._times = times
        self._work = work
        self._steps_s: dict[int, float] = {}
        self._transfers_s: dict[Stage, TransferSeconds] = {}
        self._stages_s: dict[tuple[Stage, int], float] = {}

    def stage_s(self, stage: Stage, degree: int) -> float:
        """Seconds of E or C on this many workers."""
        if (stage, degree) not in self._stages_s:
            self._stages_s[stage, degree] = self._work.stage_s(self._times, stage, degree)
        return self._stages_s[stage, degree]

    def step_s(self, degree: int) -> float:
        if degree not in self._steps_s:
            work = self._work
            outputs = work.count_outputs_at_once(Stage.DIFFUSE)
            whole_s = self._times.seconds(work.model, Stage.DIFFUSE, work.shape, degree, outputs)
            self._steps_s[degree] = work.step_share * whole_s
        return self._steps_s[degree]

    def transfer_s(self, stage: Stage) -> TransferSeconds:
        """Seconds to move what a stage hands on, within a node and between nodes."""
        if stage not in self._transfers_s:
            model, shape, batch = self._work.model, self._work.shape, self._work.num_outputs * self._work.batch
            self._transfers_s[stage] = (
                self._times.transfer_seconds(model, stage, shape, batch, same_node=True),
                self._times.transfer_seconds(model, stage, shape, batch, same_node=False),
            )
        return self._transfers_s[stage]

    def is_efficient(self, degree: int, fitting: FittingDegrees, min_efficiency: float) -> bool:
        """The narrowest that fits always is: there is no cheaper way to run the request there. Efficiency is relative
        to the narrowest degree that covers this size: large sizes need not be profiled at degree 1."""
        if degree == fitting.degrees[0]:
            return True
        narrowest = fitting.narrowest_profiled
        return narrowest * self.step_s(narrowest) / (degree * self.step_s(degree)) >= min_efficiency
