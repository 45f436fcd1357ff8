"""The state of a cluster at one moment, as plain data for whoever watches it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace

from tridentserve.plans import WorkerId

# Of the unfinished requests so many are told one by one, and of the classes so many: the others are counted only.
MAX_TOLD_REQUESTS = 200
MAX_TOLD_CLASSES = 50
# A prediction is good within this share of the time that a request took.
GOOD_PREDICTION = 0.3


@dataclass(frozen=True, slots=True)
class WatchedPlan:
    """A plan that a worker has been given and has not reported. All times are on one clock: the scheduler's inside it,
    the Unix clock in what others see."""

    plan_id: int
    model: str
    stages: str
    """The letters of its stages, such as `DC`."""
    degree: int
    request_ids: tuple[str, ...]
    start_s: float
    """The time at which it began, or is expected to begin where it waits behind another."""
    end_s: float
    """The time at which it is expected to end."""

    def shift(self, by_s: float) -> WatchedPlan:
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)

    def rename_requests(self, name: Callable[[str], str]) -> WatchedPlan:
        return replace(self, request_ids=tuple(map(name, self.request_ids)))


@dataclass(frozen=True, slots=True)
class HandoffLevel:
    """The fill of a worker's handoff buffer when it reported its latest plan."""

    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """One worker."""

    worker_id: WorkerId
    node_id: str
    alive: bool
    placement: str
    """The replicas that it is meant to hold, such as `tiny-sd3:EDC`."""
    plans: tuple[WatchedPlan, ...] = ()
    """The plans that it has, in the order in which it runs them."""
    reserved_until_s: float | None = None
    """The expected end of the D for which it is kept free; None where it is not."""
    coreless: bool = False
    """True where it is idle and cannot begin D, as the cores of its node are taken (`SharedCores`)."""
    aside_until_s: float | None = None
    """The time until which it is given no plans, as plans have failed there (`FaultWatch`); None where it is given
    some."""
    handoff: HandoffLevel | None = None
    """None before its first report."""

    def shift(self, by_s: float) -> WatchedWorker:
        until_s, aside_until_s = self.reserved_until_s, self.aside_until_s
        return replace(
            self,
            plans=tuple(plan.shift(by_s) for plan in self.plans),
            reserved_until_s=None if until_s is None else until_s + by_s,
            aside_until_s=None if aside_until_s is None else aside_until_s + by_s,
        )


@dataclass(frozen=True, slots=True)
class WatchedRequest:
    """One request that has not ended. Its prompt is not known here."""

    request_id: str
    model: str
    size: str
    """Width, height and number of frames, such as `512x512` or `64x64x9`."""
    num_steps: int
    steps_done: int
    """Denoising steps of the plans that have ended."""
    running: bool
    arrival_s: float
    deadline_s: float

    def shift(self, by_s: float) -> WatchedRequest:
        return replace(self, arrival_s=self.arrival_s + by_s, deadline_s=self.deadline_s + by_s)


@dataclass(frozen=True, slots=True)
class WatchedClass:
    """The unfinished requests of one model and size."""

    model: str
    size: str
    waiting: int
    running: int
    oldest_s: float | None
    """The arrival of the one that has waited longest; None where none waits."""

    def shift(self, by_s: float) -> WatchedClass:
        return replace(self, oldest_s=None if self.oldest_s is None else self.oldest_s + by_s)


@dataclass(frozen=True, slots=True)
class EndedStage:
    """A stage that has run."""

    number: int
    """Counts the stages of one scheduler."""
    plan_id: int
    model: str
    stage: str
    """E, D or C."""
    workers: tuple[WorkerId, ...]
    request_ids: tuple[str, ...]
    start_s: float
    end_s: float
    steps: int | None = None

    def shift(self, by_s: float) -> EndedStage:
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)


@dataclass(frozen=True, slots=True)
class ClusterNotice:
    """Something that happens to the cluster itself, with its reason."""

    at_s: float
    kind: str
    """`placement`, `worker_joined`, `worker_lost`, `worker_aside`, `worker_back` or `requeue`."""
    text: str

    def shift(self, by_s: float) -> ClusterNotice:
        return replace(self, at_s=self.at_s + by_s)


@dataclass(frozen=True, slots=True)
class Attainment:
    """Requests of one model that have ended lately, cancelled and invalid ones left out, or should have ended."""

    on_time: int = 0
    """The number of those that ended before their deadline."""
    ended: int = 0
    overdue: int = 0
    """Requests that have not ended although their deadline has passed."""
    predicted: int = 0
    """The number of those that ended with a result and whose end had been predicted when they came."""
    predicted_well: int = 0
    """The number of those whose prediction was within `GOOD_PREDICTION` of the time that they took."""

    def add(self, other: Attainment) -> Attainment:
        return Attainment(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All that is told of a cluster, or of several cells together."""

    now_s: float
    """The time at which it was so."""
    workers: tuple[WatchedWorker, ...] = ()
    requests: tuple[WatchedRequest, ...] = ()
    """The unfinished requests, the oldest first; of many, the first `MAX_TOLD_REQUESTS`."""
    num_requests: int = 0
    """All unfinished requests."""
    classes: tuple[WatchedClass, ...] = ()
    attainment: Mapping[str, Attainment] = field(default_factory=dict)
    """By model, of the last `ATTAINMENT_S`."""
    notices: tuple[ClusterNotice, ...] = ()
    """The latest ones, the oldest first."""
    ended: tuple[EndedStage, ...] = ()
    """Stages that have ended since the state before."""
    cursor: tuple[int, ...] = ()
    """The number of the latest ended stage, of each cell: the next state begins behind it."""

    def shift(self, by_s: float) -> ClusterState:
        """The same state on a clock that is `by_s` ahead."""
        return replace(
            self,
            now_s=self.now_s + by_s,
            workers=tuple(worker.shift(by_s) for worker in self.workers),
            requests=tuple(request.shift(by_s) for request in self.requests),
            classes=tuple(entry.shift(by_s) for entry in self.classes),
            notices=tuple(notice.shift(by_s) for notice in self.notices),
            ended=tuple(stage.shift(by_s) for stage in self.ended),
        )

    def rename_requests(self, name: Callable[[str], str]) -> ClusterState:
        """The same state with other ids of requests: an engine gives the scheduler ids of its own."""
        workers = tuple(
            replace(worker, plans=tuple(plan.rename_requests(name) for plan in worker.plans))
            if worker.plans
            else worker
            for worker in self.workers
        )
        requests = tuple(replace(request, request_id=name(request.request_id)) for request in self.requests)
        ended = tuple(replace(stage, request_ids=tuple(map(name, stage.request_ids))) for stage in self.ended)
        return replace(self, workers=workers, requests=requests, ended=ended)


def combine_states(states: Iterable[ClusterState | None], cursor: tuple[int, ...]) -> ClusterState:
    """The state of several cells together, in their order. That of a cell which does not answer is None; it keeps its
    part of the `cursor`."""
    answers = list(states)
    found = [state for state in answers if state is not None]
    attainment: dict[str, Attainment] = {}
    for state in found:
        for model, part in state.attainment.items():
            attainment[model] = attainment.get(model, Attainment()).add(part)
    return ClusterState(
        now_s=max((state.now_s for state in found), default=0.0),
        workers=tuple(worker for state in found for worker in state.workers),
        requests=tuple(request for state in found for request in state.requests)[:MAX_TOLD_REQUESTS],
        num_requests=sum(state.num_requests for state in found),
        classes=tuple(entry for state in found for entry in state.classes)[:MAX_TOLD_CLASSES],
        attainment=attainment,
        notices=tuple(sorted((notice for state in found for notice in state.notices), key=lambda notice: notice.at_s)),
        ended=tuple(stage for state in found for stage in state.ended),
        cursor=tuple(
            state.cursor[0] if state is not None else known for state, known in zip(answers, cursor, strict=True)
        ),
    )
