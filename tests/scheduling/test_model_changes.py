"""Models that come and go while requests run: whatever the order, every request ends once and nothing is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling.fakes import FakeTimes
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions
from tridentserve.engine.simulated.options import WorkerFailure
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, StageSpan
from tridentserve.protocols import Assignment, ClusterView, Decisions, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, decode_entry, encode_entry, replay
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import FixedTimes, find_violations, make_request

MODELS = ("a", "b", "c")
WORKERS = [WorkerSpec(f"w{i}", "node", 100) for i in range(3)]


class WholePipelines:
    """Each request alone on the first idle worker that holds all of its model."""

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return None if any(_holds(worker, spec.model) for worker in workers) else f"nobody holds {spec.model}"

    def decide(self, view: ClusterView) -> Decisions:
        idle = {worker.worker_id: worker for worker in view.workers if worker.idle}
        assignments = []
        for pending in view.pending:
            found = [worker_id for worker_id, worker in idle.items() if _holds(worker, pending.spec.model)]
            if found:
                del idle[found[0]]
                where = (found[0],)
                ids = (pending.spec.request_id,)
                assignments.append(Assignment(ids, PlacementType.EDC, where, where, where, view.now_s, "first idle"))
        return Decisions(assignments)


def _holds(worker: WorkerView, model: str) -> bool:
    return Replica(model, Stage.DIFFUSE) in worker.replicas


def placement_of(models: Sequence[str]) -> PlacementPlan:
    """All of these models on every worker."""
    held = frozenset(Replica(model, stage) for model in models for stage in Stage)
    return PlacementPlan({spec.worker_id: held for spec in WORKERS})


def added(model: str, models: Sequence[str]) -> ev.ModelAdded:
    return ev.ModelAdded(model, profile=model, slo_scale=3.0, placement=placement_of(models))


class Bench:
    """A scheduler that begins with model `a`, and all its events and effects."""

    def __init__(self) -> None:
        self.scheduler = self.fresh()
        self.log: list[LogEntry] = []
        self.plans: dict[int, DispatchPlan] = {}
        self.ends: Counter[str] = Counter()
        self.codes: dict[str, str] = {}
        self.served = ["a"]
        self.arrived: list[str] = []
        for spec in WORKERS:
            self.on(ev.WorkerJoined(spec))

    @staticmethod
    def fresh() -> Scheduler:
        return Scheduler(WORKERS, placement_of(["a"]), FakeTimes(), WholePipelines())

    def on(self, event: ev.Event) -> list[ev.Effect]:
        effects = self.scheduler.on(event, float(len(self.log)))
        self.log.append(LogEntry(float(len(self.log)), event, effects))
        for effect in effects:
            match effect:
                case ev.RunPlan():
                    self.plans[effect.plan.plan_id] = effect.plan
                case ev.Finish() | ev.Reject():
                    self.ends[effect.request_id] += 1
                    self.codes[effect.request_id] = effect.code if isinstance(effect, ev.Reject) else "finished"
                case ev.Unload():
                    assert all(plan.model != effect.model for plan in self.plans.values())
                case _:
                    pass
        return effects

    def arrive(self, model: str) -> str:
        name = f"{model}{len(self.arrived)}"
        self.arrived.append(name)
        self.on(ev.RequestArrived(replace(make_request(name), model=model)))
        return name

    def end(self, number: int, failed: bool = False) -> None:
        """One of the plans under way ends."""
        if not self.plans:
            return
        plan = self.plans.pop(sorted(self.plans)[number % len(self.plans)])
        spans = tuple(StageSpan(stage, 0.0, 1.0) for stage in plan.stages)
        failure = ev.PlanFailed(plan.plan_id, "it broke")
        self.on(failure if failed else ev.StageFinished(plan.plan_id, spans))

    def add(self, model: str) -> list[ev.Effect]:
        self.served = sorted({*self.served, model})
        return self.on(added(model, self.served))

    def remove(self, model: str) -> list[ev.Effect]:
        self.served = [name for name in self.served if name != model]
        return self.on(ev.ModelRemoved(model, placement_of(self.served)))


def test_a_draining_model_ends_what_it_has_and_takes_nothing_new() -> None:
    bench = Bench()
    bench.add("b")
    running, other = bench.arrive("a"), bench.arrive("b")
    bench.on(ev.Tick())
    assert bench.on(ev.ModelDraining("a")) == []
    refused = bench.arrive("a")
    assert bench.codes == {refused: "model_unavailable"}
    bench.end(0)
    assert bench.log[-1].effects[-1] == ev.Drained("a", "its last request has ended")
    assert bench.codes[running] == "finished"
    bench.end(0)
    assert (bench.codes[other], bench.ends[other]) == ("finished", 1)
    place, unload = bench.remove("a")
    assert isinstance(place, ev.Place)
    assert isinstance(unload, ev.Unload)
    assert bench.codes[bench.arrive("a")] == "model_not_found"
    bench.add("a")
    back = bench.arrive("a")
    bench.on(ev.Tick())
    bench.end(0)
    assert bench.codes[back] == "finished"


def test_an_idle_model_is_drained_at_once() -> None:
    assert Bench().on(ev.ModelDraining("a")) == [ev.Drained("a", "its last request has ended")]


def test_a_removed_model_is_unloaded_when_its_last_plan_has_stopped() -> None:
    bench = Bench()
    bench.add("b")
    running, waiting = bench.arrive("a"), bench.arrive("b")
    bench.on(ev.Tick())
    queued = [bench.arrive("a") for _ in range(2)]
    effects = bench.remove("a")
    assert [type(effect) for effect in effects] == [ev.Abort, ev.Reject, ev.Reject, ev.Reject, ev.Place]
    assert {bench.codes[name] for name in (running, *queued)} == {"model_unavailable"}
    number = next(plan_id for plan_id, plan in bench.plans.items() if plan.model == "a")
    del bench.plans[number]
    assert bench.on(ev.PlanStopped(number)) == [ev.Unload("a", "no worker runs anything of it any more")]
    assert not any(
        replica.model == "a" for view in bench.scheduler._pool.list_views() for replica in view.resident or frozenset()
    )
    bench.end(0)
    assert bench.codes[waiting] == "finished"


def test_the_slo_is_that_of_the_change() -> None:
    bench = Bench()
    bench.add("b")
    bench.arrive("b")
    bench.on(ev.Tick())
    bench.end(0)
    (done,) = [effect for decision in bench.log for effect in decision.effects if isinstance(effect, ev.Finish)]
    assert done.slo_s == 3.0 * (0.5 + 4 * 0.5 + 2.0)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "tick", "end", "fail", "lose", "join", "add", "drain", "remove"]),
        st.integers(0, 8),
    ),
    max_size=60,
)


@given(ACTIONS)
@settings(max_examples=200)
def test_whatever_comes_and_goes_every_request_ends_once(actions: list[tuple[str, int]]) -> None:
    bench = Bench()
    incarnation = 0
    for action, number in actions:
        model, worker = MODELS[number % 3], WORKERS[number % 3]
        match action:
            case "arrive":
                bench.arrive(model)
            case "tick":
                bench.on(ev.Tick())
            case "end" | "fail":
                bench.end(number, failed=action == "fail")
            case "lose":
                bench.on(ev.WorkerLost(worker.worker_id, "killed"))
                for plan_id in [i for i, plan in bench.plans.items() if worker.worker_id in plan.workers]:
                    del bench.plans[plan_id]
                    bench.on(ev.PlanFailed(plan_id, "killed"))
            case "join":
                incarnation += 1
                bench.on(ev.WorkerJoined(worker, incarnation))
            case "add":
                bench.add(model)
            case "drain":
                bench.on(ev.ModelDraining(model))
            case "remove":
                bench.remove(model)
    for worker in WORKERS:
        bench.on(ev.WorkerJoined(worker, incarnation + 1))
    for _ in range(4 * len(bench.arrived) + len(bench.plans) + 1):
        bench.on(ev.Tick())
        bench.end(0)
    assert not bench.plans
    assert bench.ends == Counter(bench.arrived)
    assert bench.scheduler.num_pending == 0
    assert all(view.idle for view in bench.scheduler._pool.list_views())
    check_reports_of_models(bench)
    check_that_it_replays(bench)


def check_reports_of_models(bench: Bench) -> None:
    """Drained once per draining, Unload once per removal, unless the model came back before."""
    owed: dict[str, str | None] = {}
    for decision in bench.log:
        match decision.event:
            case ev.ModelAdded():
                owed[decision.event.model] = None
            case ev.ModelDraining():
                owed.setdefault(decision.event.model, None)
                if owed[decision.event.model] is None:
                    owed[decision.event.model] = "drained"
            case ev.ModelRemoved():
                if owed.get(decision.event.model) != "gone":
                    owed[decision.event.model] = "unload"
            case _:
                pass
        for effect in decision.effects:
            if isinstance(effect, ev.Drained):
                assert owed[effect.model] == "drained"
                owed[effect.model] = "told"
            elif isinstance(effect, ev.Unload):
                assert owed[effect.model] == "unload"
                owed[effect.model] = "gone"
    assert not {"drained", "unload"} & set(owed.values())


def check_that_it_replays(bench: Bench) -> None:
    written = [decode_entry(encode_entry(decision)) for decision in bench.log]
    for decision, effects in replay(written, Bench.fresh()):
        assert decision.effects == effects


# None is the time of an arrival.
TIMES_S = st.integers(0, 25).map(lambda number: number + 0.05)


@given(
    seed=st.integers(0, 50),
    added_s=TIMES_S,
    drained_s=TIMES_S,
    grace_s=TIMES_S,
    lost_s=st.none() | TIMES_S,
)
@settings(max_examples=40)
def test_the_same_on_simulated_workers(
    seed: int, added_s: float, drained_s: float, grace_s: float, lost_s: float | None
) -> None:
    """Model b comes while a is served, then a goes; a worker may be lost on the way."""
    arrivals = [(i * 1.7, replace(make_request(f"{m}{i}"), model=m)) for i in range(12) for m in ("a", "b")]
    failures = () if lost_s is None else (WorkerFailure(lost_s, f"w{seed % 3}", 2.0),)
    options = SimulationOptions(
        jitter=0.2,
        seed=seed,
        handoff_capacity_bytes=16,
        group_bytes=0,
        failures=failures,
        keep_plans=True,
        group_setup_s=0.1,
    )
    engine = SimulatedEngine(Bench.fresh(), WORKERS, placement_of(["a"]), FixedTimes(), options)
    removed_s = max(added_s, drained_s + grace_s)
    result = engine.run(
        arrivals,
        [
            (added_s, added("b", ["a", "b"])),
            (drained_s, ev.ModelDraining("a")),
            (removed_s, ev.ModelRemoved("a", placement_of(["b"]))),
        ],
    )
    assert find_violations(result, WORKERS) == []
    for one in result.requests:
        if one.spec.model == "b":
            # Before it was added nobody held it.
            assert one.outcome == ("finished" if one.arrival_s >= added_s else "invalid_request"), one
        elif one.arrival_s > drained_s:
            assert one.outcome in ("model_unavailable", "model_not_found")
        else:
            assert one.outcome in ("finished", "model_unavailable")
            assert one.outcome == "finished" or (one.end_s or 0.0) >= removed_s
    for device in engine._cell._devices:
        assert all(replica.model == "b" for replica in device.resident)
