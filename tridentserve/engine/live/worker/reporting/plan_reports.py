"""Reports of plans that have ended, with the outputs that go with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from tridentserve.device.memory_errors import is_out_of_memory
from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.messages import ComputedNote, PlanReport
from tridentserve.engine.live.metrics import WorkerMetrics
from tridentserve.engine.live.worker.executor import Execution
from tridentserve.engine.live.worker.plan_memory import RunningPlan
from tridentserve.engine.live.worker.reporting.output_files import EncodedOutput, encode_outputs
from tridentserve.errors import HandoffError, LoraFileError, OutOfMemoryError, TridentServeError, WorkerError
from tridentserve.plans import DispatchPlan, WorkerId

logger = logging.getLogger(__name__)

# Up to this number of bytes, the outputs of a plan go with its report: Ray, too, sends results of this size themselves
# and not a reference to them. A reference costs both ends more than a millisecond.
_MAX_INLINE_BYTES = 100 * 1024
# From so many bytes of pixels on, as those of an image of 256x256, it pays to say that a plan has been computed before
# its outputs are files: these take longer then than what the message costs.
_SLOW_TO_ENCODE_BYTES = 256 * 256 * 3


class PlanReporter:
    """Makes the reports of one worker's plans, and keeps the outputs that are too large for them."""

    def __init__(self, worker_id: WorkerId, handoff: HandoffBuffer, metrics: WorkerMetrics) -> None:
        self._worker_id = worker_id
        self._handoff = handoff
        self._metrics = metrics
        self._kept: dict[int, list[EncodedOutput]] = {}  # outputs that nobody has collected yet, by plan

    def take_outputs(self, plan_id: int) -> list[EncodedOutput]:
        """The outputs that did not go with the report of a plan, request by request. Nobody gets them again."""
        return self._kept.pop(plan_id)

    async def make_report(self, running: RunningPlan, execution: Execution) -> PlanReport:
        """Report a plan that has ended by itself or was stopped. Outputs become files in a thread."""
        plan, peak = running.plan, running.peak
        decoded = {} if plan.is_warm_up else execution.decoded
        if sum(outputs.pixels.nbytes for outputs in decoded.values()) >= _SLOW_TO_ENCODE_BYTES:
            running.tell(ComputedNote())
        made = {
            request_id: await asyncio.to_thread(encode_outputs, outputs, running.inputs[request_id])
            for request_id, outputs in decoded.items()
        }
        inline = _choose_inline(made)
        if inline is None:
            self._kept[plan.plan_id] = [output for outputs in made.values() for output in outputs]
        if not plan.is_warm_up:
            self._count_plan(running, execution)
        return PlanReport(
            plan_id=plan.plan_id,
            outcome="stopped" if execution.stopped else "finished",
            paused_after=execution.paused_after,
            spans=execution.spans,
            num_outputs={request_id: len(outputs) for request_id, outputs in made.items()},
            outputs=inline,
            peak_memory_bytes=peak.total_bytes,
            peak_growth_bytes=peak.growth_bytes,
            expected_peak_bytes=running.expected.num_bytes,
            tiled=execution.tiled,
            skipped_steps=execution.skipped_steps,
            taken_steps=execution.taken_steps,
            loras=execution.loras,
            buffer_used_bytes=self._handoff.used_bytes,
            buffer_bytes=self._handoff.capacity_bytes,
        )

    def _count_plan(self, running: RunningPlan, execution: Execution) -> None:
        plan = running.plan
        self._metrics.count_stages(plan, execution.spans)
        if not execution.stopped:
            self._metrics.set_plan_peak(plan, running.peak.growth_bytes, running.expected.num_bytes)
            self._metrics.count_tiled_decodes(plan, len(execution.decoded) if execution.tiled else 0)

    def make_failure(self, plan: DispatchPlan, error: Exception, is_device_broken: bool) -> PlanReport:
        """Report a plan that has failed, and log it."""
        names = ", ".join(plan.request_ids)
        if isinstance(error, TridentServeError):
            logger.warning("plan %d of %s failed: %s", plan.plan_id, names, error)
            message, code, retry = str(error), error.code, _may_succeed_later(error)
        else:
            logger.warning("plan %d of %s failed: %s", plan.plan_id, names, error, exc_info=error)
            # The text of an error of a library may quote the prompt: it stays in this worker's log.
            message = f"{type(error).__name__} (more in the log of {self._worker_id})"
            code, retry = WorkerError.code, True
        if is_device_broken:
            logger.error("the device of %s cannot be used any more by this process", self._worker_id)
            code, retry = WorkerError.code, True
        return PlanReport(
            plan.plan_id,
            "failed",
            error=message,
            retry=retry,
            code=code,
            may_be_worker=is_device_broken or (retry and _may_be_worker(error)),
            is_device_broken=is_device_broken,
        )


def _may_be_worker(error: Exception) -> bool:
    """True unless it is known that another worker is at fault, or that memory was short."""
    return not isinstance(error, HandoffError | WorkerError) and not is_out_of_memory(error)


def _may_succeed_later(error: TridentServeError) -> bool:
    """True when the plan's requests may succeed another time. A plan that does not fit into empty
    memory never will, and a fault of a request or of its LoRA's file stays."""
    return error.http_status >= 500 and not isinstance(error, OutOfMemoryError | LoraFileError)


def _choose_inline(made: Mapping[str, Sequence[EncodedOutput]]) -> dict[str, tuple[bytes, ...]] | None:
    """The outputs, where all of them together are small files; None where they are not."""
    files = {
        request_id: tuple(output for output in outputs if isinstance(output, bytes))
        for request_id, outputs in made.items()
    }
    is_whole = all(len(files[request_id]) == len(outputs) for request_id, outputs in made.items())
    num_bytes = sum(len(file) for each in files.values() for file in each)
    return files if is_whole and num_bytes <= _MAX_INLINE_BYTES else None
