"""Errors after which a process cannot use its device: which they are, what becomes of the plan and of the worker."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch

from tests.device.recording import CPU, RecordingDevice, use_recording_device
from tests.device.test_memory_errors import RecordedReplicas, make_runner, make_running
from tests.engine.live.warming.test_warmer import ORDER, FakeWorkers, make_warmer
from tridentserve.device import find_device
from tridentserve.device.cuda_device import CudaDevice
from tridentserve.engine.live.messages import PlanReport
from tridentserve.engine.live.plan_calls import build_plan_event
from tridentserve.engine.live.worker.executor import Execution
from tridentserve.errors import GroupError, HandoffError, InvalidRequestError, OutOfMemoryError, WorkerError
from tridentserve.plans import DispatchPlan, PlanMember, WorkerId
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage

ILLEGAL_ACCESS = (
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at some "
    "other API call, so the stacktrace below might be incorrect."
)
NO_MEMORY = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call."


class Context:
    """A CUDA context as its errors show it: those of the next calls, one by one, and then one that stays, if any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception, stays: Exception | None = None) -> None:
        self.device, self._errors, self._stays = CudaDevice(torch.device("cuda")), list(errors), stays
        monkeypatch.setattr(self.device, "make_stream", object)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch, "zeros", self._call)

    def _call(self, *_: Any, **__: Any) -> torch.Tensor:
        error = self._errors.pop(0) if self._errors else self._stays
        if error is not None:
            raise error
        return torch.ones(1)


def test_a_context_that_fails_each_call_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.AcceleratorError(ILLEGAL_ACCESS)
    assert Context(monkeypatch, stays=error).device.is_broken_by(error)
    assert Context(monkeypatch, stays=error).device.is_broken_by(ValueError("of a library, for the same reason"))


def test_errors_of_one_call_leave_it_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.AcceleratorError("CUDA error: invalid configuration argument")
    assert not Context(monkeypatch).device.is_broken_by(error)
    assert not Context(monkeypatch, error).device.is_broken_by(error), "which CUDA keeps until somebody asks"


@pytest.mark.parametrize("error", [torch.AcceleratorError(NO_MEMORY), torch.OutOfMemoryError("CUDA out of memory.")])
def test_short_memory_does_not_break_it(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert not Context(monkeypatch, stays=torch.AcceleratorError(ILLEGAL_ACCESS)).device.is_broken_by(error)
    assert not Context(monkeypatch, stays=error).device.is_broken_by(RuntimeError("the probe finds no memory"))


def test_a_cpu_never_breaks() -> None:
    assert not find_device(CPU).is_broken_by(torch.AcceleratorError(ILLEGAL_ACCESS))


# The worker.


class Executor:
    """Raises what it is told to."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors, self.abandoned = list(errors), 0

    def execute_plan(self, *_: Any) -> Execution:
        if (error := self.errors.pop(0)) is not None:
            raise error
        return Execution()


async def report_all(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> list[PlanReport]:
    """The reports of plans one after another, on a device that an `AcceleratorError` breaks."""
    device = RecordingDevice()
    device.breaking = torch.AcceleratorError
    with use_recording_device(device):
        runner = make_runner(RecordedReplicas(), Executor(*errors))

    def collect(*_: Any) -> dict[str, Any]:
        return {}

    async def load(*_: Any) -> bool:
        return False

    async def fetch(*_: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(runner, "_order", asyncio.Lock())
    monkeypatch.setattr(runner, "_fetch_inputs", fetch)
    monkeypatch.setattr(runner, "_collect_inputs", collect)
    monkeypatch.setattr(runner._memory, "load", load)
    runner._execute_and_mark = cast(Any, runner._executor).execute_plan  # type: ignore[method-assign]
    reports = []
    for plan_id in range(len(errors)):
        running = make_running(plan_id)
        runner._running[plan_id] = running
        reports.append(await runner._run_in_turn(running))
    return reports


async def test_the_plan_fails_and_no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that would not touch the device: the worker is to be ended."""
    first, second = await report_all(monkeypatch, torch.AcceleratorError(ILLEGAL_ACCESS), ValueError("never called"))
    for report in (first, second):
        assert (report.outcome, report.retry, report.code) == ("failed", True, "worker_failed")
        assert (report.is_device_broken, report.may_be_worker) == (True, True)
    assert "AcceleratorError" in first.error
    assert second.error == "the device of w is broken"


@pytest.mark.parametrize(
    ("error", "may_be_worker"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (HandoffError("the inputs of a are gone"), False),
        (GroupError("a member died"), False),
        (WorkerError("memory ran out on w"), False),
        (InvalidRequestError("a prompt that is too long"), False),
        (OutOfMemoryError("it never fits"), False),
        (torch.OutOfMemoryError("CUDA out of memory."), False),
    ],
)
async def test_others_are_told_whether_the_worker_may_be_at_fault(
    monkeypatch: pytest.MonkeyPatch, error: Exception, may_be_worker: bool
) -> None:
    (report,) = await report_all(monkeypatch, error)
    assert (report.is_device_broken, report.may_be_worker) == (False, may_be_worker)


# The event.

FAILED = PlanReport(0, "failed", error="AcceleratorError", may_be_worker=True)
OF_GROUP = PlanReport(0, "failed", error="a member died", code=GroupError.code)
LOST = PlanReport(0, "failed", error="b: the process has ended")
FINISHED = PlanReport(0, "finished")


@pytest.mark.parametrize(
    ("reports", "workers"),
    [
        ((FAILED,), ("a",)),
        ((OF_GROUP, FAILED), ("b",)),
        ((FAILED, FINISHED), ("a",)),
        ((OF_GROUP, OF_GROUP), ("a", "b")),
        ((OF_GROUP, LOST), ()),
        ((OF_GROUP, FINISHED), ()),
        ((LOST,), ()),
    ],
)
def test_the_workers_at_fault_are_those_that_say_so(
    reports: tuple[PlanReport, ...], workers: tuple[WorkerId, ...]
) -> None:
    """Or all of a group, where nobody knows more than that it failed."""
    plan = DispatchPlan(0, "m", (Stage.DIFFUSE,), ("a", "b")[: len(reports)], (PlanMember("r"),))
    event = build_plan_event(plan, reports, 0.0)
    assert isinstance(event, ev.PlanFailed)
    assert event.workers == workers


async def test_a_device_that_breaks_in_a_warm_up_ends_the_worker_and_its_next_start_is_without_one() -> None:
    workers, warmer = FakeWorkers("w0", "w1"), make_warmer(ORDER)
    workers.answer = lambda worker_id, plan: PlanReport(
        plan.plan_id, "failed" if worker_id == "w0" else "finished", is_device_broken=worker_id == "w0"
    )
    await warmer.warm_all(workers, lambda progress: None)
    assert set(workers.ended) == {"w0"}
    workers.plans.clear()
    await warmer.warm_again(workers, "w0")
    assert workers.plans == []
