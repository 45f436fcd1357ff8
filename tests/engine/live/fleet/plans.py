"""A hand that makes plans and gives them to the workers of a fleet."""

from __future__ import annotations

import asyncio
import io
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from PIL import Image

from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.handoff.remote_peer import RemotePeer
from tridentserve.engine.live.messages import PlanReport, PreviewNote, ProgressNote
from tridentserve.engine.live.plan_calls import list_last_steps
from tridentserve.engine.live.worker_handle import PlanItem
from tridentserve.errors import WorkerError
from tridentserve.plans import DispatchPlan, PlanMember, WorkerId
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

INPUTS = GenerationInputs(
    prompt="a lighthouse at dawn, ünïcode 灯台",
    negative_prompt="blurry",
    shape=Shape(96, 160),
    num_inference_steps=4,
    guidance_scale=5.0,
    seed=7,
)
D = Stage.DIFFUSE
# Steps enough that a plan is still running when it is told to pause after the first.
LONG = 100
WORKERS = ("w0", "w1", "w2", "w3")
HANDOFF_BYTES = 4 << 20


class Plans:
    """Makes plans with numbers that nobody has used, runs them, keeps the reports."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self.fleet = fleet
        self.steps_told: Counter[int] = Counter()  # By plan, while it runs.
        self.previews: defaultdict[int, list[PreviewNote]] = defaultdict(list)  # By plan.
        self.latest_id = -1
        self._peers: list[RemotePeer] = []

    def plan(self, stages: tuple[Stage, ...], workers: str, model: str = "sd3", **more: Any) -> DispatchPlan:
        """`more`: what else is to be said of the plan's only member, and of the plan."""
        ranks = tuple(workers.split())
        member = PlanMember(
            request_id=more.pop("request_id", "r"),
            steps=more.pop("steps", (0, INPUTS.num_inference_steps)) if D in stages else None,
            input_id=more.pop("input_id", None),
            source=more.pop("source", None),
            push_to=more.pop("push_to", None),
        )
        self.latest_id += 1
        return DispatchPlan(
            plan_id=self.latest_id,
            model=model,
            stages=stages,
            workers=ranks,
            members=(member,),
            group="-".join(ranks) if len(ranks) > 1 else None,
            **more,
        )

    async def run(
        self,
        plan: DispatchPlan,
        inputs: GenerationInputs | dict[str, GenerationInputs] = INPUTS,
        is_watched: bool = True,
    ) -> tuple[PlanReport, list[bytes], int]:
        """The leader's report, the images, the number of steps told. Any member's failure raises."""
        content = inputs if isinstance(inputs, dict) else dict.fromkeys(plan.request_ids, inputs)
        queues: list[asyncio.Queue[PlanItem]] = [asyncio.Queue() for _ in plan.workers]
        for worker_id, items in zip(plan.workers, queues, strict=True):
            assert self.fleet.run_plan(worker_id, plan, content, items.put_nowait, is_watched=is_watched)
        results = await asyncio.gather(*(self._listen(plan, items) for items in queues))
        for report, _, _ in results:
            assert report.outcome != "failed", report.error
        return results[0]

    async def _listen(self, plan: DispatchPlan, items: asyncio.Queue[PlanItem]) -> tuple[PlanReport, list[bytes], int]:
        notes = 0
        while not isinstance(report := await items.get(), PlanReport):
            assert not isinstance(report, WorkerError), report
            if isinstance(report, ProgressNote):
                notes += len(report.steps)
                self.steps_told[plan.plan_id] += len(report.steps)
            if isinstance(report, PreviewNote):
                self.previews[plan.plan_id].append(report)
        notes += len(list_last_steps(plan, report))
        outputs = report.outputs or {}
        assert {name: len(files) for name, files in outputs.items()} == report.num_outputs
        return report, [image for files in outputs.values() for image in files], notes

    def find_peer(self, worker_id: WorkerId) -> RemotePeer:
        """A worker as another worker sees it."""
        handle = self.fleet.get_handle(worker_id)
        ready = self.fleet._workers[worker_id].ready
        assert ready is not None
        self._peers.append(RemotePeer(handle.actor, ready.channel, None, "node"))
        return self._peers[-1]

    def close(self) -> None:
        """Close the connections of all peers."""
        for peer in self._peers:
            peer.close()


def pixels(image: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(image)))


async def forget(plans: Plans, request_id: str = "r") -> None:
    """A request has ended with the latest plan."""
    for worker_id in WORKERS:
        plans.fleet.get_handle(worker_id).forget_request(request_id, plans.latest_id, with_checkpoints=True)
