"""The device of a worker on a GPU: copies beside kernels, spans of work that is done, groups that are given up, links
to other GPUs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.support.processes import output_of
from tridentserve.device import find_device
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.engine.live.worker.executor import Execution, StageExecutor, _StageRun
from tridentserve.errors import GroupError
from tridentserve.parallel import connect_store, make_group
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.stages import Stage

pytestmark = pytest.mark.gpu
_CYCLES = 2_000_000_000  # about a second


# A kernel with an index out of bounds, and then a probe.
_BREAKING = """
import torch
from tridentserve.device import find_device

gpu = torch.device("cuda")
table, device = torch.zeros(4, device=gpu), find_device(gpu)
print(device.is_broken_by(ValueError("nothing has happened yet")))
try:
    table[torch.tensor([1 << 20], device=gpu)].cpu()
except RuntimeError as error:
    print(device.is_broken_by(error), type(error).__name__)
"""


def keep_busy() -> None:
    torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]


def test_a_kernel_that_fails_leaves_the_process_a_broken_device(gpu: torch.device) -> None:
    """In a process of its own."""
    output = output_of([sys.executable, "-c", _BREAKING], Path(__file__).parents[2])
    assert output.split() == ["False", "True", "AcceleratorError"]


async def test_a_copy_waits_for_what_made_its_tensors_and_not_for_later_work(gpu: torch.device) -> None:
    device = find_device(gpu)
    copies = device.make_copy_call("test")
    parcel = Parcel({"x": torch.arange(1 << 20, device=gpu)})
    parcel.made = device.mark_work()
    layout = parcel.layout()
    await copies(parcel.pack, layout, after=parcel.made)  # the first copy starts a thread and a stream
    keep_busy()
    later = torch.cuda.current_stream(gpu).record_event()
    packed = await copies(parcel.pack, layout, after=parcel.made)
    assert not later.query(), "the copy waited for a step that came later"
    assert packed.is_pinned()
    assert torch.equal(Parcel.views(packed, layout).tensors["x"], torch.arange(1 << 20))
    torch.cuda.synchronize(gpu)


async def test_a_copy_sees_what_was_still_being_computed(gpu: torch.device) -> None:
    device = find_device(gpu)
    keep_busy()
    parcel = Parcel({"x": torch.ones(1 << 20, device=gpu) * 3})
    packed = await device.make_copy_call("test")(parcel.pack, parcel.layout(), after=device.mark_work())
    assert bool((Parcel.views(packed, parcel.layout()).tensors["x"] == 3).all())


async def test_memory_that_was_handed_over_is_not_used_again_too_early(gpu: torch.device) -> None:
    """Kernels that are queued still read it when its last tensor is dropped."""
    device = find_device(gpu)
    copies = device.make_copy_call("test")

    def make(value: float) -> torch.Tensor:
        made = torch.full((1 << 20,), value, device=gpu)
        device.hand_over([made])
        return made

    first = await copies(make, 1.0)
    keep_busy()
    doubled = first * 2
    del first
    await copies(make, 5.0)
    torch.cuda.synchronize(gpu)
    assert bool((doubled == 2).all())


def test_a_span_lasts_until_the_device_has_done_the_work(gpu: torch.device) -> None:
    plan = DispatchPlan(0, "m", (Stage.ENCODE,), ("w",), (PlanMember("r"),))
    execution, nobody = Execution(), cast(Any, None)
    keep_busy()  # work from before does not count
    with StageExecutor("w", nobody, nobody, find_device(gpu))._time_stage(
        _StageRun(plan, Stage.ENCODE, None, {}, execution, StepControl())
    ):
        began_s = time.perf_counter()
        keep_busy()
        launched_s = time.perf_counter() - began_s
    (span,) = execution.spans
    assert span.end_s - span.start_s > 10 * launched_s
    assert torch.cuda.current_stream(gpu).query()


def test_a_group_of_nccl_is_given_up_from_another_thread(gpu: torch.device) -> None:
    group = make_group(connect_store(is_server=True), "alone", 0, 1, gpu, timeout_s=60.0)
    group.connect()
    keep_busy()
    began_s = time.perf_counter()
    assert group.agree(2) == 2
    assert time.perf_counter() - began_s < 0.5, "a command waited for the device"
    group.confirm()
    group.abort()
    with pytest.raises(GroupError):
        group.confirm()
    group.close()
    assert torch.zeros(1, device=gpu).item() == 0, "the process and its context live on"


def test_a_worker_knows_which_gpu_it_has(gpu: torch.device) -> None:
    links = find_device(gpu).find_links()
    assert links is not None
    assert len(links.closeness) == _count_gpus() - 1, "nvidia-smi lists this GPU, and tells its links to the others"
    assert links.address not in links.closeness


def _count_gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())
