"""Re-placement in a live service: the load shifts, the Monitor sees it, the placement follows while requests run."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lib.bench.service import Service, run_service

from tests.support.decision_log import read_log
from tests.support.waiting import until
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.pipelines import ensure_tiny
from tridentserve.protocols import Dispatcher
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.scheduling import events as ev

MODEL = "tiny-sd3"
SHAPE = Shape(256, 256)
# By the profile C takes longer than D with one step, and a twentieth of D with thirty.
DECODE_HEAVY, DIFFUSE_HEAVY = 1, 30
GAP_S = 0.1
# More requests in the window than the Monitor needs to see the shift. They come whether or not others have ended: where
# each waited for another one to end, no more would ever come than the workers can serve.
MOST_SENT = 200
# All three stages and the activations do not fit these workers at once.
ARGS: dict[str, Any] = {
    "models": [{"name": MODEL, "tiny": "sd3"}],
    "cluster": {"workers_per_node": 4, "memory_mb": 18, "max_groups": 2, "cpus_per_worker": 0.1},
    "handoff": {"capacity_mb": 4},
    "placement": "auto",
    "expected_load": [{"model": MODEL, "width": 256, "height": 256, "num_inference_steps": DECODE_HEAVY}],
    "replan": {"window_s": 12, "shortest_window_s": 3, "check_interval_s": 0.2},
}


class Load:
    """Requests that are sent one after another, and their answers."""

    def __init__(self, service: Service[Dispatcher]) -> None:
        self._service = service
        self.tasks: list[asyncio.Task[CompletedUpdate]] = []

    async def send(self, num_inference_steps: int) -> None:
        inputs = GenerationInputs("a shift", SHAPE, num_inference_steps, 5.0, seed=len(self.tasks))
        asked = self._service.ask(f"r{len(self.tasks)}", MODEL, inputs)
        self.tasks.append(asyncio.get_running_loop().create_task(asked))
        await asyncio.sleep(GAP_S)

    @property
    def num_completed(self) -> int:
        return sum(task.done() for task in self.tasks)


@pytest.mark.parametrize(
    ("policy", "after"),
    [
        # Weights come and go, or auxiliaries stay auxiliaries. Of the first two, which one depends on what the Monitor
        # has seen of the load when the trigger comes.
        ("default", [{"ED": 3, "C": 1}, {"EDC": 4}]),
        pytest.param("wo-pooling", [{"ED": 3, "C": 1}], marks=pytest.mark.slow),
    ],
)
async def test_a_shift_to_denoising_moves_workers_from_decoding(
    ray_cluster: None, tiny_cache: Path, tmp_path: Path, policy: str, after: list[dict[str, int]]
) -> None:
    before = {"ED": 2, "C": 2}
    log = tmp_path / "decisions.jsonl"
    args = {**ARGS, "dispatch": {"policy": policy}, "cache_dir": str(tiny_cache), "decision_log": str(log)}
    folder = ensure_tiny("sd3", tiny_cache)
    async with run_service(args, folder, tiny_cache / "host", lambda dispatcher: dispatcher) as service:
        assert count_kinds(service) == before
        load = Load(service)
        for _ in range(10):
            await load.send(DECODE_HEAVY)
        await until(lambda: load.num_completed >= 5)
        assert count_kinds(service) == before
        while count_kinds(service) == before:
            assert len(load.tasks) < MOST_SENT, "the placement does not follow"
            await load.send(DIFFUSE_HEAVY)
        during = load.num_completed
        assert during < len(load.tasks), "none was under way at the switch"
        for _ in range(5):
            await load.send(DIFFUSE_HEAVY)
        answers = await asyncio.gather(*load.tasks)
        assert count_kinds(service) in after
    assert all(isinstance(answer, CompletedUpdate) and answer.retries == 0 for answer in answers)
    check_log(log, most_switches=len(after))


def count_kinds(service: Service[Dispatcher]) -> dict[str, int]:
    """The number of workers by the stages that they are to hold."""
    return Counter(label.removeprefix(f"{MODEL}:") for label in service.engine.placement.values())


def check_log(log: Path, most_switches: int) -> None:
    """The placement changed, by the trigger each time and never back; weights were loaded for it; requests ended before
    and after."""
    decisions = read_log(log)
    places = [
        (index, effect)
        for index, decision in enumerate(decisions)
        for effect in decision.effects
        if isinstance(effect, ev.Place)
    ]
    assert all("fastest over slowest stage" in place.plan.reason for _, place in places)
    assert 1 <= len(places) <= most_switches
    switched = places[0][0]
    ended = [index for index, one in enumerate(decisions) for effect in one.effects if isinstance(effect, ev.Finish)]
    assert min(ended) < switched < max(ended)
    assert any(isinstance(one.event, ev.ReplicaLoaded) for one in decisions[switched:])
