"""The live engine changes its placement while requests run: none is lost, no bit changes, the log replays."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.live.configs import worker_configs
from tests.engine.simulated.greedy import Greedy
from tests.scheduling.fakes import FakeTimes
from tests.support.decision_log import read_log
from tests.support.waiting import until
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.handoff.remote_peer import RemotePeer
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.spawning.spawner import ActorSpawner
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, Update
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.options import EngineOptions
from tridentserve.errors import http_status_of
from tridentserve.parallel import connect_store
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import StageReport
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, replay
from tridentserve.scheduling.estimation.hot_groups import GROUP_BYTES
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import Stage
from tridentserve.testing import MODEL

E, D, C = (Replica(MODEL, stage) for stage in Stage)
# Each worker does something else after each switch.
PLACEMENTS = [
    PlacementPlan({"w0": frozenset({E}), "w1": frozenset({D}), "w2": frozenset({D, C})}, "first"),
    PlacementPlan({"w0": frozenset({D, C}), "w1": frozenset({E}), "w2": frozenset({D})}, "second", 1),
    PlacementPlan({"w0": frozenset({D}), "w1": frozenset({D, C}), "w2": frozenset({E})}, "third", 2),
]
HANDOFF_BYTES = 4 << 20
MAX_GROUPS = 2
SHAPE, TOO_LARGE = Shape(64, 96), Shape(128, 128)
STEPS = 3
EXPECTED_BYTES = 1 << 30


class Times(FakeTimes):
    """One size needs more memory than any worker has."""

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        return EXPECTED_BYTES if shape == TOO_LARGE else 1


class EveryFew:
    """The next placement after every few denoised requests; the last one stays."""

    def __init__(self, few: int) -> None:
        self._few = few
        self._denoised = 0

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        pass

    def stage_finished(self, report: StageReport) -> None:
        self._denoised += report.span.stage is Stage.DIFFUSE

    def expect(self, model: str, load: object, window_s: float | None) -> None:
        pass

    def forget(self, model: str) -> None:
        pass

    def propose(self, workers: object, placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        number = min(self._denoised // self._few, len(PLACEMENTS) - 1)
        return PLACEMENTS[number] if number > placement.epoch else None


def make_scheduler(specs: list[WorkerSpec]) -> Scheduler:
    return Scheduler(specs, PLACEMENTS[0], Times(), Greedy(degree=1), replanner=EveryFew(3))


def inputs_of(seed: int, shape: Shape = SHAPE) -> GenerationInputs:
    return GenerationInputs("a lighthouse at dawn", shape, STEPS, 3.5, seed=seed)


@dataclass
class Service:
    engine: LiveEngine
    specs: list[WorkerSpec]
    folder: Path
    log: Path

    async def generate(self, name: str, inputs: GenerationInputs) -> Update:
        spec = RequestSpec(name, MODEL, inputs.shape, inputs.num_inference_steps, slo_s=60.0)
        updates = [update async for update in self.engine.generate(spec, inputs)]
        return updates[-1]

    def decisions(self) -> list[LogEntry]:
        return read_log(self.log)


@pytest.fixture(scope="module")
async def service(
    ray_cluster: None, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    source = ModelSource(MODEL, ensure_tiny("flux", tiny_cache))
    copies = HostCopies(tiny_cache / "host", {MODEL: source}, torch.device("cpu"))
    sizes = {replica: copies.get(replica).layout.nbytes for replica in (E, D, C)}
    # D and C fit together, E and D do not: a worker that changes from one to the other evicts.
    memory_bytes = HANDOFF_BYTES + MAX_GROUPS * GROUP_BYTES["cpu"] + sizes[D] + sizes[C] + 1000
    assert sizes[E] > sizes[C] + 1000
    specs = [WorkerSpec(f"w{index}", "node", memory_bytes) for index in range(3)]
    store = connect_store(is_server=True)
    configs = worker_configs(
        specs,
        PLACEMENTS[0],
        {MODEL: source},
        store.port,
        tiny_cache,
        HANDOFF_BYTES,
        max_groups=MAX_GROUPS,
        fetch="peer",
        block_bytes=200_000,
    )
    log = tmp_path_factory.mktemp("switch") / "decisions.jsonl"
    engine = LiveEngine(
        make_scheduler(specs),
        configs,
        ActorSpawner(0.1),
        lambda group, rank, plan_id: None,
        EngineOptions(decision_log=log),
        Times(),
    )
    await engine.start()
    yield Service(engine, specs, source.folder, log)
    await engine.stop()
    del store


@pytest.fixture(scope="module")
def expected(service: Service) -> dict[int, np.ndarray[Any, Any]]:
    """The images of an undisturbed run in this process, by seed."""
    torch.set_num_threads(1)
    adapter = load_adapter(service.folder, frozenset(Stage))
    images = {}
    for seed in range(3):
        inputs = inputs_of(seed)
        state = adapter.step(adapter.prepare(adapter.encode(inputs), inputs), STEPS)
        images[seed] = adapter.decode(adapter.latents(state), inputs)[0]
    return images


@pytest.fixture(scope="module")
async def answers(service: Service) -> list[Update]:
    """The answers to the requests during which the placement changes twice."""
    return await asyncio.gather(*(service.generate(f"r{index}", inputs_of(index % 3)) for index in range(12)))


def check_log(service: Service, *kinds: str) -> None:
    """It holds such events, and replays to the same effects."""
    decisions = service.decisions()
    assert {decision.event.kind for decision in decisions} >= set(kinds)
    for logged, effects in replay(decisions, make_scheduler(service.specs)):
        assert effects == logged.effects


async def test_switches_under_load_lose_nothing_and_change_no_bit(
    service: Service, answers: list[Update], expected: dict[int, np.ndarray[Any, Any]]
) -> None:
    for index, answer in enumerate(answers):
        assert isinstance(answer, CompletedUpdate), answer
        assert answer.retries == 0
        (png,) = answer.outputs
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), expected[index % 3])
    decisions = service.decisions()
    placed = [effect.plan.epoch for one in decisions for effect in one.effects if isinstance(effect, ev.Place)]
    assert placed == [1, 2]
    assert service.engine.placement == {worker: PLACEMENTS[2].describe(worker) for worker in ("w0", "w1", "w2")}
    loads = [one.event for one in decisions if isinstance(one.event, ev.ReplicaLoaded)]
    assert {load.source for load in loads} >= {"peer"}
    assert all(load.num_bytes > 0 and load.seconds > 0 for load in loads)
    assert any(load.evicted for load in loads), "E and D do not fit together"
    check_log(service, "replica_loaded")


async def test_a_plan_that_cannot_fit_is_refused_with_the_numbers(service: Service, answers: list[Update]) -> None:
    before = len(service.decisions())
    answer = await service.generate("large", inputs_of(0, TOO_LARGE))
    assert isinstance(answer, FailedUpdate)
    assert (answer.code, http_status_of(answer.code)) == ("out_of_memory", 507)
    numbers = {int(number) for number in re.findall(r"\d{4,}", answer.message)}
    assert {EXPECTED_BYTES, HANDOFF_BYTES, MAX_GROUPS * GROUP_BYTES["cpu"], service.specs[0].memory_bytes} <= numbers
    assert not any(isinstance(effect, ev.Requeue) for one in service.decisions()[before:] for effect in one.effects)
    after = await service.generate("after", inputs_of(1))
    assert isinstance(after, CompletedUpdate), "the worker is as good as before"
    check_log(service, "plan_failed")


async def test_a_worker_that_comes_back_begins_with_the_placement_in_force(
    service: Service, answers: list[Update]
) -> None:
    assert service.engine.placement["w0"] == f"{MODEL}:D"
    service.engine._fleet.get_handle("w0").kill()
    await until(lambda: any(isinstance(one.event, ev.WorkerLost) for one in service.decisions()))
    answer = await service.generate("elsewhere", inputs_of(2))
    assert isinstance(answer, CompletedUpdate)
    await until(lambda: "w0" in service.engine.list_live_workers())
    ready = service.engine._fleet._workers["w0"].ready
    assert ready is not None
    peer = RemotePeer(service.engine._fleet.get_handle("w0").actor, ready.channel, None, "node")
    assert (await peer.count_readers(D, 0), await peer.count_readers(E, 0)) == (0, None)
    peer.close()
    check_log(service, "worker_lost")
