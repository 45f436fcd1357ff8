"""Puts the explanation of a request together: what the log says, and what becomes of it when the log is run again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from deployments.explaining.rerun import Change, LogRerun
from tridentserve.engine.live.client_requests import find_request_id
from tridentserve.engine.simulated.resumed import ResumedEnd
from tridentserve.errors import RequestNotFoundError
from tridentserve.scheduling.explanation.causes import find_causes
from tridentserve.scheduling.explanation.chronicle import Chronicle, Life
from tridentserve.scheduling.explanation.explanation import (
    Cause,
    Explanation,
    Rerun,
    describe_life,
    is_close,
    rename_requests,
)
from tridentserve.scheduling.explanation.waits import list_waits, sum_blockers
from tridentserve.scheduling.explanation.wording import write_text
from tridentserve.stages import Stage

_ROUNDING_S = 1e-3
# A re-run with a change may be off by as much as one without, to the other side: a gain must be more than both.
_CERTAIN_TIMES = 2.0


def explain_by_log(chronicle: Chronicle, request_id: str, why_not_run: str) -> Explanation:
    """The explanation without re-runs. Raises `RequestNotFoundError`."""
    life = _find(chronicle, request_id)
    waits = list_waits(chronicle, life)
    told = replace(describe_life(life, waits), causes=tuple(find_causes(chronicle, life, waits)), not_run=why_not_run)
    return _word(told)


def explain(log: LogRerun, request_id: str, limit_s: float) -> Explanation:
    """The explanation, for a request that was late with re-runs, none of which begins after `limit_s` seconds. Raises
    `RequestNotFoundError`."""
    life = _find(log.chronicle, request_id)
    if not life.is_late:
        why = "it was on time" if life.outcome == "finished" else "only requests that were late are"
        return explain_by_log(log.chronicle, request_id, why)
    return _Asking(log, life, time.monotonic() + limit_s).explain()


def _find(chronicle: Chronicle, request_id: str) -> Life:
    """The request with this id, of which the latest attempt is meant where clients have used it again."""
    life = chronicle.lives.get(request_id)
    if life is not None:
        return life
    attempts = [life for key, life in chronicle.lives.items() if find_request_id(key) == request_id]
    if not attempts:
        raise RequestNotFoundError("no request with this id is among the latest that are kept")
    return attempts[-1]


def _word(told: Explanation) -> Explanation:
    named = rename_requests(told, find_request_id)
    return replace(named, text=write_text(named))


def _rank(cause: Cause) -> tuple[bool, float]:
    gain_s = cause.without.gain_s if cause.without is not None else None
    return not cause.verified, -(gain_s or 0.0)


class _Asking:
    """The re-runs of one request. Each follows the log up to the moment before which its change changes nothing, and is
    compared with one that follows it as far and changes nothing."""

    def __init__(self, log: LogRerun, life: Life, until_s: float) -> None:
        self._log = log
        self._life = life
        self._until_s = until_s
        self._is_cut_short = False
        self._ends: dict[tuple[Change, float], ResumedEnd] = {}
        self._waits = list_waits(log.chronicle, life)
        lives = log.chronicle.lives
        self._blockers = frozenset(name for name in sum_blockers(self._waits) if name in lives)
        self._from_s = self._find_start(self._blockers)
        self._others = frozenset(
            other.request_id for other in lives.values() if other is not life and _taken_in_s(other) >= self._from_s
        )

    def explain(self) -> Explanation:
        told = describe_life(self._life, self._waits)
        self._run(Change(), _taken_in_s(self._life))
        causes = [self._check(cause) for cause in find_causes(self._log.chronicle, self._life, self._waits)]
        what_ifs = list(self._ask_further())
        # Of those that changed nothing, the one that is furthest off the log: the others are no worse.
        unchanged = [self._compare("", end, None) for (change, _), end in self._ends.items() if change == Change()]
        baseline = max(unchanged, key=lambda rerun: abs(self._deviate(rerun) or 0.0))
        deviation_s = self._deviate(baseline)
        told = replace(
            told,
            causes=tuple(sorted(causes, key=_rank)),
            what_ifs=tuple(what_ifs),
            baseline=baseline,
            deviation_s=deviation_s,
            is_close=None if deviation_s is None else is_close(deviation_s, told.latency_s or 0.0),
            not_run="with further changes, as the time was up" if self._is_cut_short else "",
        )
        return _word(told)

    def _check(self, cause: Cause) -> Cause:
        since_s = self._from_s
        match cause.kind:
            case "request":
                assert cause.request_id is not None
                change = Change(without=frozenset({cause.request_id}))
                words, since_s = f"without {find_request_id(cause.request_id)}", self._find_start(change.without)
            case "load":
                change, words = Change(without=self._others), "without any other request"
            case "order":
                change, words = Change(degree=self._degree), "first in line"
                since_s = _taken_in_s(self._life)
            case "loading":
                change, words = Change(loads_take=0.0), "with the weights in memory"
            case "overheads":
                change, words = Change(has_overheads=False), "without them"
            case "own time":
                change, words = Change(without=self._others), "without any other request"
        return cause.check(self._ask(words, change, since_s))

    def _ask_further(self) -> Iterator[Rerun]:
        changes: list[tuple[str, Change, float]] = []
        if len(self._blockers) > 1:
            words = f"without all {len(self._blockers)} requests that it waited for"
            changes.append((words, Change(without=self._blockers), self._from_s))
        if (worker_id := self._choose_model_worker()) is not None:
            changes.append((f"with one more worker like {worker_id}", Change(joins_like=worker_id), self._from_s))
        for degree in self._log.list_degrees(self._life.spec.model):
            if degree != self._degree:
                words = f"at degree {degree}, as soon as so many workers were free"
                changes.append((words, Change(degree=degree), _taken_in_s(self._life)))
        for each in changes:
            if (rerun := self._ask(*each)) is not None:
                yield rerun

    @property
    def _degree(self) -> int:
        """The degree at which it denoised last, or would have at least."""
        plans = [logged.plan for logged in self._life.plans if Stage.DIFFUSE in logged.plan.stages]
        return plans[-1].degree if plans else 1

    def _choose_model_worker(self) -> str | None:
        """The worker that another one like it would have helped most: the leader of its D, else any that could."""
        for logged in reversed(self._life.plans):
            if Stage.DIFFUSE in logged.plan.stages:
                return logged.plan.leader
        able = self._log.chronicle.list_able(self._life.spec.model, self._life.arrival_s)
        return min(able, default=None)

    def _find_start(self, without: frozenset[str]) -> float:
        """The time at which the first of these requests came, and this one."""
        lives = self._log.chronicle.lives
        return min(_taken_in_s(life) for life in (self._life, *(lives[name] for name in without if name in lives)))

    def _ask(self, words: str, change: Change, since_s: float) -> Rerun | None:
        if time.monotonic() > self._until_s:
            self._is_cut_short = True
            return None
        baseline = self._compare("", self._run(Change(), since_s), None)
        return self._compare(words, self._run(change, since_s), baseline)

    def _run(self, change: Change, since_s: float) -> ResumedEnd:
        key = (change, since_s)
        if key not in self._ends:
            self._ends[key] = self._log.run(self._life.request_id, since_s, change)
        return self._ends[key]

    def _compare(self, words: str, end: ResumedEnd, baseline: Rerun | None) -> Rerun:
        life = self._life
        if end.outcome != "finished" or end.end_s is None:
            return Rerun(words, None, None, False, is_certain=False)
        latency_s, gain_s, off_s = end.end_s - life.arrival_s, None, 0.0
        if baseline is not None and baseline.latency_s is not None:
            gain_s = baseline.latency_s - latency_s
            off_s = self._deviate(baseline) or 0.0
            latency_s -= off_s  # as far off as the re-run that changes nothing
        is_certain = gain_s is None or gain_s > max(_CERTAIN_TIMES * abs(off_s), _ROUNDING_S)
        slo_s = life.slo_s if life.slo_s is not None else end.slo_s
        on_time = None if slo_s is None else latency_s <= slo_s
        return Rerun(words, latency_s, gain_s, on_time, is_certain=baseline is not None and is_certain)

    def _deviate(self, baseline: Rerun) -> float | None:
        """Seconds by which a re-run without a change ends later than the log; None where one does not finish."""
        if baseline.latency_s is None or self._life.latency_s is None or self._life.outcome != "finished":
            return None
        return baseline.latency_s - self._life.latency_s


def _taken_in_s(life: Life) -> float:
    """The time at which the scheduler got a request."""
    return life.arrival_s + life.spec.waited_s
