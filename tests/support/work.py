"""Counts the work of a call in calls of functions, not in seconds: the machine may do anything else meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls_in(work: Callable[[], object]) -> int:
    """Calls of Python functions (also those of comprehensions and generators) that `work` makes in this thread."""
    count = 0

    def on_event(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
