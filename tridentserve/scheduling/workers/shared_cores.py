"""Workers that share the cores of their node: how many of them a policy may have denoise at once.

CPU workers that compute at once on too few cores make each other slower, and get less done together than as many as
there are cores for. So of such a node a policy sees D only on workers that are busy and on as many idle ones as the
cores still have room for. E and C are short, and are seen wherever they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import Dispatcher, PendingRequest, WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import Stage


class SharedCores:
    """Makes the views of the workers that a policy decides from."""

    def __init__(self, pool: WorkerPool, dispatcher: Dispatcher) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._limits: Mapping[str, int] = {}
        # The live workers and the placement that the limits, and what is kept below, hold for.
        self._known: tuple[object, object] = (None, None)
        # The kinds of requests that need more workers than there are cores for.
        self._needs_all: dict[tuple[str, Shape, int], bool] = {}
        self._without_diffuse: dict[WorkerId, tuple[WorkerView, WorkerView]] = {}
        # Where more models wait than workers can be offered, those go first that have not been offered one for longest.
        self._offered: dict[str, int] = {}
        self._turn = 0

    def list_views(
        self, pending: Sequence[PendingRequest], shunned: Collection[WorkerId] = frozenset()
    ) -> list[WorkerView]:
        """The live workers but for those `shunned`. No D is hidden while some request waits that could not run
        otherwise."""
        self._look_for_changes()
        views = self._pool.list_views()
        able = [view for view in views if view.worker_id not in shunned] if shunned else views
        if not self._limits or any(self._must_have_all(request.spec) for request in pending):
            return able
        hidden: set[WorkerId] = set()
        waiting = list(dict.fromkeys(request.spec.model for request in sorted(pending, key=_by_deadline)))
        for node_id, limit in self._limits.items():
            members = [view for view in views if view.node_id == node_id and _list_models(view)]
            room = limit - sum(not view.idle for view in members)
            idle = [view for view in members if view.idle and view.worker_id not in shunned]
            if room < len(idle):
                chosen = {view.worker_id for view in self._choose(idle, room, waiting)}
                hidden.update(view.worker_id for view in idle if view.worker_id not in chosen)
        return [self._hide_diffuse(view) if view.worker_id in hidden else view for view in able]

    def _look_for_changes(self) -> None:
        alive, placement = self._pool.list_live(), self._pool.placement
        if self._known[0] is not alive or self._known[1] is not placement:
            self._known = (alive, placement)
            self._limits = _list_limits(self._pool)
            self._needs_all.clear()
            self._without_diffuse.clear()

    def _must_have_all(self, spec: RequestSpec) -> bool:
        kind = (spec.model, spec.shape, spec.num_outputs)
        if kind not in self._needs_all:
            self._needs_all[kind] = self._dispatcher.can_ever_run(spec, self._list_few(spec.model)) is not None
        return self._needs_all[kind]

    def _list_few(self, model: str) -> list[WorkerView]:
        """All workers as if idle, with the model's D on as many as the cores of their node have room for."""
        room = dict(self._limits)
        few = []
        for view in sorted(self._pool.list_idle_views(), key=lambda view: (view.node_id, view.place)):
            if model in _list_models(view) and view.node_id in room:
                room[view.node_id] -= 1
                view = view if room[view.node_id] >= 0 else _without_diffuse(view)
            few.append(view)
        return few

    def _choose(self, idle: Sequence[WorkerView], room: int, waiting: Sequence[str]) -> Iterator[WorkerView]:
        """At most `room` of the idle workers, for each model that waits in turn (the most urgent first)."""
        held = {model: sorted((v for v in idle if model in _list_models(v)), key=_rank(model)) for model in waiting}
        models = [model for model in waiting if held[model]]
        if len(models) > room:
            models.sort(key=lambda model: self._offered.get(model, -1))
        self._turn += 1
        taken: set[WorkerId] = set()
        while len(taken) < room:
            before = len(taken)
            for model in models[: room - before]:
                view = next((view for view in held[model] if view.worker_id not in taken), None)
                if view is not None:
                    taken.add(view.worker_id)
                    self._offered[model] = self._turn
                    yield view
            if len(taken) == before:
                return

    def _hide_diffuse(self, view: WorkerView) -> WorkerView:
        """The same object as long as the view is, so that policies see that nothing has changed."""
        known = self._without_diffuse.get(view.worker_id)
        if known is None or known[0] is not view:
            known = self._without_diffuse[view.worker_id] = (view, _without_diffuse(view))
        return known[1]


def list_coreless(pool: WorkerPool) -> frozenset[WorkerId]:
    """Idle workers that hold D and cannot begin it: as many workers of their node are busy as it has cores for."""
    limits = _list_limits(pool)
    holders = [view for view in pool.list_views() if view.node_id in limits and _list_models(view)]
    busy = Counter(view.node_id for view in holders if not view.idle)
    return frozenset(view.worker_id for view in holders if view.idle and busy[view.node_id] >= limits[view.node_id])


def _list_limits(pool: WorkerPool) -> dict[str, int]:
    """The number of workers that may denoise at once, of each node that limits it."""
    return {spec.node_id: spec.max_denoising for spec in pool.list_live() if spec.max_denoising is not None}


def _list_models(view: WorkerView) -> frozenset[str]:
    """The models whose D a worker holds."""
    return frozenset(replica.model for replica in view.replicas if replica.stage is Stage.DIFFUSE)


def _without_diffuse(view: WorkerView) -> WorkerView:
    return replace(view, replicas=frozenset(one for one in view.replicas if one.stage is not Stage.DIFFUSE))


def _by_deadline(request: PendingRequest) -> tuple[float, str]:
    return request.deadline_s, request.spec.request_id


def _rank(model: str) -> Callable[[WorkerView], tuple[int, int, WorkerId]]:
    """The order in which idle workers are offered for a model: those that can do most of a request alone first."""

    def compute(view: WorkerView) -> tuple[int, int, WorkerId]:
        stages = sum(Replica(model, stage) in view.replicas for stage in Stage)
        return -stages, len(view.replicas), view.worker_id

    return compute
