"""A scheduler that does what the test says, and stage times that can be counted in the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.scheduling.fakes import MODEL, FakeTimes, request
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions, SimulationResult
from tridentserve.errors import ProfileError
from tridentserve.plans import DispatchPlan, PlacementPlan, PlanMember, Replica, WorkerId
from tridentserve.protocols import LoadSource
from tridentserve.requests import Shape
from tridentserve.scheduling import events as ev
from tridentserve.stages import PlacementType, Stage

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE


class Times(FakeTimes):
    """E 0.5 s, D 1 s per step over the degree, C 2 s; D and C times the batch. Weights 10 bytes a stage, a peak of 5
    bytes per output, 8 bytes per output from stage to stage: 0.25 s in a node, 1 s across. Loads: 3 s, 1 s by a peer.
    """

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        if degree not in self.degrees(model, stage):
            raise ProfileError(f"{stage} was not profiled at degree {degree}")
        return super().seconds(model, stage, shape, degree) * (1 if stage is E else batch)

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        return 5 * batch

    def weights_bytes(self, model: str, stage: Stage) -> int:
        return 10

    def output_bytes(self, model: str, stage: Stage, shape: Shape, batch: int = 1) -> int:
        return 8 * batch

    def transfer_seconds(self, model: str, stage: Stage, shape: Shape, batch: int = 1, same_node: bool = True) -> float:
        return 0.25 if same_node else 1.0

    def load_seconds(self, model: str, stage: Stage, source: LoadSource = "host") -> float:
        return 1.0 if source == "peer" else 3.0

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        return (1, 2, 4) if stage is D else (1,)


class Script:
    """Has the effects of `arrivals` when that request comes, of `after` when that plan has finished; ends requests
    whose C has run, or whose plan failed for good. `now` requests never run: they only mark a time, and end at once."""

    def __init__(
        self, arrivals: Mapping[str, Sequence[ev.Effect]], after: Mapping[int, Sequence[ev.Effect]] | None = None
    ) -> None:
        self.arrivals = arrivals
        self.after = after or {}
        self.num_pending = 0
        self.events: list[tuple[float, ev.Event]] = []
        self.plans: dict[int, DispatchPlan] = {}

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        if not isinstance(event, ev.Tick):
            self.events.append((now_s, event))
        effects = list(self._effects(event))
        self.plans |= {effect.plan.plan_id: effect.plan for effect in effects if isinstance(effect, ev.RunPlan)}
        return effects

    def _effects(self, event: ev.Event) -> Sequence[ev.Effect]:
        match event:
            case ev.RequestArrived() if event.spec.request_id.startswith("now"):
                mark = ev.Reject(event.spec.request_id, "cancelled", "a mark in time")
                return [*self.arrivals.get(event.spec.request_id, ()), mark]
            case ev.RequestArrived():
                return self.arrivals.get(event.spec.request_id, ())
            case ev.StageFinished():
                plan = self.plans[event.plan_id]
                if event.spans and event.spans[-1].stage is C:
                    return [ev.Finish(name, 1.0, 2.0, "done") for name in plan.request_ids]
                return self.after.get(event.plan_id, ())
            case ev.PlanFailed() if not event.retry:
                return [ev.Reject(name, event.code, event.error) for name in self.plans[event.plan_id].request_ids]
            case _:
                return ()

    def of(self, kind: type[ev.Event]) -> list[tuple[float, ev.Event]]:
        """The events of one kind, with their times."""
        return [(now_s, event) for now_s, event in self.events if isinstance(event, kind)]


def run(
    plan_id: int,
    stages: str,
    workers: str,
    members: str = "r",
    *,
    steps: tuple[int, int] = (0, 4),
    after: int | None = None,
    source: WorkerId | None = None,
    push_to: WorkerId | None = None,
    group: str | None = None,
) -> ev.RunPlan:
    """A plan by letters: `run(1, "ED", "a b", "r s")`. `after`: the plan whose outputs it takes."""
    wanted = tuple(stage for stage in Stage if stage.letter in stages)
    part = PlanMember("", steps if D in wanted else None, after, source, push_to=push_to)
    parts = tuple(replace(part, request_id=name) for name in members.split())
    return ev.RunPlan(DispatchPlan(plan_id, MODEL, wanted, tuple(workers.split()), parts, group), "test, scripted")


def cluster(types: Mapping[WorkerId, str], memory_bytes: int = 100) -> tuple[list[WorkerSpec], PlacementPlan]:
    """Workers by id and placement type ("" for none); an id "n1/a" is on node n1."""
    specs = [WorkerSpec(name, name.rpartition("/")[0] or "n0", memory_bytes) for name in types]
    held = {
        name: frozenset(Replica(MODEL, stage) for stage in PlacementType(kind).stages) if kind else frozenset[Replica]()
        for name, kind in types.items()
    }
    return specs, PlacementPlan(held)


def simulate(
    script: Script,
    types: Mapping[WorkerId, str],
    arrivals: Mapping[str, float],
    *,
    memory_bytes: int = 100,
    **options: object,
) -> SimulationResult:
    """Requests of four steps come at these times. The handoff buffer takes 16 bytes of the memory."""
    settings = SimulationOptions(**{"handoff_capacity_bytes": 16, "keep_plans": True, **options})  # type: ignore[arg-type]
    specs, placement = cluster(types, memory_bytes)
    engine = SimulatedEngine(script, specs, placement, Times(), settings)
    return engine.run((at_s, request(name)) for name, at_s in arrivals.items())


def spans(result: SimulationResult) -> dict[int, list[tuple[str, float, float]]]:
    """Per plan its stages, from when to when."""
    return {
        plan.plan_id: [(span.stage.letter, span.start_s, span.end_s) for span in plan.spans] for plan in result.plans
    }
