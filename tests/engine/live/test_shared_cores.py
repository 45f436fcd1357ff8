"""Live workers that share one core denoise one at a time, whichever of them are idle."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lib.bench.service import run_service

from tests.support.decision_log import read_log
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage

MODEL, SHAPE = "tiny-sd3", Shape(64, 64)


async def test_one_worker_denoises_at_a_time(ray_cluster: None, tiny_cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    args = {
        "models": [{"name": MODEL, "tiny": "sd3"}],
        "cluster": {"workers_per_node": 3, "memory_mb": 512, "cpus_per_worker": 0.1, "max_denoising": 1},
        "placement": ["EDC", "EDC", "EDC"],
        "cache_dir": str(tiny_cache),
        "decision_log": str(log),
    }
    folder = ensure_tiny("sd3", tiny_cache)
    async with run_service(args, folder, tiny_cache / "host", lambda dispatcher: dispatcher) as service:
        inputs = [GenerationInputs("in turns", SHAPE, 4, 5.0, seed=index) for index in range(6)]
        asked = [service.ask(f"r{index}", MODEL, each) for index, each in enumerate(inputs)]
        answers = await asyncio.gather(*asked)
    assert all(answer.retries == 0 for answer in answers)
    under_way: set[int] = set()
    for decision in read_log(log):
        match decision.event:
            case ev.WorkerJoined():
                assert decision.event.worker.max_denoising == 1
            case ev.StageFinished():
                under_way.discard(decision.event.plan_id)
        plans = [effect.plan for effect in decision.effects if isinstance(effect, ev.RunPlan)]
        under_way.update(plan.plan_id for plan in plans if Stage.DIFFUSE in plan.stages)
        assert len(under_way) <= 1
