"""The work that is left of a request: all that matters of it to its times and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tridentserve.protocols import PendingRequest, StageTimes
from tridentserve.requests import BatchKey, RequestSpec, Shape
from tridentserve.stages import Stage


class Work(NamedTuple):
    """The work that is left of a request, or of each of `batch` requests. Requests with equal work differ in their
    deadlines only."""

    model: str
    shape: Shape
    num_outputs: int
    num_steps: int
    needs_encode: bool
    batch: int = 1
    batch_key: BatchKey = ("exact", 1.0, None)
    weight: float = 1.0
    """The weight that the requests have by their priority."""
    step_share: float = 1.0
    """See `RequestSpec.step_share`."""
    whole: bool = False
    """See `RequestSpec.whole`."""
    token_ratio: float = 1.0
    """See `RequestSpec.token_ratio`."""

    @classmethod
    def from_spec(cls, spec: RequestSpec) -> Work:
        return cls._of(spec, spec.num_inference_steps, True)

    @classmethod
    def from_pending(cls, pending: PendingRequest) -> Work:
        """A request whose D was stopped has its condition already, and fewer steps to go."""
        spec = pending.spec
        num_steps = max(spec.num_inference_steps - pending.steps_done, 0)
        return cls._of(spec, num_steps, not pending.encoded)

    @classmethod
    def _of(cls, spec: RequestSpec, num_steps: int, needs_encode: bool) -> Work:
        return cls(
            spec.model,
            spec.shape,
            spec.num_outputs,
            num_steps,
            needs_encode,
            batch_key=spec.batch_key,
            weight=spec.weight,
            step_share=spec.step_share,
            token_ratio=spec.token_ratio,
            whole=spec.whole,
        )

    def count_outputs_at_once(self, stage: Stage) -> int:
        """The number of outputs that a call of a stage makes: a batch is decoded one member after the other."""
        return self.num_outputs * (1 if stage is Stage.DECODE else self.batch)

    def stage_s(self, times: StageTimes, stage: Stage, degree: int) -> float:
        """Seconds of E or C of all requests on this many workers. `ProfileError` where that was not profiled."""
        calls = self.batch if stage is Stage.DECODE else 1
        return calls * times.seconds(self.model, stage, self.shape, degree, self.count_outputs_at_once(stage))


FindWork = Callable[[PendingRequest], Work]


class KnownWork:
    """The work of waiting requests, found once for as long as they wait unchanged."""

    def __init__(self) -> None:
        # By the identity of the request, which is kept with it and so is no other's.
        self._before: dict[int, tuple[PendingRequest, Work]] = {}
        self._known: dict[int, tuple[PendingRequest, Work]] = {}

    def start_tick(self) -> None:
        """Forget the requests that the last tick did not ask for."""
        self._before, self._known = self._known, {}

    def find(self, request: PendingRequest) -> Work:
        """`Work.from_pending`."""
        if (known := self._known.get(id(request))) is None:
            known = self._before.get(id(request)) or (request, Work.from_pending(request))
            self._known[id(request)] = known
        return known[1]


# Waiting requests by what is left to do of them, earliest deadline first.
Waiting = Mapping[Work, Sequence[PendingRequest]]
