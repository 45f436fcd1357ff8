"""Workers whose plans fail, in the live engine: one whose device breaks has a new process, and no request is lost."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.live.faults.equal_workers import run_engine
from tests.engine.simulated.greedy import Greedy
from tests.support.decision_log import read_log
from tests.support.waiting import until
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.updates import CompletedUpdate, Update
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.testing import MODEL

WORKERS = ("w0", "w1")
INPUTS = GenerationInputs("a lighthouse at dawn", Shape(64, 64), 2, 3.5, seed=3)


def break_worker(worker: Any, is_device: bool) -> int:
    """In the worker's process: each plan fails from now on, because of the device or of anything else. Returns the
    process's id."""
    import torch

    runner = worker._parts.plan_runner

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runner._executor.execute_plan = fail
    runner._device.is_broken_by = lambda error: is_device and isinstance(error, torch.AcceleratorError)
    return os.getpid()


@pytest.fixture
async def engine(ray_cluster: None, tiny_cache: Path, tmp_path: Path) -> AsyncIterator[LiveEngine]:
    async with run_engine(WORKERS, Greedy(degree=1), tiny_cache, tmp_path / "decisions.jsonl") as engine:
        yield engine


async def generate(engine: LiveEngine, name: str) -> Update:
    """The last update of a request."""
    spec = RequestSpec(name, MODEL, INPUTS.shape, INPUTS.num_inference_steps, slo_s=1000.0)
    return [update async for update in engine.generate(spec, INPUTS)][-1]


async def break_first(engine: LiveEngine, is_device: bool) -> int:
    """The worker that the policy prefers. Returns the id of its process."""
    process_id = await engine._fleet.get_handle("w0").actor.__ray_call__.remote(break_worker, is_device)
    assert isinstance(process_id, int)
    return process_id


async def test_a_broken_device_ends_the_process_and_another_one_takes_its_place(
    engine: LiveEngine, tmp_path: Path
) -> None:
    process_id = await break_first(engine, is_device=True)
    ended = await asyncio.gather(*(generate(engine, f"r{number}") for number in range(4)))
    assert [type(update) for update in ended] == [CompletedUpdate] * 4
    await until(lambda: not Path(f"/proc/{process_id}").exists())
    await until(lambda: len(engine.list_live_workers()) == len(WORKERS))
    assert isinstance(await generate(engine, "after"), CompletedUpdate)
    events = [entry.event for entry in read_log(tmp_path / "decisions.jsonl")]
    assert [event.worker_id for event in events if isinstance(event, ev.WorkerLost)] == ["w0"]
    joined = [(event.worker.worker_id, event.incarnation) for event in events if isinstance(event, ev.WorkerJoined)]
    assert sorted(joined) == [("w0", 0), ("w0", 1), ("w1", 0)]
    (first, *_) = [event for event in events if isinstance(event, ev.PlanFailed)]
    assert first.workers == ("w0",)
    assert "AcceleratorError" in first.error
    assert dict(engine.aside) == {}


async def test_a_worker_that_fails_and_lives_on_is_set_aside(
    engine: LiveEngine, caplog: pytest.LogCaptureFixture
) -> None:
    process_id = await break_first(engine, is_device=False)
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            assert isinstance(await generate(engine, f"r{number}"), CompletedUpdate)
    assert dict(engine.aside) == {"w0": "3 plans in a row failed there, and others ran elsewhere"}
    assert "worker w0 is set aside for 30 s: 3 plans in a row failed there" in caplog.text
    assert process_id == await engine._fleet.get_handle("w0").actor.__ray_call__.remote(lambda worker: os.getpid())
    state = await engine.describe_cluster()
    aside = {worker.worker_id: worker.aside_until_s for worker in state.workers}
    assert aside["w1"] is None
    assert aside["w0"] is not None, "which is the Unix time until which it is"
    assert state.notices[-1].kind == "worker_aside"
