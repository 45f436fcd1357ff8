"""Turns for requests that are long overdue, so that nothing starves and requests that can be in time lose little.

A hopeless request is worth next to nothing, so it would wait for as long as others come that can be in time; and one
that needs several workers at once might never find them idle in the same tick. So the longest overdue request goes
first, once it is overdue by many times its own runtime, and width that does not come by itself is kept for it. Under
lasting overload there is always such a request. If all of them went first, they would have all workers and everything
would be late, so their turns take a share of the workers' time only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dispatch.candidates.survey import TickView
from dispatch.candidates.values import OVERDUE
from dispatch.candidates.work import Work
from dispatch.workers.pools import make_busy
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, PendingRequest, WorkerView


@dataclass(slots=True)
class _Account:
    """The share of some pools' workers that turns of their long overdue requests may take."""

    workers: int = 0
    """The number of workers."""
    credit_s: float = 0.0
    """The worker-seconds that turns may take; below 0 after a turn, until time has made up for it."""
    held: int = 0
    """The number of idle workers that were kept at the last tick."""
    held_for: str = ""
    """The id of the request that they were kept for. Its turn goes on until it runs, whatever that costs: workers that
    are kept for a while and given away again would never come together."""
    is_asked_for: bool = False
    """False while no long overdue request of these pools waits: nothing is saved up then."""


class OverdueTurns:
    """Remembers the time that turns have taken. The requests of pools that serve the same models share an account: it
    gains a share of their workers' time, and has a turn whenever it is not in debt. So a long overdue request has its
    turn after those with earlier deadlines, and at the latest when the share has paid for theirs."""

    def __init__(self, share: float) -> None:
        """`share`: of the workers' time, 0 to 1; 0: there are no turns."""
        self._share = share
        self._accounts: dict[frozenset[str], _Account] = {}
        self._turns: dict[str, _Account] = {}
        self._seen_s = 0.0

    def choose(self, by_deadline: Sequence[PendingRequest], tick: TickView) -> list[PendingRequest]:
        """The requests whose turn it is: in each pool the one with the earliest deadline among those that are long
        overdue, if its account is not in debt. `by_deadline`: the first request of each kind of work, in order."""
        self._turns = {}
        if not self._share:
            return []
        waiting = {
            request.spec.request_id: self._find_account(request, tick)
            for request in find_longest_overdue(by_deadline, tick)
        }
        self._pass_time(waiting.values(), tick.now_s)
        self._turns = {
            name: account for name, account in waiting.items() if account.credit_s >= 0 or account.held_for == name
        }
        return [request for request in by_deadline if request.spec.request_id in self._turns]

    def hold_back(self, requests: Iterable[PendingRequest], tick: TickView) -> dict[WorkerId, WorkerView]:
        """Workers that others must not use, as others see them: those that complete the earliest group of a request
        without one count as busy until its D would end there.

        While they are held the group can only come sooner, so another node is chosen only where that is earlier yet.
        """
        held: dict[WorkerId, WorkerView] = {}
        for request in requests:
            work = Work.from_pending(request)
            if not tick.appraise(work).compute_values_at(OVERDUE):
                earliest = min(
                    tick.survey(work).candidates,
                    key=lambda candidate: (candidate.earliest_start_s, candidate.group.degree, candidate.group.pool),
                )
                until_s = earliest.diffuse_end_s(earliest.earliest_start_s)
                members = tick.pools[earliest.group.pool].find_first_free(earliest.group.degree, tick.now_s)
                account = self._turns[request.spec.request_id]
                account.held, account.held_for = sum(worker.idle for worker in members), request.spec.request_id
                held.update({worker.worker_id: make_busy(worker, until_s) for worker in members})
        return held

    def note(self, assignments: Iterable[Assignment], now_s: float) -> None:
        """Charges the turns that were taken."""
        if not self._turns:
            return
        for each in assignments:
            if (account := self._turns.get(each.request_ids[0])) is not None:
                account.credit_s -= len(each.diffuse) * (each.expected_finish_s - now_s)
                account.held_for = ""

    def _find_account(self, request: PendingRequest, tick: TickView) -> _Account:
        candidates = tick.survey(Work.from_pending(request)).candidates
        pools = [tick.pools[index] for index in {candidate.group.pool for candidate in candidates}]
        models = frozenset(model for pool in pools for model in pool.types)
        account = self._accounts.setdefault(models, _Account())
        account.workers = len({worker.worker_id for pool in pools for node in pool.nodes for worker in node})
        return account

    def _pass_time(self, waiting: Iterable[_Account], now_s: float) -> None:
        """Credits all accounts for the time since the last tick."""
        passed_s, self._seen_s = max(0.0, now_s - self._seen_s), now_s
        asked_for = {id(account) for account in waiting}
        for account in self._accounts.values():
            account.credit_s += passed_s * (self._share * account.workers - account.held)
            account.held = 0
            if not account.is_asked_for:
                account.credit_s = min(0.0, account.credit_s)
            account.is_asked_for = id(account) in asked_for


def find_longest_overdue(by_deadline: Sequence[PendingRequest], tick: TickView) -> list[PendingRequest]:
    """Find each pool's request with the earliest deadline among those that are long overdue.

    No two of them could run in the same pool, so all of those that have a group now can have it at once. The rest still
    share the workers by value. As deadlines do not change and new requests arrive with later ones, each request is the
    first after finitely many others.
    """
    chosen: list[PendingRequest] = []
    claimed: set[int] = set()
    for request in by_deadline:
        work = Work.from_pending(request)
        if tick.appraise(work).is_long_overdue(request.deadline_s):
            pools = {candidate.group.pool for candidate in tick.survey(work).candidates}
            if not pools & claimed:
                chosen.append(request)
            claimed |= pools
    return chosen
