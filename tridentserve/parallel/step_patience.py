"""The longest time that the members of a group wait for each other while they take the steps of a plan.

A member whose process has ended is noticed at once, as its connections break. One that hangs is noticed by those who
wait for it only, and the timeout of a group is long: while they compile, members may be far apart. Once that is over,
a member can be behind the others by little more than a step, as they wait for each other in each of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from contextlib import suppress

from tridentserve.device import WorkMark, find_device
from tridentserve.errors import GroupError
from tridentserve.parallel.groups import SequenceGroup

# A member is behind by less than a step, and a machine that is busier than before may double that.
_STEPS = 2


class StepPatience:
    """Bounds the waits of one member during the steps of one plan, once all members have done one of them: by
    `hang_timeout_s` beyond twice the slowest step of the plan so far, and never above the timeout of the group. A
    context: the timeout of the group holds again afterwards."""

    def __init__(self, group: SequenceGroup, hang_timeout_s: float, compiled: Hashable | None) -> None:
        """`compiled` names the code that the steps run, where that is compiled when it first runs: then the waits are
        bounded only in a group that has run all of it before, on all members. None where nothing is compiled."""
        self._group, self._hang_timeout_s, self._compiled = group, hang_timeout_s, compiled
        self._device = find_device(group.device)
        self._is_bounded = compiled is None or compiled in group.compiled
        self._given: deque[tuple[float, WorkMark | None]] = deque()  # steps that the device may not have done yet
        self._slowest_s = 0.0
        self._began_s: float | None = None

    def __enter__(self) -> StepPatience:
        return self

    def __exit__(self, *error: object) -> None:
        if self._slowest_s > 0:
            with suppress(GroupError):  # after an error the group is of no use any more
                self._group.limit_waits(None)

    def note_boundary(self) -> None:
        """All members are between two steps, so that the one before took as long as that of the slowest of them. It
        counts when the device has done it: on a GPU steps are launched much faster than they are computed, until its
        queue is full."""
        if not self._is_bounded:
            return
        now_s = time.monotonic()
        if self._began_s is not None:
            self._given.append((self._began_s, self._device.mark_work()))
        self._began_s = now_s
        slowest_s = self._slowest_s
        while self._given and _has_ended(self._given[0][1]):
            slowest_s = max(slowest_s, now_s - self._given.popleft()[0])
        if slowest_s > self._slowest_s:
            self._slowest_s = slowest_s
            self._group.limit_waits(self._hang_timeout_s + _STEPS * slowest_s)

    def note_all_steps(self) -> None:
        """All steps of the plan's requests, from the first to the last, have been done in this plan."""
        if self._compiled is not None:
            self._group.compiled.add(self._compiled)


def _has_ended(mark: WorkMark | None) -> bool:
    return mark is None or mark.query()
