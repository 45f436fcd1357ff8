"""Runs a log of a configuration again, with the scheduler that the service has, as it was or with something changed."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from deployments.assembly.options import make_service_options
from deployments.assembly.planning import assemble_service, make_placement
from deployments.assembly.replay import list_logged_workers, make_logged_times
from deployments.assembly.simulation import make_engine_options
from deployments.config.app import AppArgs
from deployments.explaining.pinned import PinnedDegree
from dispatch.policies import Policy
from profiler import CostModel
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated.options import SimulationOptions
from tridentserve.engine.simulated.resumed import ResumedEnd, ResumedSimulation
from tridentserve.engine.simulated.workers.actual_times import TimeFactors
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.scheduling.explanation.chronicle import Chronicle
from tridentserve.scheduling.explanation.durations import measure_durations, teach
from tridentserve.scheduling.explanation.recording import Recording
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class Change:
    """A difference from the log under which it is run again; without any, it is run as it was."""

    without: frozenset[str] = frozenset()
    """Requests that do not come."""
    joins_like: WorkerId | None = None
    """One more worker joins, which is like this one."""
    degree: int | None = None
    """The request in question runs at this degree, as soon as so many workers are free."""
    loads_take: float = 1.0
    """The time of loads is multiplied by this."""
    has_overheads: bool = True
    """False: plans start and are reported at once."""


class LogRerun:
    """One log of one service. Each run makes a scheduler of its own."""

    def __init__(self, args: AppArgs, recording: Recording) -> None:
        """Raises `ConfigError` when the log holds other workers than the configuration has, `ProfileError`."""
        self._args = args
        self._recording = recording
        self._specs = list_logged_workers(args, recording.entries)
        self._times = make_logged_times(args, recording.entries)
        self._placement = recording.placement or make_placement(args, deepcopy(self._times), self._specs)
        self.chronicle = Chronicle(recording.entries, self._placement)
        self._durations = measure_durations(self.chronicle, self._times)
        # The parts of a long log that are followed up to some time, and the times that the scheduler knew before.
        self._parts: dict[float, tuple[Recording, CostModel]] = {}

    def list_degrees(self, model: str) -> Sequence[int]:
        """The degrees at which a model was profiled, and that the workers of one node that hold its D can form."""
        wanted = Replica(model, Stage.DIFFUSE)
        nodes = [spec.node_id for spec in self._specs if wanted in self._placement.replicas.get(spec.worker_id, ())]
        most = max((nodes.count(node) for node in nodes), default=0)
        return [degree for degree in self._times.degrees(model, Stage.DIFFUSE) if degree <= most]

    def run(self, request_id: str, until_s: float, change: Change) -> ResumedEnd:
        """The end of a request where the log is followed up to `until_s` and changed from there."""
        part, learned = self._begin_before(until_s)
        specs, placement, joins = self._specs, part.placement or self._placement, None
        if change.joins_like is not None:
            joins = _copy_worker(specs, change.joins_like)
            specs = [*specs, joins]
            placement = _copy_place(placement, change.joins_like, joins.worker_id)
        planners = assemble_service(
            self._args,
            deepcopy(learned),
            specs,
            alter=lambda policy: _pin(policy, request_id, change.degree),
            placement=placement,
        )
        durations = self._durations
        options = make_engine_options(
            make_service_options(self._args),
            SimulationOptions(
                plan_overhead_s=durations.start_s if change.has_overheads else 0.0,
                report_overhead_s=durations.report_s if change.has_overheads else 0.0,
                image_s_per_pixel=durations.image_s_per_pixel if change.has_overheads else 0.0,
                decodes_in_tiles=planners.policy.decodes_in_tiles,
            ),
        )
        actual = TimeFactors(durations.get_factor, change.loads_take * durations.load_factor)
        simulation = ResumedSimulation(planners.scheduler, specs, placement, self._times, options, actual)
        return simulation.run(part.entries, request_id, until_s, without=change.without, joins=joins)

    def _begin_before(self, until_s: float) -> tuple[Recording, CostModel]:
        if until_s not in self._parts:
            part, before = self._recording.begin_before(until_s)
            learned = deepcopy(self._times)
            if before:
                teach(learned, self.chronicle, before[-1].now_s)
            self._parts[until_s] = part, learned
        return self._parts[until_s]


def _pin(policy: Policy, request_id: str, degree: int | None) -> Policy:
    if degree is None:
        return policy
    return replace(policy, dispatcher=PinnedDegree(policy.dispatcher, request_id, degree))


def _copy_worker(specs: Sequence[WorkerSpec], like: WorkerId) -> WorkerSpec:
    """One more worker of the same node."""
    found = next(spec for spec in specs if spec.worker_id == like)
    place = sum(spec.node_id == found.node_id for spec in specs)
    return replace(found, worker_id=f"{like.rpartition('w')[0]}w{place}", place=place)


def _copy_place(placement: PlacementPlan, like: WorkerId, worker_id: WorkerId) -> PlacementPlan:
    return replace(placement, replicas={**placement.replicas, worker_id: placement.replicas[like]})
