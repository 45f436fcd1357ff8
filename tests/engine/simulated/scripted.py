"""A scheduler that does what the test says, in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions, SimulationResult
from tridentserve.plans import DispatchPlan, PlanMember, WorkerId
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage
from tridentserve.testing import MODEL, FixedTimes, make_cluster, make_request

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE


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


def simulate(
    script: Script,
    types: Mapping[WorkerId, str],
    arrivals: Mapping[str, float],
    *,
    memory_bytes: int = 100,
    **options: object,
) -> SimulationResult:
    """Requests of four steps come at these times. The handoff buffer takes 16 bytes of the memory."""
    settings = SimulationOptions(**{"handoff_capacity_bytes": 16, "group_bytes": 0, "keep_plans": True, **options})  # type: ignore[arg-type]
    specs, placement = make_cluster(types, memory_bytes)
    engine = SimulatedEngine(script, specs, placement, FixedTimes(), settings)
    return engine.run((at_s, make_request(name)) for name, at_s in arrivals.items())


def spans(result: SimulationResult) -> dict[int, list[tuple[str, float, float]]]:
    """Per plan its stages, from when to when."""
    return {
        plan.plan_id: [(span.stage.letter, span.start_s, span.end_s) for span in plan.spans] for plan in result.plans
    }
