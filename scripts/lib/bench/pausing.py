"""The cost of a pause: D in one plan against D in two, whose second resumes where the first one stopped."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.bench.figures import compute_median_ms
from lib.bench.service import run_service
from lib.bench.workers import Workers
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.protocols import Assignment, ClusterView, Decisions, Dispatcher, WorkerView
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.stages import Stage

_MODEL = "tiny"


async def measure_pause(workers: Workers, side: int, steps: int, runs: int) -> dict[str, Any]:
    """`here_ms`: resumed on the same worker, `elsewhere_ms`: on another one, with the state moved. What is left when
    the seconds inside the denoising steps are taken off, so that their noise does not count; in units of a step too."""
    inputs = {"r": GenerationInputs("pause", Shape(side, side), steps, 5.0, seed=1)}
    costs: dict[str, list[float]] = {"whole": [], "here": [], "elsewhere": []}
    step_s: list[float] = []
    for run in range(1 + runs):
        for name, parts in (
            ("whole", [("w0", 0, steps)]),
            ("here", [("w0", 0, steps // 2), ("w0", steps // 2, steps)]),
            ("elsewhere", [("w0", 0, steps // 2), ("w1", steps // 2, steps)]),
        ):
            cost_s, denoising_s = await _denoise(workers, inputs, parts)
            if run > 0:
                costs[name].append(cost_s)
                step_s.append(denoising_s / steps)
    one_step_s = statistics.median(step_s)
    result: dict[str, Any] = {"side": side, "step_ms": compute_median_ms(step_s)}
    for name in ("here", "elsewhere"):
        cost_s = statistics.median(costs[name]) - statistics.median(costs["whole"])
        result[f"{name}_ms"] = round(1000 * cost_s, 3)
        result[f"{name}_steps"] = round(cost_s / one_step_s, 4)
    return result


async def _denoise(
    workers: Workers, inputs: dict[str, GenerationInputs], parts: Sequence[tuple[str, int, int]]
) -> tuple[float, float]:
    """E, then D in parts: the seconds of the parts without their steps, and those of the steps."""
    first_member = PlanMember("r", push_to=parts[0][0])
    previous: DispatchPlan = workers.make_plan(_MODEL, (Stage.ENCODE,), ["w0"], [first_member])
    await workers.run(previous, inputs)
    beside_s = steps_s = 0.0
    for index, (worker, first, end) in enumerate(parts):
        push_to = parts[index + 1][0] if index + 1 < len(parts) else None
        member = PlanMember("r", (first, end), previous.plan_id, previous.leader, push_to=push_to)
        plan = workers.make_plan(_MODEL, (Stage.DIFFUSE,), [worker], [member])
        done = await workers.run(plan, inputs)
        inside_s = sum(span.end_s - span.start_s for span in done.report.spans)
        beside_s += done.seconds - inside_s
        steps_s += inside_s
        previous = plan
    await workers.forget(["r"])
    return beside_s, steps_s


@dataclass(frozen=True, slots=True)
class _Halves:
    """A dispatcher whose requests do half of their steps, and wait to be dispatched again."""

    inner: Dispatcher

    def decide(self, view: ClusterView) -> Decisions:
        waiting = {request.spec.request_id: request for request in view.pending}

        def cut(one: Assignment) -> Assignment:
            request = waiting[one.request_ids[0]]
            if request.steps_done:
                return one
            return dataclasses.replace(one, decode=(), num_steps=request.spec.num_inference_steps // 2)

        decisions = self.inner.decide(view)
        return dataclasses.replace(decisions, assignments=[cut(one) for one in decisions.assignments])

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return self.inner.can_ever_run(spec, workers)


async def measure_service_pause(folder: Path, host_dir: Path, side: int, steps: int, runs: int) -> dict[str, Any]:
    """The same through the whole engine, scheduler included: between the last step of the one half of D and the first
    one of the other, on the same worker."""
    args: dict[str, Any] = {
        "models": [{"name": _MODEL, "path": str(folder), "profile_as": "tiny-sd3"}],
        "cluster": {"workers_per_node": 1, "memory_mb": 4096},
        "placement": ["EDC"],
        "dispatch": {"policy": "edf", "max_degree": 1},
    }
    inputs = GenerationInputs("pause", Shape(side, side), steps, 5.0, seed=1)
    gaps_s: list[float] = []
    async with run_service(args, folder, host_dir, _Halves) as service:
        for run in range(1 + runs):
            answer = await service.ask(f"r{run}", _MODEL, inputs)
            first, second = (ran for ran in answer.timeline if ran.stage is Stage.DIFFUSE)
            if run > 0:
                gaps_s.append(second.start_s - first.end_s)
    return {
        "side": side,
        "ms": compute_median_ms(gaps_s),
        "range_ms": [round(1000 * gap, 3) for gap in (min(gaps_s), max(gaps_s))],
    }
