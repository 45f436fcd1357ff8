"""Plans of one worker whose weights come while the plan before computes; on a CPU, with real stages."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests.device.recording import CPU
from tests.engine.live.weights.test_replica_store import PLENTY, RESERVE, make_store
from tests.pipelines.models import make_inputs, stock_result
from tridentserve.device import find_device
from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.messages import ExpectedPeak, ModelSource, PlanReport
from tridentserve.engine.live.previews.painter import PreviewPainter
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.layered_weights import LayeredLayout
from tridentserve.engine.live.worker.device_thread import DeviceThread
from tridentserve.engine.live.worker.executor import StageExecutor
from tridentserve.engine.live.worker.plan_runner import PlanRunner
from tridentserve.engine.live.worker.reporting.plan_reports import PlanReporter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import DispatchPlan, PlanMember, Replica
from tridentserve.stages import Stage
from tridentserve.weights_share import WeightsShare

STEPS, PEAK_BYTES, STREAMED = 2, 100_000, WeightsShare(streamed=True)
E, D, C = (Replica("flux", stage) for stage in Stage)
MEMBERS = {
    E: PlanMember("r"),
    D: PlanMember("r", (0, STEPS), input_id=0, source="w"),
    C: PlanMember("r", input_id=1, source="w"),
}


@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no room"])
async def test_the_next_weights_come_ahead(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    """Those of a streamed and of a whole stage. Where there is no room beside the plan that computes, they come in
    their turn, and the image is the same."""
    folder = ensure_tiny("flux", tiny_cache)
    copies = HostCopies(tiny_cache / "host", {"flux": ModelSource("flux", folder)}, CPU)
    copies.make_all(MEMBERS)
    most_bytes = max(copies.get(E).layout.nbytes, LayeredLayout(copies.get(D), STREAMED, 0).num_bytes)
    store = make_store(copies, "host", PLENTY if has_room else most_bytes + PEAK_BYTES + RESERVE, shares={D: STREAMED})
    came = list[Replica]()
    take = store._ahead.take

    def note_taken(replica: Replica) -> object:
        taken = take(replica)
        came.extend([replica] if taken is not None else [])
        return taken

    monkeypatch.setattr(store._ahead, "take", note_taken)
    device = find_device(CPU)
    handoff = HandoffBuffer("w", {}, torch.zeros(1 << 20, dtype=torch.uint8), None)
    runner = PlanRunner(
        "w",
        CPU,
        DeviceThread(),
        asyncio.Lock(),
        StageExecutor("w", store, Mock(), device),
        store,
        copies,
        handoff,
        PreviewPainter(copies),
        Mock(),
        PlanReporter("w", handoff, Mock()),
    )
    inputs = make_inputs(steps=STEPS, variant="flux")
    reports = asyncio.Queue[PlanReport]()
    for number, (replica, member) in enumerate(MEMBERS.items()):
        plan = DispatchPlan(number, "flux", (replica.stage,), ("w",), (member,))
        peak = ExpectedPeak(PEAK_BYTES, PEAK_BYTES)
        runner.start_plan(plan, {"r": inputs}, peak, False, lambda note: None, reports.put_nowait)
    ended = [await reports.get() for _ in MEMBERS]
    assert [report.outcome for report in ended] == ["finished"] * 3, [report.error for report in ended]
    assert came == ([D, C] if has_room else [])
    ((png,),) = (ended[-1].outputs or {}).values()
    (stock,) = stock_result(folder, inputs, "pil")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), np.asarray(stock))
