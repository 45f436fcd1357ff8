"""The batches that run in one pool, for policies that let requests join or displace them at a step boundary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dispatch.policies.greedy.work import count_steps_left
from dispatch.policies.step_level.dispatcher import StepTick
from dispatch.policies.step_level.worker_picker import WorkerPicker
from tridentserve.plans import WorkerId
from tridentserve.protocols import Decisions, PendingRequest, Preemption, RunningRequest
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage


@dataclass(slots=True)
class RunningBatch:
    """Requests in D on the same workers."""

    members: tuple[RunningRequest, ...]
    """The members in the order of the view."""
    kind: int | None
    """`StepTick.kinds` of the members; None where they differ in size."""
    stops: bool
    """True when it yields already, or is going to by this tick's decisions."""
    joining: list[PendingRequest] = field(default_factory=list)
    """Waiting requests that join at its next step boundary."""

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return self.members[0].diffuse

    @property
    def size(self) -> int:
        """The number of members, with those that are to join."""
        return len(self.members) + len(self.joining)

    @property
    def specs(self) -> list[RequestSpec]:
        """The members, with those that are to join."""
        return [*(each.spec for each in self.members), *(each.spec for each in self.joining)]

    def is_of_one_kind(self, tick: StepTick) -> bool:
        """True where its members, and those that are to join, do not differ in size."""
        return len({tick.kinds[spec.request_id] for spec in self.specs}) == 1

    def find_joining(self, waiting: Iterable[PendingRequest], tick: StepTick, pool: int) -> Sequence[PendingRequest]:
        """The first of those that wait, of other sizes, with which it pays to share its steps; empty where it does
        not."""
        specs, degree = self.specs, len(self.workers)
        if self.stops:
            return ()
        able = [each for each in waiting if tick.mixed.can_mix(specs[0], each.spec, degree)]
        return tick.mixed.find_joining(specs, able, pool, degree)

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
        RunningBatch(tuple(members), _find_kind(tick, members), any(member.yielding for member in members))
        for members in together.values()
    ]


def _find_kind(tick: StepTick, members: Iterable[RunningRequest]) -> int | None:
    kinds = {tick.kinds[member.spec.request_id] for member in members}
    return kinds.pop() if len(kinds) == 1 else None


def let_join(batches: Iterable[RunningBatch], tick: StepTick, pool: int, policy: str) -> Decisions:
    """Those that are to join a batch continue with its members in a plan that takes over. Where E of them goes
    elsewhere, the batch stops instead, and all wait for the tick after that. Nothing is to be done where it stops
    anyway, or where a member is about to end: the others go on by themselves then, and can be joined."""
    takeovers, preemptions = [], list[Preemption]()
    for batch in batches:
        if not batch.joining or batch.stops or min(map(count_steps_left, batch.members)) <= 1:
            continue
        names = ", ".join(request.spec.request_id for request in batch.joining)
        why = f"{policy}: {names} {'joins' if len(batch.joining) == 1 else 'join'}"
        takeover = tick.build_takeover(batch.members, batch.joining, pool, why)
        if takeover is None:
            preemptions += batch.stop(why)
        else:
            takeovers.append(takeover)
    return Decisions(takeovers, preemptions)
