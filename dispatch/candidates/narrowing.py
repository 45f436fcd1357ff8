"""How narrow requests may run: the more work waits, the narrower, since narrow runs cost fewer GPU-seconds.

With little to do width is free and gives the shortest latency; with much to do the requests that wait pay for it.
"""

from __future__ import annotations

from dispatch.candidates.classes import Waiting
from dispatch.candidates.tick_view import TickView
from dispatch.options import RewardOptions


def choose_narrowing(waiting: Waiting, tick: TickView, options: RewardOptions) -> int:
    """The number by which optimal degrees may be divided now: `options.narrowing` under pressure, else half of it.

    The pressure is the time that all primaries together need for D of what waits, at the optimal degrees, over the mean
    slack of what can still be in time.
    """
    gpu_seconds, slack_s, in_time = 0.0, 0.0, 0
    for work, requests in waiting.items():
        efficient = [candidate for candidate in tick.survey(work).candidates if candidate.efficient]
        best = max(efficient, key=lambda candidate: candidate.group.degree, default=None)
        if best is None:
            continue
        gpu_seconds += len(requests) * best.group.degree * best.diffuse_s
        for request in requests:
            slack = request.deadline_s - tick.now_s - best.run_s
            if slack > 0:
                slack_s += slack
                in_time += 1
    primaries = sum(len(node) for pool in tick.pools for node in pool.nodes)
    is_pressed = not in_time or gpu_seconds / primaries >= options.pressure * slack_s / in_time
    return options.narrowing if is_pressed else max(1, options.narrowing // 2)
