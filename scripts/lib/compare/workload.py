"""The traces of a comparison: what a small machine can serve, at a given share of what it can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deployments.assembly.options import make_service_options
from deployments.config.app import AppArgs
from lib.compare.calibration import Calibration
from lib.compare.samples import StagePoint
from traces.requests import TraceRequest
from traces.workloads.arrivals import Process, draw_arrival_times
from traces.workloads.mixes import Mix, MixShape, draw
from tridentserve.errors import ConfigError
from tridentserve.stages import Stage

# Name, arrivals, coefficient of variation, and the weights of the sizes, smallest first.
_TRACES: tuple[tuple[str, Process, float, tuple[float, ...]], ...] = (
    ("even", "constant", 1.0, (1.0, 1.0, 1.0)),
    ("poisson", "poisson", 1.0, (2.0, 2.0, 1.0)),
    ("bursty", "gamma", 2.0, (1.0, 2.0, 3.0)),
)


def limit_to_cores(args: AppArgs) -> AppArgs:
    """The service with the most workers that may denoise at once written down, as its workers on this machine find it
    by themselves."""
    most = make_service_options(args).worker.count_denoising()
    return args.model_copy(update={"cluster": args.cluster.model_copy(update={"max_denoising": most})})


def make_traces(
    model: str,
    sides: Sequence[int],
    num_steps: int,
    num_requests: int,
    load: float,
    num_diffuse: int,
    calibration: Calibration,
    seed: int,
) -> dict[str, list[TraceRequest]]:
    """The traces by name. Each has its own rate: `load` times what at most `num_diffuse` workers can do at once, by the
    calibration. Raises `ConfigError` when that does not know what a size takes on one worker."""
    traces = {}
    for number, (name, process, cv, weights) in enumerate(_TRACES):
        shapes = tuple(
            MixShape(height=side, width=side, weight=weight)
            for side, weight in zip(sorted(sides), weights, strict=True)
        )
        rate = (
            load
            * _estimate_capacity(calibration.slowdown, num_diffuse)
            / _estimate_work_s(shapes, model, num_steps, calibration)
        )
        mix = Mix(
            name=name,
            about="a comparison of simulator and service",
            model=model,
            num_inference_steps=num_steps,
            rate_per_s=rate,
            num_gpus=num_diffuse,
            gpu="cpu",
            load=load,
            shapes=shapes,
        )
        times_s = _draw_first(process, rate, num_requests, seed + number, cv)
        traces[name] = [replace(r, seed=int(r.request_id)) for r in draw(mix, times_s, seed + number)]
    return traces


def _estimate_capacity(slowdown: Sequence[float], num_diffuse: int) -> float:
    """Requests' worth of work per second that workers do together which slow each other down."""
    return max(n / factor for n, factor in enumerate(slowdown[:num_diffuse], start=1))


def _estimate_work_s(shapes: Sequence[MixShape], model: str, num_steps: int, calibration: Calibration) -> float:
    """Seconds of a worker per request, on average."""

    def estimate_shape_s(shape: MixShape) -> float:
        calls = {Stage.ENCODE: 1, Stage.DIFFUSE: num_steps, Stage.DECODE: 1}
        points = {stage: StagePoint(model, stage, shape.shape, 1) for stage in calls}
        if missing := [point for point in points.values() if point not in calibration.stage_s]:
            raise ConfigError(f"the service ran no {missing[0].stage} of {shape.shape} on one worker; raise --rounds")
        return sum(count * calibration.stage_s[points[stage]] for stage, count in calls.items())

    return sum(shape.weight * estimate_shape_s(shape) for shape in shapes) / sum(shape.weight for shape in shapes)


def _draw_first(process: Process, rate: float, number: int, seed: int, cv: float) -> list[float]:
    """The times of the first `number` arrivals."""
    duration_s = 2.0 * number / rate
    while len(times_s := list(draw_arrival_times(process, rate, duration_s, seed, cv))) < number:
        duration_s *= 2.0
    return times_s[:number]
