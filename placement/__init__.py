"""The Dynamic Orchestrator: which stages of which model each worker holds, from the profile and the load, or as pinned.
It plans for a load, finds the cheapest way from one plan to the next, and plans anew when the load has changed.

Pure: no I/O, no clock, no randomness.
"""

from placement.fixed import build_fixed_placement
from placement.orchestrator import Orchestrator
from placement.replanner import MonitoredReplanner, ReplanOptions
from placement.transition import align, count_moved_bytes
from tridentserve.load import LoadShare

__all__ = [
    "LoadShare",
    "MonitoredReplanner",
    "Orchestrator",
    "ReplanOptions",
    "align",
    "build_fixed_placement",
    "count_moved_bytes",
]
