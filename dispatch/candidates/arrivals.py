"""The latest arrivals, and what they let a tick expect: the load that they make, and how long a segment of D may be."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from dispatch.candidates.candidate import Candidate
from dispatch.candidates.survey import TickView
from dispatch.candidates.work import Work
from dispatch.options import DispatchOptions
from tridentserve.protocols import PendingRequest

# The latest arrivals say what is to be expected; with fewer than this there is nothing to go by.
_MOST_KNOWN, _FEWEST_KNOWN = 200, 10
# What is expected changes slowly: it is kept for these seconds, and for this share of the time that it is known from.
_KEPT_S, _KEPT_SHARE = 2.0, 0.01
# A new request may wait for this share of its slack until some worker is free. Three of four have that slack at least.
_WAIT_SHARE, _TIGHTEST = 0.1, 0.25


class RecentArrival(NamedTuple):
    """A request that has arrived."""

    arrival_s: float
    """The time at which it came."""
    work: Work
    """All of its work."""
    patience_s: float
    """Seconds from then to its deadline."""


class Outlook(NamedTuple):
    """The expectations for a tick."""

    load: float
    """The GPU-seconds that the latest arrivals need at their cheapest degrees, over those that all workers of D had
    since the first of them; 0 as long as there are too few."""
    segment_s: float
    """Seconds of D after which it is decided anew who gets the workers."""


class RecentArrivals:
    """Remembers the latest arrivals."""

    def __init__(self, options: DispatchOptions) -> None:
        self._longest_s, self._least_s = options.segment_s, options.least_segment_s
        self._arrivals: deque[RecentArrival] = deque(maxlen=_MOST_KNOWN)
        self._latest_s = -math.inf
        self._outlook = Outlook(0.0, options.segment_s)
        self._outlook_s = -math.inf

    def __iter__(self) -> Iterator[RecentArrival]:
        return iter(self._arrivals)

    def note(self, pending: Collection[PendingRequest]) -> None:
        """Remember the requests that have arrived since the last call."""
        new = [request for request in pending if request.arrival_s > self._latest_s]
        for request in sorted(new, key=lambda request: (request.arrival_s, request.spec.request_id)):
            patience_s = request.deadline_s - request.arrival_s
            self._arrivals.append(RecentArrival(request.arrival_s, Work.from_spec(request.spec), patience_s))
            self._latest_s = request.arrival_s

    def measure_span_s(self, now_s: float) -> float:
        """Seconds since the first of them, of which there must be one."""
        return max(now_s - self._arrivals[0].arrival_s, 1e-3)

    def is_old(self, found_s: float, kept_s: float, now_s: float) -> bool:
        """True where something that was found at `found_s`, and is worth keeping for `kept_s`, is to be found anew, and
        enough arrivals are known."""
        if len(self._arrivals) < _FEWEST_KNOWN:
            return False
        return now_s >= found_s + max(kept_s, _KEPT_SHARE * (now_s - self._arrivals[0].arrival_s))

    def expect(self, tick: TickView) -> Outlook:
        """The outlook; as it was for a while, as it changes slowly."""
        if self.is_old(self._outlook_s, _KEPT_S, tick.now_s):
            num_workers = max(1, sum(len(node) for pool in tick.pools for node in pool.nodes))
            known = Counter(arrival.work for arrival in self._arrivals)
            candidates = {work: tick.survey(work).candidates for work in known}
            needed_s = sum(
                number * min(map(_count_gpu_seconds, candidates[work]), default=0.0) for work, number in known.items()
            )
            load = needed_s / (self.measure_span_s(tick.now_s) * num_workers)
            fastest_s = {work: min((c.run_s for c in ways), default=math.inf) for work, ways in candidates.items()}
            slacks_s = [arrival.patience_s - fastest_s[arrival.work] for arrival in self._arrivals]
            self._outlook = Outlook(load, self._choose_segment_s(slacks_s, load, num_workers))
            self._outlook_s = tick.now_s
        return self._outlook

    def _choose_segment_s(self, slacks_s: Sequence[float], load: float, num_workers: int) -> float:
        """So long that a new request waits for a share of its slack. It waits where all workers are busy, on average
        for a segment's time over one more than their number. In bursts all are busy far more often than if each were so
        by itself: the square of the load stands for that. Requests that cannot be in time anyway do not count."""
        possible_s = sorted(slack_s for slack_s in slacks_s if slack_s >= 0)
        all_busy = min(1.0, load) ** 2
        if not possible_s or not all_busy:
            return self._longest_s
        tight_s = possible_s[int(_TIGHTEST * len(possible_s))]
        wanted_s = _WAIT_SHARE * tight_s * (num_workers + 1) / all_busy
        return min(self._longest_s, max(self._least_s, wanted_s))


def _count_gpu_seconds(candidate: Candidate) -> float:
    """Those of a candidate without any waiting."""
    diffuse_s, decode_s = candidate.group.degree * candidate.diffuse_s, candidate.decode_degree * candidate.decode_s
    return candidate.encode_s + diffuse_s + decode_s
