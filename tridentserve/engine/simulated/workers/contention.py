"""Workers of a node that share what they compute on, as CPU workers share its cores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.workers.devices import PlanRun


class Contention:
    """Stretches the stages of all plans of a node while several of its workers compute.

    When n workers compute at once, everything takes `slowdown[n - 1]` times as long as alone; plans on several workers,
    which wait for each other at every layer, `wide_slowdown[n - 1]` times. With more workers than that the last entry
    counts, in proportion: what they share is used up by then.
    """

    def __init__(
        self,
        agenda: Agenda,
        slowdown: Sequence[float],
        wide_slowdown: Sequence[float],
        enter_end: Callable[[PlanRun, float], None],
    ) -> None:
        """`enter_end` moves the end of a plan in the agenda. Without `wide_slowdown`, `slowdown` is for all plans."""
        self._agenda = agenda
        self._slowdown = slowdown
        self._wide_slowdown = wide_slowdown or slowdown
        self._enter_end = enter_end
        self._computing: defaultdict[str, dict[int, PlanRun]] = defaultdict(dict)
        self._workers: Counter[str] = Counter()

    def begin(self, run: PlanRun, version: int) -> None:
        """A plan has its weights and inputs, and computes from now on; its spans are those of a plan alone."""
        if run.version != version:
            return
        node = run.devices[0].spec.node_id
        self._change(node, len(run.devices))
        self._computing[node][run.plan.plan_id] = run
        self._stretch(run, self._compute_factor(node, run))

    def end(self, run: PlanRun) -> None:
        """A plan computes no more, if it did."""
        node = run.devices[0].spec.node_id
        if self._computing[node].pop(run.plan.plan_id, None) is not None:
            self._change(node, -len(run.devices))

    def _compute_factor(self, node: str, run: PlanRun) -> float:
        slowdown = self._wide_slowdown if len(run.devices) > 1 else self._slowdown
        workers, known = self._workers[node], len(slowdown)
        if workers == 0:
            return 1.0
        return slowdown[workers - 1] if workers <= known else slowdown[-1] * workers / known

    def _change(self, node: str, workers: int) -> None:
        runs = list(self._computing[node].values())
        before = [self._compute_factor(node, run) for run in runs]
        self._workers[node] += workers
        for run, factor in zip(runs, before, strict=True):
            ratio = self._compute_factor(node, run) / factor
            if ratio != 1.0:
                self._stretch(run, ratio)

    def _stretch(self, run: PlanRun, ratio: float) -> None:
        """The rest of a plan takes `ratio` times as long from now on."""
        now_s = self._agenda.now_s

        def moved(time_s: float) -> float:
            return time_s if time_s <= now_s else now_s + ratio * (time_s - now_s)

        run.spans = tuple(replace(s, start_s=moved(s.start_s), end_s=moved(s.end_s)) for s in run.spans)
        self._enter_end(run, moved(run.end_s))
