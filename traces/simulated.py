"""Connects traces with the simulator: a trace becomes its arrivals, and their results those of a replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from traces.requests import TraceRequest
from traces.results import ReplayResult, TimelineEntry, simulated_result
from tridentserve.byte_sizes import MIB
from tridentserve.engine.simulated import RequestResult, SimulationResult, TimedRequest
from tridentserve.engine.simulated.result import FINISHED, UNFINISHED
from tridentserve.errors import ConfigError, ProfileError
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import Stage


def make_arrivals(
    requests: Sequence[TraceRequest], profiled: Sequence[str], model: str | None = None, speed: float = 1.0
) -> list[TimedRequest]:
    """The requests as the simulator takes them, in the same order: request i comes at `timestamp_s / speed`.

    Each asks for `model`, else for what its row names, else for the only profiled one. Raises `ConfigError`, with the
    profiled models, when that leaves the model open or names another one.
    """
    known = ", ".join(profiled)
    arrivals = []
    for request in requests:
        name = model or request.model or (profiled[0] if len(profiled) == 1 else None)
        if name is None:
            raise ConfigError(f"request {request.request_id} names no model: choose one with --model ({known})")
        if name not in profiled:
            raise ConfigError(f"the model {name!r} is not profiled; choose one with --model ({known}), or profile it")
        arrivals.append((request.timestamp_s / speed, _make_spec(request, name)))
    return arrivals


def _make_spec(request: TraceRequest, model: str) -> RequestSpec:
    return RequestSpec(
        request.request_id,
        model,
        Shape(request.height, request.width, request.num_frames),
        request.num_inference_steps,
        slo_s=None if request.slo_ms is None else request.slo_ms / 1000,
        priority=request.priority or 0,
        on_late=request.on_late or "wait",
        quality=request.quality or "exact",
        # A profile does not say which models have qualities: all are simulated as if they had.
        cheaper_quality="fast" if request.on_late == "degrade" else None,
    )


def check_profiled(arrivals: Sequence[TimedRequest], times: StageTimes) -> None:
    """Raises `ProfileError`, with the first request at fault and what to profile, when a size is not covered."""
    seen: set[tuple[str, Shape]] = set()
    for _, spec in arrivals:
        if (spec.model, spec.shape) in seen:
            continue
        seen.add((spec.model, spec.shape))
        for stage in Stage:
            try:
                times.optimal_degree(spec.model, stage, spec.shape)
            except ProfileError as error:
                raise ProfileError(f"request {spec.request_id}: {error}") from None


def make_results(requests: Sequence[TraceRequest], simulation: SimulationResult) -> list[ReplayResult]:
    """The result of each request, in the order of the trace. `simulation` has the arrivals of these requests, and
    kept its plans."""
    ended = {result.spec.request_id: result for result in simulation.requests}
    peak_bytes: defaultdict[str, int] = defaultdict(int)
    for plan in simulation.plans:
        for request_id in plan.request_ids:
            peak_bytes[request_id] = max((peak_bytes[request_id], *plan.used_bytes))
    return [
        _make_result(request, ended[request.request_id], peak_bytes[request.request_id], simulation.duration_s)
        for request in requests
    ]


def _make_result(request: TraceRequest, ended: RequestResult, peak_bytes: int, duration_s: float) -> ReplayResult:
    end_s = duration_s if ended.end_s is None else ended.end_s
    result = simulated_result(
        request,
        ended.spec.model,
        max(0.0, end_s - ended.arrival_s),
        error=_describe_error(ended),
        error_code=None if ended.outcome in (FINISHED, UNFINISHED) else ended.outcome,
        slo_s=ended.slo_s,
        queue_s=None if ended.start_s is None else ended.start_s - ended.arrival_s,
        peak_memory_mb=peak_bytes / MIB if peak_bytes else None,
        predicted_s=ended.predicted_s,
        reduced_steps=ended.reduced_steps,
        quality=ended.quality,
        timeline=[
            TimelineEntry(
                stage=run.stage.value,
                workers=run.workers,
                degree=len(run.workers),
                start_s=run.start_s,
                end_s=run.end_s,
                steps=run.steps,
            )
            for run in ended.timeline
        ],
    )
    return replace(result, sent_s=ended.arrival_s)


def _describe_error(ended: RequestResult) -> str | None:
    if ended.outcome == FINISHED:
        return None
    if ended.outcome == UNFINISHED:
        return "unfinished: it had no result at the end of the simulation"
    return ended.error or ended.outcome
