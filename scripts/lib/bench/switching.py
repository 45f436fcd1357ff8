"""Another placement under load: Adjust-on-Dispatch against stopping the world.

Two models share three workers whose memory holds one of them. From the first half of the run to the second, one worker
changes sides. Adjust-on-Dispatch: the placement changes at once, weights move when a plan needs them. Stopping the
world: nothing is dispatched, running plans end, all workers load what they lack, then dispatch resumes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.bench.service import Service, run_service
from placement import build_fixed_placement
from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import ClusterView, Decisions, Dispatcher, StageReport, WorkerView
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling import events as ev

_MODELS = ("one", "other")
_BEFORE, _AFTER = (["one", "one", "other"], ["one", "other", "other"])
_WAYS = ("adjust_on_dispatch", "stop_the_world")
_HANDOFF_MIB = 32
_INPUTS = GenerationInputs("switch", Shape(64, 64), 2, 5.0, seed=1)
# A request is delayed when it takes this many times the median of those before the switch.
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
    """A replanner that proposes the plan in `due`."""

    due: PlacementPlan | None = None

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        """Ignored: this replanner does not observe the load."""

    def stage_finished(self, report: StageReport) -> None:
        """Ignored: this replanner does not observe the stages."""

    def expect(self, model: str, load: Sequence[LoadShare], window_s: float | None) -> None:
        pass

    def forget(self, model: str) -> None:
        pass

    def propose(self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        due, self.due = self.due, None
        return due


@dataclass(slots=True)
class _Switch:
    service: Service[_Gate]
    replanner: _OnDemand
    after: PlacementPlan
    # The model that most requests are for before the switch, and the one that most are for after it.
    models: Sequence[str]

    async def adjust(self) -> None:
        self.replanner.due = self.after
        self.service.engine._core.post(ev.Tick())

    async def stop_the_world(self) -> None:
        engine = self.service.engine
        self.service.dispatcher.closed = True
        await _wait_until(lambda: not engine._driver._plans)
        await self.adjust()
        wanted = {worker: self.after.describe(worker) for worker in self.after.replicas}
        await _wait_until(lambda: engine.placement == wanted)
        # As at their start, the workers make resident all that their placement says.
        fleet = engine._fleet
        await asyncio.gather(*(fleet.get_handle(worker).start() for worker in fleet.alive))
        self.service.dispatcher.closed = False
        engine._core.post(ev.Tick())


async def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # no event says so
        await asyncio.sleep(0.002)


async def measure_switch(
    folder: Path, weights_bytes: int, host_dir: Path, requests: int, gap_s: float, keep_workers: bool
) -> dict[str, Any]:
    """`longest_gap_ms` between two stages that finish, after the switch; `delayed`: requests that took more than twice
    the median of those before it. The ratios are Adjust-on-Dispatch over stopping the world. With `keep_workers` the
    second way leads back to the first placement, on workers that hold what the first way has made there."""
    result: dict[str, Any] = {"requests": requests, "gap_between_requests_s": gap_s}
    memory_mb = _HANDOFF_MIB + (weights_bytes * 3 // 2 >> 20)
    args: dict[str, Any] = {
        "models": [{"name": name, "path": str(folder), "profile_as": "tiny-sd3"} for name in _MODELS],
        "cluster": {"workers_per_node": 3, "memory_mb": memory_mb, "max_groups": 2},
        "placement": [{name: "EDC"} for name in _BEFORE],
        "handoff": {"capacity_mb": _HANDOFF_MIB},
        "dispatch": {"policy": "edf", "max_degree": 1},
    }
    for ways in (_WAYS,) if keep_workers else ((way,) for way in _WAYS):
        replanner = _OnDemand()
        async with run_service(args, folder, host_dir, _Gate, replanner, fetch="peer") as service:
            for epoch, way in enumerate(ways, start=1):
                result[way] = await _run(_make_switch(service, replanner, epoch), way, requests, gap_s)
    for figure in ("longest_gap", "longest_latency_after"):
        adjusted, stopped = (result[name][f"{figure}_ms"] for name in _WAYS)
        result[f"{figure}_ratio"] = round(adjusted / stopped, 4)
    return result


def _make_switch(service: Service[_Gate], replanner: _OnDemand, epoch: int) -> _Switch:
    """Make the first switch of a service, or the second one, which leads back."""
    held, models = (_AFTER, _MODELS) if epoch == 1 else (_BEFORE, _MODELS[::-1])
    after = build_fixed_placement([{model: "EDC"} for model in held], service.specs, _MODELS, epoch=epoch)
    return _Switch(service, replanner, after, models)


async def _run(switch: _Switch, how: str, requests: int, gap_s: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    tasks, switched_s, switching = [], 0.0, None
    for index in range(requests):
        await asyncio.sleep(max(0.0, begun_s + index * gap_s - loop.time()))
        if index == requests // 2:
            act = switch.adjust if how == "adjust_on_dispatch" else switch.stop_the_world
            switching, switched_s = loop.create_task(act()), _read_clock_s()
        # First two of three are for the one model, then two of three for the other.
        rare = index % 3 == 2
        model = switch.models[rare if index < requests // 2 else not rare]
        tasks.append(loop.create_task(switch.service.ask(f"{how}-{index}", model, _INPUTS)))
    answers = await asyncio.gather(*tasks)
    if switching is not None:
        await switching
    ends_s = sorted(run.end_s for answer in answers for run in answer.timeline)
    after = [end_s for end_s in ends_s if end_s >= switched_s]
    gaps = [later - earlier for earlier, later in zip([switched_s, *after], after, strict=False)]
    latencies_s = [answer.latency_s for answer in answers if answer.latency_s is not None]
    usual_s = statistics.median(latencies_s[: requests // 2])
    later_s = latencies_s[requests // 2 :]
    return {
        "longest_gap_ms": round(1000 * max(gaps), 1),
        "median_latency_before_ms": round(1000 * usual_s, 1),
        "longest_latency_after_ms": round(1000 * max(later_s), 1),
        "delayed": sum(latency_s > _DELAYED * usual_s for latency_s in later_s),
    }


def _read_clock_s() -> float:
    """Seconds of the Unix clock, as in timelines."""
    return time.time()
