"""Workers and requests for the dispatcher's tests, by short descriptions."""

from __future__ import annotations

from collections.abc import Sequence

from dispatch import DispatchOptions
from tests.profiler.synthetic import EDC_BYTES
from tridentserve.plans import Replica
from tridentserve.protocols import Assignment, ClusterView, Dispatcher, PendingRequest, WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType


def worker(
    worker_id: str,
    *held: str,
    node: str = "n0",
    free_at_s: float | None = None,
    memory_bytes: int = EDC_BYTES,
) -> WorkerView:
    """`held` are `model:type`, or a type of model `one`; `free_at_s` makes the worker busy until then. `memory_bytes`
    is its memory beyond what handoff buffer and process groups take."""
    pairs = [entry.split(":") if ":" in entry else ["one", entry] for entry in held]
    replicas = frozenset(Replica(model, stage) for model, kind in pairs for stage in PlacementType(kind).stages)
    memory_bytes += DispatchOptions().handoff_reserve_bytes
    return WorkerView(worker_id, node, memory_bytes, replicas, free_at_s is None, free_at_s or 0.0)


def workers(n: int, *held: str, node: str = "n0", first: int = 0, memory_bytes: int = EDC_BYTES) -> list[WorkerView]:
    """`n` idle workers of one kind in one node."""
    return [worker(f"{node}-w{first + i}", *held, node=node, memory_bytes=memory_bytes) for i in range(n)]


def request(
    request_id: str,
    shape: Shape,
    slo_s: float = 1000.0,
    *,
    model: str = "one",
    steps: int = 20,
    steps_done: int = 0,
    num_outputs: int = 1,
    arrival_s: float = 0.0,
    loras: tuple[str, ...] = (),
    alone: bool = False,
) -> PendingRequest:
    """A request that arrived at `arrival_s`."""
    spec = RequestSpec(request_id, model, shape, steps, num_outputs, loras=loras, alone=alone)
    return PendingRequest(spec, arrival_s, arrival_s + slo_s, steps_done, encoded=steps_done > 0)


def decide(
    dispatcher: Dispatcher, pending: Sequence[PendingRequest], views: Sequence[WorkerView], now_s: float
) -> list[Assignment]:
    """The assignments of one tick in which nothing is running that could be preempted."""
    return list(dispatcher.decide(ClusterView(now_s, pending, (), views)).assignments)
