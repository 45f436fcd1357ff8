"""Another placement under load: Adjust-on-Dispatch against stopping the world.

Two models share three workers whose memory holds one of them. From the first half of the run to the second, one worker
changes sides. Adjust-on-Dispatch: the placement changes at once, weights move when a plan needs them. Stopping the
world: nothing is dispatched, running plans end, all workers load what they lack, then dispatch goes on.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.config import AppArgs
from deployments.planning import plan_placement, policy_of, worker_specs
from deployments.profiles import cost_model
from placement import fixed_placement
from tridentserve import events as ev
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.engine import EngineOptions, LiveEngine
from tridentserve.engine.live.fleet import WorkerResources
from tridentserve.engine.live.messages import ModelSource, WorkerConfig
from tridentserve.load import LoadShare
from tridentserve.parallel import connect_store
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import ClusterView, Decisions, Dispatcher, StageReport, WorkerView
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduler import Scheduler

_MODELS = ("one", "other")
_BEFORE, _AFTER = (["one", "one", "other"], ["one", "other", "other"])
_HANDOFF_MIB, _SIDE, _STEPS = 32, 64, 2
# A request is delayed when it takes so many times the median of those before the switch.
_DELAYED = 2.0


@dataclass(slots=True)
class _Gate:
    """A dispatcher that can be held."""

    inner: Dispatcher
    closed: bool = False

    def decide(self, view: ClusterView) -> Decisions:
        return Decisions() if self.closed else self.inner.decide(view)

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return self.inner.can_ever_run(spec, workers)


@dataclass(slots=True)
class _OnDemand:
    """A replanner that proposes what it is told to."""

    due: PlacementPlan | None = None

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        """Of no interest."""

    def stage_finished(self, report: StageReport) -> None:
        """Of no interest."""

    def expect(self, model: str, load: Sequence[LoadShare], window_s: float | None) -> None:
        pass

    def forget(self, model: str) -> None:
        pass

    def propose(self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        due, self.due = self.due, None
        return due


@dataclass(slots=True)
class _Service:
    engine: LiveEngine
    gate: _Gate
    replanner: _OnDemand
    after: PlacementPlan

    async def adjust(self) -> None:
        self.replanner.due = self.after
        self.engine._core.post(ev.Tick())

    async def stop_the_world(self) -> None:
        self.gate.closed = True
        await _until(lambda: not self.engine._plans)
        await self.adjust()
        wanted = {worker: self.after.describe(worker) for worker in self.after.replicas}
        await _until(lambda: self.engine.placement == wanted)
        # What workers do when they start: make resident all that their placement says.
        fleet = self.engine._fleet
        await asyncio.gather(*(fleet.handle(worker).start.remote() for worker in fleet.alive))
        self.gate.closed = False
        self.engine._core.post(ev.Tick())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.002)


async def measure_switch(folder: Path, weights_bytes: int, host_dir: Path, requests: int, gap_s: float) -> Any:
    """`longest_gap_ms` between two stages that finish, after the switch; `delayed`: requests that took more than twice
    the median of those before it."""
    result: dict[str, Any] = {"requests": requests, "gap_between_requests_s": gap_s}
    for name in ("adjust_on_dispatch", "stop_the_world"):
        service = await _started(folder, weights_bytes, host_dir)
        try:
            result[name] = await _run(service, name, requests, gap_s)
        finally:
            await service.engine.stop()
    return result


async def _started(folder: Path, weights_bytes: int, host_dir: Path) -> _Service:
    memory_mb = _HANDOFF_MIB + (weights_bytes * 3 // 2 >> 20)
    args = AppArgs.model_validate(
        {
            "models": [{"name": name, "path": str(folder), "profile_as": "tiny-sd3"} for name in _MODELS],
            "cluster": {"workers_per_node": 3, "memory_mb": memory_mb, "max_groups": 1},
            "placement": [{name: "EDC"} for name in _BEFORE],
            "handoff": {"capacity_mb": _HANDOFF_MIB},
            "dispatch": {"policy": "edf", "max_degree": 1},
        }
    )
    specs, times = worker_specs(args, ["node"] * 3), cost_model(args)
    policy = policy_of(args, times, specs)
    placement = plan_placement(args, times, specs, policy)
    gate, replanner = _Gate(policy.dispatcher), _OnDemand()
    scheduler = Scheduler(specs, placement, times, gate, replanner=replanner)
    store = connect_store(is_server=True)
    configs = [
        WorkerConfig(
            spec=spec,
            incarnation=0,
            label=placement.describe(spec.worker_id),
            replicas=placement.replicas[spec.worker_id],
            sources={name: ModelSource(name, folder) for name in _MODELS},
            store_host="127.0.0.1",
            store_port=store.port,
            handoff_bytes=_HANDOFF_MIB << 20,
            max_groups=1,
            host_dir=host_dir,
            fetch="peer",
        )
        for spec in specs
    ]

    def abandon(group: str, rank: int, plan_id: int, store: Any = store) -> None:
        """No groups here; the store lives as long as this."""

    engine = LiveEngine(scheduler, configs, WorkerResources(0.1), abandon, EngineOptions(), times)
    await engine.start()
    after = fixed_placement([{name: "EDC"} for name in _AFTER], specs, _MODELS, epoch=1)
    return _Service(engine, gate, replanner, after)


async def _run(service: _Service, how: str, requests: int, gap_s: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    tasks, switched_s, switching = [], 0.0, None
    for index in range(requests):
        await asyncio.sleep(max(0.0, begun_s + index * gap_s - loop.time()))
        if index == requests // 2:
            act = service.adjust if how == "adjust_on_dispatch" else service.stop_the_world
            switching, switched_s = loop.create_task(act()), _now_s()
        # First two of three are for the one model, then two of three for the other.
        rare = index % 3 == 2
        model = _MODELS[rare if index < requests // 2 else not rare]
        tasks.append(loop.create_task(_ask(service.engine, f"r{index}", model)))
    answers = await asyncio.gather(*tasks)
    if switching is not None:
        await switching
    ends_s = sorted(run["end_s"] for answer in answers for run in answer["timeline"])
    after = [end_s for end_s in ends_s if end_s >= switched_s]
    gaps = [later - earlier for earlier, later in zip([switched_s, *after], after, strict=False)]
    usual_s = statistics.median(answer["latency_s"] for answer in answers[: requests // 2])
    later_s = [answer["latency_s"] for answer in answers[requests // 2 :]]
    return {
        "longest_gap_ms": round(1000 * max(gaps), 1),
        "median_latency_before_ms": round(1000 * usual_s, 1),
        "longest_latency_after_ms": round(1000 * max(later_s), 1),
        "delayed": sum(latency_s > _DELAYED * usual_s for latency_s in later_s),
    }


async def _ask(engine: LiveEngine, name: str, model: str) -> dict[str, Any]:
    shape = Shape(_SIDE, _SIDE)
    inputs = GenerationInputs("switch", shape, _STEPS, 5.0, seed=1)
    spec = RequestSpec(name, model, shape, _STEPS, slo_s=60.0)
    updates = [update async for update in engine.generate(spec, inputs)]
    if updates[-1]["type"] != "completed":
        raise RuntimeError(f"{name} failed: {updates[-1]['error']['message']}")
    return updates[-1]


def _now_s() -> float:
    """Seconds of the Unix clock, as in timelines."""
    return time.time()
