"""Traces: what was asked of a service and when, as files and as named workloads, and the open-loop client that replays.

Here are requests, their files, workloads and results; the client is `traces.replay`, what it reports `traces.report`.
Two more import lines there keep HTTP and image libraries out of planning and simulation. Imports `tridentserve` only.
"""

from traces.arrivals import Arrival, Phase, arrival_times, phases
from traces.external import DrawnTrace, read_external
from traces.formats import read_trace, write_trace
from traces.mixes import Mix, draw, load_figure, load_mix, mix_names
from traces.requests import TraceRequest, scale_pixels
from traces.results import ReplayResult, StageSpan, simulated_result
from traces.workloads import WORKLOADS, Workload, make_workload, rescale

__all__ = [
    "WORKLOADS",
    "Arrival",
    "DrawnTrace",
    "Mix",
    "Phase",
    "ReplayResult",
    "StageSpan",
    "TraceRequest",
    "Workload",
    "arrival_times",
    "draw",
    "load_figure",
    "load_mix",
    "make_workload",
    "mix_names",
    "phases",
    "read_external",
    "read_trace",
    "rescale",
    "scale_pixels",
    "simulated_result",
    "write_trace",
]
