"""Workloads by name: those of the TridentServe paper and of related systems, as lists of requests.

Sources: TridentServe (arXiv 2510.02838, section 8.1 and appendix D.1) and the papers that the mixes name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from traces.requests import TraceRequest
from traces.workloads.arrivals import Process, draw_arrival_times, draw_diurnal
from traces.workloads.mixes import Mix, draw, load_mix
from tridentserve.errors import ConfigError

MODELS = ("sd3-medium", "flux.1-dev", "cogvideox1.5-5b", "hunyuanvideo")
LEVELS = ("light", "medium", "heavy")
# Phases of the Dynamic workload as shares of its duration: 2 to 5 minutes of the paper's 30.
_SHORTEST_PHASE, _LONGEST_PHASE = 1 / 15, 1 / 6
# The Proprietary workload sees two tides, so that load rises and falls within the trace.
_TIDES = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """A named workload."""

    name: str
    about: str
    mixes: tuple[str, ...]
    """The names of its mixes, without the model's name ahead of them where `per_model`."""
    per_model: bool = False
    """True: each model has mixes of its own, and one must be named."""

    def load_mixes(self, model: str | None = None) -> tuple[Mix, ...]:
        """Its mixes for the model. Raises `ConfigError` for a model that the workload is not for, and for none where it
        needs one."""
        if self.per_model:
            if model not in MODELS:
                given = "" if model is None else f", not {model}"
                raise ConfigError(f"the workload {self.name!r} needs a model, one of {', '.join(MODELS)}{given}")
            return tuple(load_mix(f"{model}-{mix}") for mix in self.mixes)
        mixes = tuple(load_mix(mix) for mix in self.mixes)
        models = sorted({name for mix in mixes for name in mix.models})
        if model is not None and [model] != models:
            raise ConfigError(f"the workload {self.name!r} is for {' and '.join(models)}, not {model}")
        return mixes

    def slo_scale(self, model: str | None = None) -> float | None:
        """Deadlines as a multiple of the latency of a request alone, where the workload fixes it; None: it does not."""
        return self.load_mixes(model)[0].slo_scale


def _make_registry() -> dict[str, Workload]:
    steady = [Workload(level, f"Steady {level}: a fixed rate, one mix", (level,), per_model=True) for level in LEVELS]
    return {
        workload.name: workload
        for workload in (
            *steady,
            Workload("dynamic", "random phases of Steady light, medium and heavy", LEVELS, per_model=True),
            Workload(DIURNAL, "diurnal, as many requests as Steady, the medium mix", ("medium",), per_model=True),
            Workload("tetriserve-uniform", "TetriServe: four sizes, fixed deadlines, 8 GPUs", ("tetriserve-uniform",)),
            Workload("tetriserve-skewed", "TetriServe: mostly large images, 8 GPUs", ("tetriserve-skewed",)),
            Workload("genserve", "GenServe: images and videos of two models, 8 GPUs", ("genserve",)),
            Workload("dit-serve", "DiT-Serve: videos of 20 to 120 steps, 8 GPUs", ("dit-serve",)),
            Workload("patchedserve", "PatchedServe: three sizes at 5 times their latency, 8 GPUs", ("patchedserve",)),
        )
    }


# The workload whose rate swings.
DIURNAL = "proprietary"
WORKLOADS = _make_registry()
# The duration of a trace that is asked for without one, in seconds.
DURATION_S = 1800.0


def make_workload(
    name: str,
    model: str | None = None,
    seed: int = 0,
    duration_s: float = DURATION_S,
    rate_scale: float = 1.0,
    *,
    arrivals: Process | None = None,
    cv: float = 1.0,
    deadline_scale: float = 1.0,
    num_inference_steps: int | None = None,
) -> list[TraceRequest]:
    """The requests of a workload in order of time; the same for the same arguments.

    `rate_scale` multiplies the rate, `arrivals` (with `cv` for Gamma and Weibull) replaces the arrival process,
    `deadline_scale` multiplies the deadlines that the workload fixes in seconds (no other request has one), and
    `num_inference_steps` replaces the steps. Raises `ConfigError` for what is not known or not possible.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"no workload is named {name!r}; there are: {', '.join(WORKLOADS)}")
    for argument, value in (("rate_scale", rate_scale), ("deadline_scale", deadline_scale), ("duration_s", duration_s)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{argument} must be above 0 and finite, not {value}")
    mixes = WORKLOADS[name].load_mixes(model)
    rate_per_s = rate_scale * mixes[0].rate_per_s
    rng = Random(seed)

    def process_times(mix: Mix) -> Sequence[float]:
        return draw_arrival_times(arrivals or mix.arrivals, rate_per_s, duration_s, rng.getrandbits(63), cv)

    if name == "dynamic":
        requests = _draw_dynamic(mixes, process_times(mixes[0]), duration_s, rng)
    elif name == DIURNAL and arrivals is None:
        requests = _draw_proprietary(mixes[0], rate_per_s, duration_s, rng)
    else:
        requests = draw(mixes[0], process_times(mixes[0]), rng.getrandbits(63))
    if deadline_scale == 1.0 and num_inference_steps is None:
        return requests
    return [_change_request(request, deadline_scale, num_inference_steps) for request in requests]


def _change_request(request: TraceRequest, deadline_scale: float, steps: int | None) -> TraceRequest:
    slo_ms = None if request.slo_ms is None else request.slo_ms * deadline_scale
    return replace(request, slo_ms=slo_ms, num_inference_steps=steps or request.num_inference_steps)


def _draw_dynamic(mixes: Sequence[Mix], times_s: Sequence[float], duration_s: float, rng: Random) -> list[TraceRequest]:
    """Each phase draws from one mix; the same mix never comes twice in a row, and all come before one comes again."""
    requests: list[TraceRequest] = []
    order: list[Mix] = []
    last: Mix | None = None
    start = end_s = 0.0
    taken = 0
    while end_s < duration_s:
        if not order:
            order = rng.sample(list(mixes), len(mixes))
            if order[0] is last:
                order.reverse()
        last = order.pop(0)
        start = end_s
        end_s = start + duration_s * rng.uniform(_SHORTEST_PHASE, _LONGEST_PHASE)
        phase_s = [time_s for time_s in times_s[taken:] if time_s < end_s]
        requests += draw(last, phase_s, rng.getrandbits(63), first_id=taken)
        taken += len(phase_s)
    return requests


def _draw_proprietary(mix: Mix, rate_per_s: float, duration_s: float, rng: Random) -> list[TraceRequest]:
    times_s = draw_diurnal(rate_per_s, duration_s, rng.getrandbits(63), period_s=duration_s / _TIDES)
    requests = draw(mix, times_s, rng.getrandbits(63))
    return rescale(requests, max(1, round(rate_per_s * duration_s)), rng.getrandbits(63)) if requests else []


def rescale(trace: Sequence[TraceRequest], num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """The trace with `num_requests` requests and the same pattern in time (TridentServe, appendix D.1).

    Too many are subsampled uniformly. Too few are replicated, each as often, and as many more as are wanted are drawn
    uniformly; copies are spread evenly until the next request comes, so that they make no bursts of their own. Ids are
    numbers from 0 again. Raises `ConfigError` for an empty trace or a number below 1.
    """
    if not trace or num_requests < 1:
        raise ConfigError(f"a trace of {len(trace)} requests cannot be scaled to {num_requests}")
    ordered = sorted(trace, key=lambda request: request.timestamp_s)
    copies, surplus = divmod(num_requests, len(ordered))
    counts = [copies] * len(ordered)
    for index in Random(seed).sample(range(len(ordered)), surplus):
        counts[index] += 1
    next_s = [request.timestamp_s for request in ordered[1:]] + [ordered[-1].timestamp_s]
    replicated = [
        (request, round(request.timestamp_s + copy / count * (after_s - request.timestamp_s), 6))
        for request, after_s, count in zip(ordered, next_s, counts, strict=True)
        for copy in range(count)
    ]
    return [
        replace(request, request_id=str(number), timestamp_s=time_s)
        for number, (request, time_s) in enumerate(replicated)
    ]
