"""Builds a rehearsal from the scheduler's books."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tridentserve.errors import ProfileError
from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import PendingRequest, StageTimes, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.prediction.costs import RequestCosts, RequestKind, estimate_costs, name_kind
from tridentserve.scheduling.prediction.rehearsal import Rehearsal
from tridentserve.scheduling.prediction.scene import RehearsalScene, Rehearsed, RehearsedPool, SharingRules
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.runs.run import Run
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import Stage

# Costs are looked up again after this time: what stages take is learned meanwhile.
_COSTS_KEPT_S = 1.0


@dataclass(frozen=True, slots=True)
class _ModelWorkers:
    """The workers of a model."""

    pools: tuple[int, ...]
    """The pools that hold its D."""
    decodes_in: frozenset[int]
    """Those of them that hold C too."""
    widest: int
    """The most workers of them that one node has."""
    decoders: int
    """The queue of its lone C's: those of its auxiliaries."""


class CostBook:
    """The costs of kinds of requests, kept for a moment."""

    def __init__(self, times: StageTimes, rules: SharingRules) -> None:
        self._times = times
        self._rules = rules
        self._known: dict[tuple[RequestKind, int], RequestCosts] = {}
        self._made_s = -math.inf

    def start(self, now_s: float) -> None:
        """Forget what is old."""
        if now_s > self._made_s + _COSTS_KEPT_S or now_s < self._made_s:
            self._known.clear()
            self._made_s = now_s

    def find(self, spec: RequestSpec, widest: int) -> RequestCosts:
        """The costs of a request on nodes of this size. Raises `ProfileError`."""
        most = widest if self._rules.max_degree is None else min(widest, self._rules.max_degree)
        key = name_kind(spec), most
        if key not in self._known:
            self._known[key] = estimate_costs(self._times, spec, most, self._rules.min_efficiency)
        return self._known[key]


class SceneBuilder:
    """One rehearsal of what the workers do from `now_s` on."""

    def __init__(self, ledger: Ledger, pool: WorkerPool, book: CostBook, now_s: float) -> None:
        self._ledger = ledger
        self._pool = pool
        self._book = book
        self._now_s = now_s
        book.start(now_s)
        views = pool.list_views()
        self.num_workers = 0
        """Workers that hold D of some model."""
        self._members: dict[frozenset[Replica], list[WorkerView]] = {}
        for view in views:
            self._members.setdefault(view.replicas, []).append(view)
        self._held = [replicas for replicas in self._members if any(one.stage is Stage.DIFFUSE for one in replicas)]
        self.num_workers = sum(len(self._members[replicas]) for replicas in self._held)
        self._index = {replicas: index for index, replicas in enumerate(self._held)}
        self._widest = [_find_widest(self._members[replicas]) for replicas in self._held]
        self._decoders: list[list[float]] = []
        self._places: dict[str, _ModelWorkers] = {}
        self._widest_idle: dict[str, int] = {}

    def count_workers(self, model: str) -> int:
        """The live workers that hold D of this model."""
        return sum(len(self._members[self._held[index]]) for index in self._find_place(model).pools)

    def list_shares(self, model: str) -> Mapping[str, float]:
        """The models that share workers with this one, itself too: which part of their workers these are."""
        own = set(self._find_place(model).pools)
        shares: dict[str, float] = {}
        for other in {one.model: None for index in own for one in sorted(self._held[index])}:
            shared = sum(len(self._members[self._held[i]]) for i in self._find_place(other).pools if i in own)
            if shared:
                shares[other] = shared / self.count_workers(other)
        return shares

    def find_widest(self, model: str) -> int:
        """The most workers for D of this model that a node has."""
        return self._find_place(model).widest

    def find_widest_idle(self, model: str) -> int:
        """The most idle workers with one placement that a node has for D of this model."""
        if model not in self._widest_idle:
            pools = (self._members[self._held[index]] for index in self._find_place(model).pools)
            self._widest_idle[model] = max(
                (_find_widest(view for view in pool if view.idle) for pool in pools), default=0
            )
        return self._widest_idle[model]

    def can_run(self, model: str) -> bool:
        """True when a live worker holds D of this model."""
        return bool(self._find_place(model).pools)

    def find_costs(self, spec: RequestSpec) -> RequestCosts | None:
        """The costs of a request; None where they are not known."""
        try:
            return self._book.find(spec, self._find_place(spec.model).widest)
        except ProfileError:
            return None

    def build(self, targets: Sequence[PendingRequest], load: float, rules: SharingRules) -> Rehearsal:
        """The rehearsal of all that is under way and waits, and of `targets`, which wait too or are about to come.
        Raises `ProfileError` for a target whose costs are not known."""
        names = {target.spec.request_id for target in targets}
        sampled = [
            each
            for each in self._ledger.pending.values()
            if each.spec.request_id not in names and self._is_known(each.spec)
        ]
        waiting = [self._rehearse_pending(each) for each in (*sampled, *targets)]
        pools = [
            RehearsedPool(len(self._members[replicas]), widest)
            for replicas, widest in zip(self._held, self._widest, strict=True)
        ]
        scene = RehearsalScene(self._now_s, pools, self._decoders, waiting, load=load, room=self._find_room())
        rehearsal = Rehearsal(scene, rules)
        self._add_running(rehearsal, pools)
        return rehearsal

    def _is_known(self, spec: RequestSpec) -> bool:
        return self.can_run(spec.model) and self.find_costs(spec) is not None

    def _find_room(self) -> int | None:
        """Workers that cores have room for, the busy ones too (`SharedCores`); None: all."""
        limits = {spec.node_id: spec.max_denoising for spec in self._pool.list_live() if spec.max_denoising is not None}
        return sum(limits.values()) if limits else None

    # What is under way.

    def _add_running(self, rehearsal: Rehearsal, pools: list[RehearsedPool]) -> None:
        """Takes the busy workers out of the pools until they are free."""
        accounted: set[WorkerId] = set()
        for run in self._ledger.runs.values():
            accounted.update(run.assignment.diffuse)
            if run.requests and self._is_known(run.spec):
                self._add_run(rehearsal, run, pools)
        for replicas, index in self._index.items():
            busy = [view for view in self._members[replicas] if not view.idle and view.worker_id not in accounted]
            for view in busy:
                self._take(rehearsal, pools, index, 1)
                rehearsal.add_busy(index, 1, view.free_at_s)

    def _add_run(self, rehearsal: Rehearsal, run: Run, pools: list[RehearsedPool]) -> None:
        now_s, request = self._now_s, run.requests[0]
        if run.computed:
            for each in run.requests:
                rehearsal.add_ending(each.spec.request_id, None, 0, now_s)
            return
        stages = run.plan.stages if run.plan is not None else run.legs[0].stages if run.legs else ()
        index, degree = self._find_pool(run.assignment.diffuse), len(run.assignment.diffuse)
        diffuses = Stage.DIFFUSE in stages or any(Stage.DIFFUSE in leg.stages for leg in run.legs)
        until_s = max(now_s, run.diffuse_end_s)
        for name in [each.spec.request_id for each in run.requests[1:]]:
            rehearsal.add_ending(name, None, 0, until_s)  # its batch ends together, or waits again then
        if diffuses:
            taken = self._take(rehearsal, pools, index, degree)
            if Stage.DECODE in stages:
                rehearsal.add_ending(request.spec.request_id, index, taken, until_s)
                return
            rehearsed = self._rehearse_pending(request.make_view())
            rehearsed.steps, rehearsed.encodes = max(0, request.steps_left - run.num_steps), False
            if index is not None and degree in rehearsed.costs.step_s:
                rehearsal.add_denoising(rehearsed, index, degree, until_s)
            return
        where = run.plan.workers if run.plan is not None else run.assignment.decode
        index = self._find_pool(where)
        if run.plan is not None:
            taken = self._take(rehearsal, pools, index, len(where))
            end_s = max(self._pool.free_at_s(worker, now_s) for worker in where)
            rehearsal.add_ending(request.spec.request_id, index, taken, end_s)
        else:
            rehearsed = self._rehearse_pending(request.make_view())
            end_s = rehearsal.decode_alone(rehearsed, now_s)
            rehearsal.add_ending(request.spec.request_id, None, 0, end_s)

    @staticmethod
    def _take(rehearsal: Rehearsal, pools: list[RehearsedPool], index: int | None, count: int) -> int:
        """Take workers out of a pool, until they are free."""
        if index is None:
            return 0
        pools[index].idle -= count
        rehearsal.take_room(count)
        return count

    def _find_pool(self, workers: Sequence[WorkerId]) -> int | None:
        """The pool of these workers; None where they hold no D."""
        return self._index.get(self._pool.kind(workers[0])[0]) if workers else None

    # Requests.

    def _rehearse_pending(self, pending: PendingRequest) -> Rehearsed:
        request = self._rehearse(pending.spec, pending.arrival_s, pending.deadline_s)
        request.steps = max(0, pending.spec.num_inference_steps - pending.steps_done)
        request.encodes = not pending.encoded
        return request

    def _rehearse(self, spec: RequestSpec, arrival_s: float, deadline_s: float) -> Rehearsed:
        place = self._find_place(spec.model)
        return Rehearsed(
            name=spec.request_id,
            costs=self._book.find(spec, place.widest),
            pools=place.pools,
            decodes_in=place.decodes_in,
            steps=spec.num_inference_steps,
            encodes=True,
            deadline_s=deadline_s,
            patience_s=max(0.0, deadline_s - arrival_s),
            weight=spec.weight,
            decoders=place.decoders,
            whole=spec.whole,
        )

    def _find_place(self, model: str) -> _ModelWorkers:
        if (place := self._places.get(model)) is None:
            replica, diffuse = Replica(model, Stage.DECODE), Replica(model, Stage.DIFFUSE)
            able = [
                max(self._now_s, view.free_at_s - view.promised_s)
                for replicas, members in self._members.items()
                if replica in replicas and diffuse not in replicas
                for view in members
            ]
            pools = tuple(index for replicas, index in self._index.items() if diffuse in replicas)
            place = self._places[model] = _ModelWorkers(
                pools,
                frozenset(index for index in pools if replica in self._held[index]),
                max((self._widest[index] for index in pools), default=1),
                len(self._decoders),
            )
            self._decoders.append(sorted(able))
        return place


def _find_widest(members: Iterable[WorkerView]) -> int:
    """The most of these workers that one node has."""
    nodes: defaultdict[str, int] = defaultdict(int)
    for view in members:
        nodes[view.node_id] += 1
    return max(nodes.values(), default=0)
