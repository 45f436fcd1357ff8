"""The batches that run in one pool, for policies that let requests join or displace them at a step boundary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dispatch.policies.step_level.dispatcher import StepTick
from dispatch.policies.step_level.worker_picker import WorkerPicker
from tridentserve.plans import WorkerId
from tridentserve.protocols import Preemption, RunningRequest
from tridentserve.stages import Stage


@dataclass(slots=True)
class RunningBatch:
    """Requests in D on the same workers."""

    members: tuple[RunningRequest, ...]
    """The members in the order of the view."""
    kind: int
    """`StepTick.kinds` of the members."""
    stops: bool
    """True when it yields already, or is going to by this tick's decisions."""
    promised: int = 0
    """Number of waiting requests that join at its next step boundary."""

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return self.members[0].diffuse

    @property
    def size(self) -> int:
        """The number of members, with those that are to join."""
        return len(self.members) + self.promised

    def stop(self, why: str) -> list[Preemption]:
        """The preemption that stops the batch at its next step boundary; empty where it stops anyway."""
        if self.stops:
            return []
        self.stops = True
        return [Preemption(self.members[0].spec.request_id, why)]


def find_running_batches(tick: StepTick, running: Iterable[RunningRequest], picker: WorkerPicker) -> list[RunningBatch]:
    """The batches in D on workers of this pool that can be stopped, in the order of the view."""
    together: dict[tuple[WorkerId, ...], list[RunningRequest]] = {}
    for request in running:
        if request.stage is Stage.DIFFUSE and not request.spec.whole and picker.holds(request.diffuse[0]):
            together.setdefault(request.diffuse, []).append(request)
    return [
        RunningBatch(tuple(members), tick.kinds[members[0].spec.request_id], any(member.yielding for member in members))
        for members in together.values()
    ]
