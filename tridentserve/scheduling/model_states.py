"""Models that come and go while the service runs: which of them take requests, drain, or have left."""

from __future__ import annotations

from enum import StrEnum

from tridentserve.scheduling import events as ev
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.workers.worker_pool import WorkerPool


class _Leaving(StrEnum):
    """State of a model that takes no new requests, named after the event that it waits for."""

    LAST_REQUEST = "last_request"  # it drains; some of its requests have not ended
    REMOVAL = "removal"  # drained: weights and placement are still there
    LAST_PLAN = "last_plan"  # removed; workers still have plans of it, which stop
    RETURN = "return"  # removed, and nothing of it is left


class ModelStates:
    """A model that is not in here is served, as far as the placement holds it.

    A model usually drains before it is removed. `remove` alone ends its requests under way; `add` takes it back at any
    time."""

    def __init__(self, ledger: Ledger, pool: WorkerPool) -> None:
        self._ledger = ledger
        self._pool = pool
        self._leaving: dict[str, _Leaving] = {}

    def find_refusal(self, request_id: str, model: str) -> ev.Reject | None:
        """The refusal of a new request whose model is leaving or has left; None for other models."""
        match self._leaving.get(model):
            case None:
                return None
            case _Leaving.LAST_REQUEST | _Leaving.REMOVAL:
                return ev.Reject(request_id, "model_unavailable", f"{model} is being drained: it takes no new requests")
            case _:
                return ev.Reject(request_id, "model_not_found", f"{model} has been removed: it is not served any more")

    def add(self, model: str) -> None:
        self._leaving.pop(model, None)

    def drain(self, model: str) -> None:
        """Has no effect on a model that drains already or is gone."""
        self._leaving.setdefault(model, _Leaving.LAST_REQUEST)

    def remove(self, model: str) -> list[ev.Effect]:
        """Ends its unfinished requests."""
        if self._leaving.get(model) not in (_Leaving.LAST_PLAN, _Leaving.RETURN):
            self._leaving[model] = _Leaving.LAST_PLAN
        effects: list[ev.Effect] = []
        for request in [one for one in self._ledger.requests.values() if one.spec.model == model]:
            why = f"{model} was removed before the request had ended"
            effects += self._ledger.cancel(request, "model_unavailable", why)
        return effects

    def take_due(self) -> list[ev.Effect]:
        """Effects for the engine, each once: the last request of a draining model has ended, or no worker runs anything
        of a removed model any more."""
        effects: list[ev.Effect] = []
        for model, waits_for in self._leaving.items():
            if waits_for is _Leaving.LAST_REQUEST and not self._ledger.has_requests_of(model):
                self._leaving[model] = _Leaving.REMOVAL
                effects.append(ev.Drained(model, "its last request has ended"))
            elif waits_for is _Leaving.LAST_PLAN and not self._ledger.has_plans_of(model):
                self._leaving[model] = _Leaving.RETURN
                self._pool.unload(model)
                effects.append(ev.Unload(model, "no worker runs anything of it any more"))
        return effects
