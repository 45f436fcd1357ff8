"""Traces: what was asked of a service and when, as files, and the open-loop client that replays them.

Here are the requests and their files; the client is `traces.replay`, what it reports `traces.report`. Two more import
lines there keep HTTP and image libraries out of planning and simulation. Imports `tridentserve` only.
"""

from traces.formats import read_trace, write_trace
from traces.requests import TraceRequest, scale_pixels

__all__ = ["TraceRequest", "read_trace", "scale_pixels", "write_trace"]
