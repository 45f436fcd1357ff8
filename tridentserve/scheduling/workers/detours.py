"""Requests that go round workers: those on which they have failed, as long as others could run them.

A policy knows nothing of this. It decides first about requests that are kept away from workers, as if these were lost,
and then about all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tridentserve.plans import WorkerId
from tridentserve.protocols import Dispatcher, PendingRequest
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.events import Effect
from tridentserve.scheduling.workers.fault_watch import FaultWatch
from tridentserve.scheduling.workers.worker_pool import WorkerPool

_NOBODY: frozenset[WorkerId] = frozenset()
_Kind = tuple[str, Shape, int]


class Detours:
    """Divides the requests of a tick by the workers that are hidden from the policy for them."""

    def __init__(self, pool: WorkerPool, dispatcher: Dispatcher, faults: FaultWatch) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._faults = faults
        # The live workers and the placement for which is known which kinds of requests could run without which workers.
        self._known: tuple[object, object] = (None, None)
        self._can_run: dict[tuple[_Kind, frozenset[WorkerId]], bool] = {}

    def release_needed(self, pending: Sequence[PendingRequest]) -> list[Effect]:
        """Give workers that were set aside plans again where no others could run a request that waits."""
        aside = frozenset(self._faults.list_aside())
        for spec in (request.spec for request in pending) if aside else ():
            if not self._can_run_without(spec, aside) and self._can_run_without(spec, _NOBODY):
                return list(self._faults.release_all("no other worker can run what waits"))
        return []

    def divide(
        self, pending: Sequence[PendingRequest]
    ) -> Iterator[tuple[Sequence[PendingRequest], frozenset[WorkerId]]]:
        """Requests with the workers that are hidden for them; those for which none is come last. Each part must have
        been dispatched before the next is asked for."""
        if not self._faults.knows_failures:
            yield pending, _NOBODY
            return
        parts: dict[frozenset[WorkerId], list[PendingRequest]] = {}
        for request in pending:
            parts.setdefault(self._find_hidden(request.spec), []).append(request)
        rest = parts.pop(_NOBODY, [])
        for hidden, requests in parts.items():
            yield requests, hidden
        if rest:
            yield rest, _NOBODY

    def _find_hidden(self, spec: RequestSpec) -> frozenset[WorkerId]:
        """The workers on which a request is not to be tried again: where it has failed, or if no others are left, where
        it has failed alone."""
        aside = frozenset(self._faults.list_aside())
        for alone in (False, True):
            shunned = self._faults.find_shunned((spec.request_id,), alone) - aside
            if shunned and self._can_run_without(spec, shunned | aside):
                return shunned
        return _NOBODY

    def _can_run_without(self, spec: RequestSpec, without: Collection[WorkerId]) -> bool:
        """True when the live workers could run such a request without some of them."""
        known = (self._pool.list_live(), self._pool.placement)
        if self._known[0] is not known[0] or self._known[1] is not known[1]:
            self._known = known
            self._can_run.clear()
        key = ((spec.model, spec.shape, spec.num_outputs), frozenset(without))
        if key not in self._can_run:
            try:
                others = self._pool.list_able_views(without)
                self._can_run[key] = bool(others) and self._dispatcher.can_ever_run(spec, others) is None
            except Exception:  # a policy that is a plug-in must not end the scheduler; its tick says what is wrong
                self._can_run[key] = False
        return self._can_run[key]
