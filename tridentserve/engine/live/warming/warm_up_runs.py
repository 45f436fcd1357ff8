"""The runs that warm workers up: requests of a few sizes, on ways by which every worker comes to each of its stages.
Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tridentserve.plans import DispatchPlan, PlanMember, Replica, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.scheduling.estimation.hot_groups import HotGroup
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class WarmUpOrder:
    """One model, and what its workers run before they take requests."""

    model: str
    requests: tuple[GenerationInputs, ...]
    """One for each size, the smallest first."""
    degrees: tuple[int, ...]
    """The degrees at which D may run."""
    is_compiled: bool
    """One worker of a node compiles, and the others find its code."""


@dataclass(frozen=True, slots=True)
class WarmUpLeg:
    """The part of a run that is one plan."""

    stages: tuple[Stage, ...]
    workers: tuple[WorkerId, ...]
    """In rank order; the first one leads."""
    group: str | None
    """The name of their process group; None for one worker."""


@dataclass(frozen=True, slots=True)
class WarmUpRun:
    """A request on its way through workers. Nobody gets its result."""

    model: str
    inputs: GenerationInputs
    legs: tuple[WarmUpLeg, ...]

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All that take part."""
        return tuple(dict.fromkeys(worker_id for leg in self.legs for worker_id in leg.workers))

    def make_plans(self, request_id: str, first_id: int) -> list[DispatchPlan]:
        """A plan for each leg; each follows when the one before has ended."""
        plans = []
        for index, leg in enumerate(self.legs):
            before = self.legs[index - 1] if index else None
            after = self.legs[index + 1] if index + 1 < len(self.legs) else None
            member = PlanMember(
                request_id,
                steps=(0, self.inputs.num_inference_steps) if Stage.DIFFUSE in leg.stages else None,
                input_id=first_id + index - 1 if before is not None else None,
                source=before.workers[0] if before is not None else None,
                push_to=after.workers[0] if after is not None else None,
            )
            plans.append(DispatchPlan(first_id + index, self.model, leg.stages, leg.workers, (member,), leg.group))
        return plans


# A stage of a model on a worker that leads a plan with it.
_LedStage = tuple[str, Stage, WorkerId]
# Runs one after the other.
RunSequence = tuple[WarmUpRun, ...]
# Sequences that may run at the same time.
WarmUpPhase = tuple[RunSequence, ...]


@dataclass(frozen=True, slots=True)
class _Team:
    """Workers that run D together."""

    workers: tuple[WorkerId, ...]
    group: str | None = None


class _Holders:
    """The workers that hold each stage of a model."""

    def __init__(self, model: str, held: Mapping[WorkerId, Iterable[Replica]], nodes: Mapping[WorkerId, str]) -> None:
        self.of = {
            stage: tuple(worker_id for worker_id, replicas in held.items() if Replica(model, stage) in replicas)
            for stage in Stage
        }
        self._nodes = nodes

    def find(self, stage: Stage, near: WorkerId, turn: int) -> WorkerId | None:
        """A worker that holds the stage: this one, else one of its node, else any; of several that are as near, another
        one at each turn."""
        holders = self.of[stage]
        if near in holders:
            return near
        nearer = [worker_id for worker_id in holders if self._nodes[worker_id] == self._nodes[near]] or holders
        return nearer[turn % len(nearer)] if nearer else None


def list_first_phases(
    orders: Sequence[WarmUpOrder],
    held: Mapping[WorkerId, Iterable[Replica]],
    nodes: Mapping[WorkerId, str],
    groups: Sequence[HotGroup],
) -> list[WarmUpPhase]:
    """The runs of workers that have just started, phase after phase: each worker alone, then the groups, the narrow
    ones first. `held`: what each worker holds; `nodes`: the node of each. Of a compiled model, the first on each node
    runs before the others."""
    phases: list[WarmUpPhase] = []
    for order in orders:
        holders = _Holders(order.model, held, nodes)
        teams = list(_list_teams(order, holders, groups))
        for _, alike in groupby(teams, lambda team: len(team.workers)):
            for part in _split(list(alike), nodes) if order.is_compiled else [list(alike)]:
                phases.append(tuple(_make_sequence(order, holders, team, turn) for turn, team in enumerate(part)))
        warmed = {name for phase in phases for runs in phase for name in _list_led_stages(runs)}
        phases.append(tuple(_list_rest(order, holders, teams, warmed)))
    return [tuple(runs for runs in phase if runs) for phase in phases if any(phase)]


def list_runs_again(
    orders: Sequence[WarmUpOrder],
    held: Mapping[WorkerId, Iterable[Replica]],
    nodes: Mapping[WorkerId, str],
    worker_id: WorkerId,
) -> RunSequence:
    """The runs of a worker that has come back while the others serve: alone, and only E may be another worker's."""
    runs: list[WarmUpRun] = []
    for order in orders:
        holders = _Holders(order.model, held, nodes)
        if worker_id in holders.of[Stage.DIFFUSE] and 1 in order.degrees:
            encoder = holders.find(Stage.ENCODE, worker_id, 0)
            decoder = worker_id if worker_id in holders.of[Stage.DECODE] else None
            runs += _make_runs(order, encoder, _Team((worker_id,)), decoder)
        elif worker_id in holders.of[Stage.ENCODE]:
            runs += _make_runs(order, worker_id, None, None)
    return tuple(runs)


def join_on_nodes(phase: WarmUpPhase, nodes: Mapping[WorkerId, str]) -> WarmUpPhase:
    """The same runs, those on workers of one node one after another, so that its other workers serve meanwhile."""
    joined: dict[str, list[WarmUpRun]] = {}
    for runs in phase:
        joined.setdefault(nodes[runs[0].workers[0]], []).extend(runs)
    return tuple(tuple(runs) for runs in joined.values())


def _list_teams(order: WarmUpOrder, holders: _Holders, groups: Sequence[HotGroup]) -> Iterator[_Team]:
    """The workers that run D of the model, the narrow teams first."""
    denoisers = holders.of[Stage.DIFFUSE]
    if 1 in order.degrees:
        yield from (_Team((worker_id,)) for worker_id in denoisers)
    for group in groups:  # which come in this order
        if len(group.workers) in order.degrees and set(group.workers) <= set(denoisers):
            yield _Team(group.workers, group.name)


def _make_sequence(order: WarmUpOrder, holders: _Holders, team: _Team, turn: int) -> RunSequence:
    leader = team.workers[0]
    encoder, decoder = (holders.find(stage, leader, turn) for stage in (Stage.ENCODE, Stage.DECODE))
    return _make_runs(order, encoder, team, decoder)


def _list_rest(
    order: WarmUpOrder, holders: _Holders, teams: Sequence[_Team], warmed: Collection[_LedStage]
) -> Iterator[RunSequence]:
    """The runs of workers that hold E or C and that no other run has come to."""
    for encoder in holders.of[Stage.ENCODE]:
        if (order.model, Stage.ENCODE, encoder) not in warmed:
            yield _make_runs(order, encoder, None, None)
    for turn, decoder in enumerate(holders.of[Stage.DECODE]):
        if teams and (order.model, Stage.DECODE, decoder) not in warmed:
            team = teams[turn % len(teams)]
            yield _make_runs(order, holders.find(Stage.ENCODE, team.workers[0], turn), team, decoder)


def _split(teams: Sequence[_Team], nodes: Mapping[WorkerId, str]) -> list[list[_Team]]:
    """The first team of each node, and the others."""
    first: dict[str, _Team] = {}
    for team in teams:
        first.setdefault(nodes[team.workers[0]], team)
    return [list(first.values()), [team for team in teams if team not in first.values()]]


def _make_runs(
    order: WarmUpOrder, encoder: WorkerId | None, team: _Team | None, decoder: WorkerId | None
) -> RunSequence:
    """A run for each size. Without a worker that encodes there is none, as D and C begin with what E gives."""
    if encoder is None:
        return ()
    legs = [WarmUpLeg((Stage.ENCODE,), (encoder,), None)]
    if team is not None:
        _extend(legs, WarmUpLeg((Stage.DIFFUSE,), team.workers, team.group))
        if decoder is not None:
            _extend(legs, WarmUpLeg((Stage.DECODE,), (decoder,), None))
    return tuple(WarmUpRun(order.model, inputs, tuple(legs)) for inputs in order.requests)


def _extend(legs: list[WarmUpLeg], leg: WarmUpLeg) -> None:
    """Add a stage, to the plan of the one before where the same worker leads."""
    last = legs[-1]
    if last.workers[0] != leg.workers[0]:
        legs.append(leg)
        return
    wider = max(last, leg, key=lambda one: len(one.workers))
    legs[-1] = WarmUpLeg((*last.stages, *leg.stages), wider.workers, wider.group)


def _list_led_stages(runs: RunSequence) -> Iterator[_LedStage]:
    for run in runs:
        for leg in run.legs:
            yield from ((run.model, stage, leg.workers[0]) for stage in leg.stages)
