"""Traces: what was asked of a service and when, as files and as named workloads, and the open-loop client that replays.

Here are requests, their files, workloads and results; the client is `traces.client.replay`, what it reports
`traces.reports.report`. Two more import lines there keep HTTP and image libraries out of planning and simulation.
Imports `tridentserve` only.
"""

from traces.formats.external import DrawnTrace, read_external
from traces.formats.ours import read_trace, write_trace
from traces.requests import TraceRequest, scale_pixels
from traces.results import ReplayResult, TimelineEntry, simulated_result
from traces.workloads.arrivals import Arrival, Phase, draw_arrival_times, draw_phases
from traces.workloads.mixes import Mix, draw, load_figure, load_mix, mix_names
from traces.workloads.named import WORKLOADS, Workload, make_workload, rescale

__all__ = [
    "WORKLOADS",
    "Arrival",
    "DrawnTrace",
    "Mix",
    "Phase",
    "ReplayResult",
    "TimelineEntry",
    "TraceRequest",
    "Workload",
    "draw",
    "draw_arrival_times",
    "draw_phases",
    "load_figure",
    "load_mix",
    "make_workload",
    "mix_names",
    "read_external",
    "read_trace",
    "rescale",
    "scale_pixels",
    "simulated_result",
    "write_trace",
]
