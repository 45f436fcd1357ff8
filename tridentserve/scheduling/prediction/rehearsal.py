"""A rehearsal: what workers would do from now on, if the policy did as the default one does, event by event.

It is coarser than a policy. It knows the number of idle workers of each placement, not which of them share a node; it
cuts D into a few segments, not into as many as the policy does; and the idle workers of a moment go to the requests
where each is worth most, as the default policy's program decides (docs/policy.md), but chosen greedily. Nothing arrives
in it: some sequence of arrivals is mostly another one than that which comes, and what later ones cost those that wait
is learned (`experience`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from tridentserve.scheduling.prediction.degrees import appraise_ways, find_asked_efficiency, list_ways
from tridentserve.scheduling.prediction.experience import LEAST_ESTIMATE_S, Estimate
from tridentserve.scheduling.prediction.scene import RehearsalScene, Rehearsed, SharingRules

# What is left of D is rehearsed in segments of about this part of it, or of a second where that is longer.
_SEGMENTS = 4
_SECOND_S = 1.0
# More requests than there are idle workers, and a few, are not looked at in one moment.
_MORE = 4
# As in the default policy's values (`dispatch.candidates.values`).
_LEAST_S = 1e-6
# No rehearsal has more events.
_MOST_EVENTS = 250


class Rehearsal:
    """One rehearsal; it uses its scene up."""

    def __init__(self, scene: RehearsalScene, rules: SharingRules) -> None:
        self._scene = scene
        self._rules = rules
        self._asked = find_asked_efficiency(scene.load, rules.min_efficiency)
        self._number = 0
        self.ends_s: dict[str, float] = {}
        """The end of each request that has ended so far."""
        self.starts_s: dict[str, float] = {}
        """The time at which each request that waited got workers first."""
        patience_s = [each.patience_s for each in scene.waiting]
        self._horizon_s = max(_LEAST_S, rules.horizon * (sum(patience_s) / len(patience_s) if patience_s else 1.0))
        widest = max((pool.widest for pool in scene.pools), default=1)
        self._is_calm = all(each.best_finish_s(scene.now_s, widest) <= each.deadline_s for each in scene.waiting)
        self.is_cut_short = False
        """True when there were too many events: the ends of the rest are not known."""

    # What is under way when the rehearsal begins.

    def add_busy(self, pool: int, count: int, until_s: float) -> None:
        """Workers that do something else until then."""
        self._enter(until_s, lambda _: self._free(pool, count))

    def add_denoising(self, request: Rehearsed, pool: int, degree: int, until_s: float) -> None:
        """A request whose segment of D ends then, with `steps` left."""
        self._enter(until_s, lambda at_s: self._end_segment(request, pool, degree, at_s))

    def add_ending(self, name: str, pool: int | None, count: int, until_s: float) -> None:
        """A request that ends then, and its workers of a pool, if these are in one."""

        def end(at_s: float) -> None:
            self.ends_s[name] = at_s
            if pool is not None:
                self._free(pool, count)

        self._enter(until_s, end)

    def take_room(self, count: int) -> None:
        """Workers denoise, or decode where they could denoise, until they are free."""
        if self._scene.room is not None:
            self._scene.room -= count

    def run(self, names: Iterable[str]) -> None:
        """Rehearse until all of these have ended."""
        scene, wanted = self._scene, set(names)
        self._assign(scene.now_s)
        num_events = 0
        while scene.events and not wanted <= self.ends_s.keys():
            at_s, _, happen = heappop(scene.events)
            happen(at_s)
            num_events += 1
            while scene.events and scene.events[0][0] <= at_s:
                heappop(scene.events)[2](at_s)
            if num_events > _MOST_EVENTS:
                self.is_cut_short = True
                return
            self._assign(at_s)

    def estimate(self, name: str) -> Estimate | None:
        """The estimate for a request, if its end is known."""
        if (end_s := self.ends_s.get(name)) is None:
            return None
        now_s = self._scene.now_s
        return Estimate.of_rehearsal(max(LEAST_ESTIMATE_S, end_s - now_s), self.starts_s.get(name, now_s) - now_s)

    # Events.

    def _enter(self, at_s: float, happen: Callable[[float], None]) -> None:
        self._number += 1
        heappush(self._scene.events, (max(at_s, self._scene.now_s), self._number, happen))

    def _free(self, pool: int, count: int) -> None:
        self._scene.pools[pool].idle += count
        if self._scene.room is not None:
            self._scene.room += count

    def _end_segment(self, request: Rehearsed, pool: int, degree: int, at_s: float) -> None:
        if request.steps > 0:
            self._free(pool, degree)
            self._scene.waiting.append(request)
        elif pool in request.decodes_in:
            width, decode_s = request.costs.decode[degree]
            self._free(pool, degree - width)
            self.add_ending(request.name, pool, width, at_s + decode_s)
        else:
            self._free(pool, degree)
            self.ends_s[request.name] = self.decode_alone(request, at_s)

    def decode_alone(self, request: Rehearsed, at_s: float) -> float:
        """The end of a C that is due at `at_s` on the first worker of its queue."""
        queue = self._scene.decoders[request.decoders]
        start_s = max(at_s, queue[0]) if queue else at_s
        end_s = start_s + request.costs.decode_alone_s
        if queue:
            heapreplace(queue, end_s)
        return end_s

    # Idle workers go to requests.

    def _assign(self, now_s: float) -> None:
        scene = self._scene
        idle = sum(pool.idle for pool in scene.pools)
        if scene.room is not None:
            idle = min(idle, scene.room)
        if idle <= 0 or not scene.waiting:
            return
        looked_at = self._choose_first(idle + _MORE, now_s)
        given = self._share(looked_at, now_s)
        if not given:
            return
        started: set[int] = set()
        for number, (pool, degree) in given.items():
            self._start(looked_at[number], pool, degree, now_s)
            started.add(id(looked_at[number]))
        scene.waiting = [each for each in scene.waiting if id(each) not in started]

    def _choose_first(self, most: int, now_s: float) -> list[Rehearsed]:
        """The requests that workers go to first: those that can be in time by deadline, then the others, short ones
        first."""
        waiting = self._scene.waiting
        if len(waiting) <= most:
            return waiting
        waiting.sort(key=_by_deadline)
        widest = max(pool.widest for pool in self._scene.pools)
        chosen: list[Rehearsed] = []
        late: list[Rehearsed] = []
        for request in waiting:
            request.is_late = request.is_late or request.best_finish_s(now_s, widest) > request.deadline_s
            (late if request.is_late else chosen).append(request)
            if len(chosen) == most:
                return chosen
        late.sort(key=lambda each: each.costs.least_gpu_seconds(each.steps, each.encodes))
        return chosen + late[: most - len(chosen)]

    def _share(self, requests: Sequence[Rehearsed], now_s: float) -> dict[int, tuple[int, int]]:
        """The pool and the degree of each request that gets workers: where the next workers add most value for each of
        them, they go."""
        scene = self._scene
        values = [self._list_values(request, now_s) for request in requests]
        gains: list[tuple[float, int, int]] = []
        for number, ways in enumerate(values):
            if (step := _find_best_step(ways, 0, 0.0)) is not None:
                gains.append((-step[0], number, step[1]))
        heapify(gains)
        given: dict[int, tuple[int, int]] = {}
        while gains:
            _, number, degree = heappop(gains)
            pool, had = given.get(number, (-1, 0))
            if pool < 0:
                pool = max(requests[number].pools, key=lambda index: scene.pools[index].idle, default=-1)
                if pool < 0:
                    continue
            more = degree - had
            fits = scene.pools[pool].idle >= more and degree <= scene.pools[pool].widest
            if not fits or (scene.room is not None and scene.room < more):
                # A step that does not fit may leave room for a smaller one.
                narrower = [way for way in values[number] if way[0] < degree]
                value = next((worth for k, worth in values[number] if k == had), 0.0)
                if (step := _find_best_step(narrower, had, value)) is not None:
                    heappush(gains, (-step[0], number, step[1]))
                continue
            scene.pools[pool].idle -= more
            if scene.room is not None:
                scene.room -= more
            given[number] = pool, degree
            value = next(worth for k, worth in values[number] if k == degree)
            if (step := _find_best_step(values[number], degree, value)) is not None:
                heappush(gains, (-step[0], number, step[1]))
        return given

    def _list_values(self, request: Rehearsed, now_s: float) -> list[tuple[int, float]]:
        """The value of each degree that the request may use now (`dispatch.candidates.values.Appraisal`)."""
        pools, costs = self._scene.pools, request.costs
        widest = max((pools[index].widest for index in request.pools), default=0)
        if not (ways := list_ways(costs, request.steps, request.encodes, widest)):
            return []
        left_s = request.deadline_s - now_s
        possible = appraise_ways(ways, costs.optimal, left_s, self._rules.spare, self._asked)
        if possible.is_hopeless:
            urgency = self._rules.hopeless / (1 + math.log1p(possible.least_gpu_seconds))
        elif self._is_calm:
            urgency = possible.least_gpu_seconds * math.exp(-left_s / self._horizon_s)
        else:
            urgency = math.exp(-max(0.0, left_s - possible.best_s) / self._horizon_s)
        weighed = request.weight * urgency
        return [(way.degree, weighed * way.degree / max(_LEAST_S, way.gpu_seconds)) for way in possible.allowed]

    def _start(self, request: Rehearsed, pool: int, degree: int, now_s: float) -> None:
        self.starts_s.setdefault(request.name, now_s)
        step_s = request.costs.step_s[degree]
        steps = request.steps
        if step_s > 0 and steps * step_s > _SECOND_S and not request.whole:
            steps = min(steps, max(1, round(_SECOND_S / step_s), math.ceil(request.steps / _SEGMENTS)))
        seconds = request.costs.denoise_s(degree, steps, request.encodes)
        request.steps -= steps
        request.encodes = False
        self.add_denoising(request, pool, degree, now_s + seconds)


def _find_best_step(ways: Sequence[tuple[int, float]], degree: int, value: float) -> tuple[float, int] | None:
    """The wider degree that adds most value for each further worker, with that value; None where none adds any."""
    best: tuple[float, int] | None = None
    for wider, worth in ways:
        if wider > degree and worth > value:
            gain = (worth - value) / (wider - degree)
            if best is None or gain > best[0]:
                best = gain, wider
    return best


def _by_deadline(request: Rehearsed) -> tuple[float, str]:
    return request.deadline_s, request.name
