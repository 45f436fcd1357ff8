"""A load that shifts from decoding to denoising, and what a live service finishes before, during and after.

The workers have no memory for all stages at once. The placement is made for requests of one denoising step, most of
whose time is decoding; then requests of many steps come, faster than this placement can serve them. The Monitor sees
it, the trigger fires, and the placement follows while requests run (Adjust-on-Dispatch).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.bench.service import Service, run_service
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.protocols import Dispatcher
from tridentserve.requests import GenerationInputs, Shape

MODEL = "tiny-sd3"
SHAPE = Shape(256, 256)
# By the profile C takes longer than D with one step, and a twentieth of D with thirty.
DECODE_HEAVY, DIFFUSE_HEAVY = 1, 30
# The seconds after the new placement that count as `during`: weights move then.
_MOVING_S = 2.0
_POLL_S = 0.01
# Faster than one worker makes the requests of many steps, where a core takes about 0.2 s for one.
_GAP_S = 0.2


def make_shift_args(num_workers: int, cache_dir: Path, policy: str) -> dict[str, Any]:
    """The configuration of a service whose placement is made for requests of one step."""
    load = {"model": MODEL, "width": SHAPE.width, "height": SHAPE.height, "num_inference_steps": DECODE_HEAVY}
    # All three stages and the activations do not fit these workers at once.
    cluster = {"workers_per_node": num_workers, "memory_mb": 18, "max_groups": 2, "cpus_per_worker": 0.1}
    return {
        "models": [{"name": MODEL, "tiny": "sd3"}],
        # The placement is to matter where there are fewer cores than workers, too.
        "cluster": {**cluster, "max_denoising": num_workers},
        "handoff": {"capacity_mb": 4},
        "placement": "auto",
        "expected_load": [load],
        "replan": {"window_s": 12, "shortest_window_s": 3, "check_interval_s": 0.2},
        "dispatch": {"policy": policy},
        "cache_dir": str(cache_dir),
    }


@dataclass
class ShiftingLoad:
    """Requests that are sent one after another, whether or not others have ended, and their answers. Where each waited
    for another one to end, no more would ever come than the workers can serve."""

    service: Service[Dispatcher]
    tasks: list[asyncio.Task[CompletedUpdate]] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    """The times at which requests ended, on the clock of the event loop."""

    async def send(self, num_inference_steps: int, gap_s: float) -> None:
        """Sends a request, and waits for the time to the next one."""
        inputs = GenerationInputs("a shift", SHAPE, num_inference_steps, 5.0, seed=len(self.tasks))
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.service.ask(f"r{len(self.tasks)}", MODEL, inputs))
        task.add_done_callback(lambda _: self.ends_s.append(loop.time()))
        self.tasks.append(task)
        await asyncio.sleep(gap_s)

    def count_kinds(self) -> dict[str, int]:
        """The number of workers by the stages that they are to hold."""
        return Counter(label.removeprefix(f"{MODEL}:") for label in self.service.engine.placement.values())


async def measure_shift(
    cache_dir: Path, host_dir: Path, policies: Sequence[str], num_workers: int, each_s: float
) -> dict[str, Any]:
    """Requests that end per second: in the second half of the first load, from the shift to `_MOVING_S` after the new
    placement, and from then until the last is sent. A policy that keeps its placement is measured at the times of the
    first one; without a new placement `during` ends half-way. `each_s`: seconds of either load."""
    result: dict[str, Any] = {"workers": num_workers, "gap_between_requests_s": _GAP_S}
    switched_after_s: float | None = None
    for policy in policies:
        args = make_shift_args(num_workers, cache_dir, policy)
        folder = ensure_tiny("sd3", cache_dir)
        async with run_service(args, folder, host_dir / policy, lambda dispatcher: dispatcher) as service:
            load = ShiftingLoad(service)
            kinds = [load.count_kinds()]
            shifted_s, own_s = await _run(load, kinds, each_s)
            switched_after_s = own_s if switched_after_s is None else switched_after_s
            sent_s = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*load.tasks)
        moved_s = shifted_s + (each_s / 2 if switched_after_s is None else switched_after_s + _MOVING_S)
        spans = {"before": (shifted_s - each_s / 2, shifted_s), "during": (shifted_s, moved_s)}
        spans["after"] = (moved_s, sent_s)
        result[policy.replace("-", "_")] = {
            "switched_after_s": None if own_s is None else round(own_s, 2),
            "placements": [" ".join(f"{n}x{kind}" for kind, n in sorted(each.items())) for each in kinds],
            "retries": sum(answer.retries for answer in answers),
            **{f"{name}_per_s": _count_per_s(load.ends_s, *span) for name, span in spans.items()},
        }
    return result


async def _run(load: ShiftingLoad, kinds: list[dict[str, int]], each_s: float) -> tuple[float, float | None]:
    """Both loads. Returns the time of the shift, and the seconds from then to the first new placement, if there was
    one; `kinds` gets each new placement."""
    loop = asyncio.get_running_loop()
    shifted_s, switched_after_s = loop.time() + each_s, None

    async def watch() -> None:
        nonlocal switched_after_s
        while True:
            if (now := load.count_kinds()) != kinds[-1]:
                kinds.append(now)
                switched_after_s = loop.time() - shifted_s if switched_after_s is None else switched_after_s
            await asyncio.sleep(_POLL_S)

    watching = loop.create_task(watch())
    while loop.time() < shifted_s + each_s:
        await load.send(DECODE_HEAVY if loop.time() < shifted_s else DIFFUSE_HEAVY, _GAP_S)
    watching.cancel()
    return shifted_s, switched_after_s


def _count_per_s(ends_s: Sequence[float], from_s: float, to_s: float) -> float:
    return round(sum(from_s <= end_s < to_s for end_s in ends_s) / (to_s - from_s), 2)
