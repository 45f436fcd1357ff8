"""The simulated engine: discrete events and a table of stage times, driven by the scheduler's effects.

`SimulatedEngine(...).run(arrivals)` answers in seconds what hours of serving on a cluster would show.
"""

from tridentserve.engine.simulated.engine import SimulatedEngine, TimedRequest
from tridentserve.engine.simulated.options import FailingWorker, SimulationOptions, WorkerFailure
from tridentserve.engine.simulated.result import Counts, PlanRecord, RequestResult, SimulationResult

__all__ = [
    "Counts",
    "FailingWorker",
    "PlanRecord",
    "RequestResult",
    "SimulatedEngine",
    "SimulationOptions",
    "SimulationResult",
    "TimedRequest",
    "WorkerFailure",
]
