"""Cells that nobody has tuned on: every parameter of the load and of the cluster is drawn from a seed.

Whoever tunes a policy uses seeds below `FIRST_PUBLISHED_SEED`; what is published comes from seeds that were drawn
afterwards. A cell that was drawn is described by its parameters, and its requests follow from it and the stage times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from traces.requests import TraceRequest
from traces.workloads.arrivals import Arrival, Phase, draw_diurnal, draw_gamma, draw_phases, draw_poisson
from traces.workloads.mixes import load_mix
from traces.workloads.named import LEVELS, MODELS
from tridentserve.errors import ProfileError
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.estimation.plan_estimates import stage_seconds
from tridentserve.scheduling.estimation.request_work import estimate_work
from tridentserve.stages import Stage

FIRST_PUBLISHED_SEED = 10_000
ArrivalPattern = Literal["poisson", "gamma", "diurnal", "spikes", "recorded"]

# Half of the cells have as many GPUs as most people: up to 16.
_FEW_GPUS, _MANY_GPUS = (4, 8, 16), (32, 64, 128, 256)
# Cells in which D alone takes time show the policy without the placement. All are as large as the paper's cluster.
_DIFFUSE_ONLY_SHARE, _DIFFUSE_ONLY_GPUS = 0.25, 128
_SEVERAL_MODELS_SHARE, _PHASES_SHARE = 0.3, 0.3
# A parameter of the Dirichlet distribution below 1 makes some sizes frequent and others rare.
_CONCENTRATION = 0.7
_LOADS, _DEADLINE_SCALES, _GAMMA_CVS = (0.5, 1.5), (1.5, 5.0), (0.5, 4.0)
_MAX_STEPS = 50
# Live workers were measured at up to these: the standard deviation of stage times over their mean, and the time that a
# plan costs at each of its ends.
_MAX_JITTER, _MAX_OVERHEAD_S = 0.1, 0.02
# A trace is this many times as long as a mean request takes, and has at least this many requests: what a cluster does
# that is full counts, not how it fills.
_LENGTH, _FEWEST = 25, 300
# Chance alone moves the share on time of so few requests by more than policies differ, so a cell has as many traces as
# have about this many requests together. They are as long as one would be: a longer one would be another load, with
# more that is late.
_FEWEST_JUDGED = 1000
_SPIKE_RATE, _SPIKE_SHARE = (2.0, 5.0), (0.03, 0.1)


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The requests for one model of a cell."""

    model: str
    work: float
    """Its share of the GPU-seconds."""
    num_inference_steps: int
    shapes: tuple[Shape, ...]
    weights: tuple[tuple[float, ...], ...]
    """For each phase of the trace the probability of each size."""


@dataclass(frozen=True, slots=True)
class UnseenCell:
    """The parameters of a load and of its cluster."""

    seed: int
    index: int
    gpus: int
    models: tuple[ModelLoad, ...]
    load: float
    """GPU-seconds that arrive, each request at its cheapest degrees, over those that the GPUs have."""
    pattern: ArrivalPattern
    cv: float
    """Coefficient of variation of the intervals, where `pattern` is gamma."""
    deadline_scales: tuple[float, ...]
    """A request's deadline is one of these times its latency at the optimal degrees; each is as likely."""
    diffuse_only: bool
    """E, C, transfers and loads take no time."""
    jitter: float
    """Relative standard deviation of stage times."""
    overhead_s: float
    """Seconds that a plan costs before it starts, and again after its end."""

    @property
    def name(self) -> str:
        return f"unseen-{self.seed}-{self.index}"

    @property
    def phases(self) -> int:
        """The number of mixes that follow each other, each for an equal part of the trace."""
        return len(self.models[0].weights)


def draw_cell(seed: int, index: int, has_recorded: bool = False) -> UnseenCell:
    """The cell of this number. `has_recorded`: arrivals of published traces are among the patterns."""
    rng = Random(f"unseen cell {seed} {index}")
    diffuse_only = rng.random() < _DIFFUSE_ONLY_SHARE
    gpus = rng.choice(_FEW_GPUS if rng.random() < 0.5 else _MANY_GPUS)
    patterns: tuple[ArrivalPattern, ...] = ("poisson", "gamma", "diurnal", "spikes")
    pattern = rng.choice((*patterns, "recorded") if has_recorded else patterns)
    return UnseenCell(
        seed=seed,
        index=index,
        gpus=_DIFFUSE_ONLY_GPUS if diffuse_only else gpus,
        models=_draw_models(rng),
        load=rng.uniform(*_LOADS),
        pattern=pattern,
        cv=rng.uniform(*_GAMMA_CVS),
        deadline_scales=tuple(rng.uniform(*_DEADLINE_SCALES) for _ in range(rng.randint(1, 3))),
        diffuse_only=diffuse_only,
        jitter=rng.uniform(0.0, _MAX_JITTER),
        overhead_s=rng.uniform(0.0, _MAX_OVERHEAD_S),
    )


def _draw_models(rng: Random) -> tuple[ModelLoad, ...]:
    """One model, or one of images beside one of videos."""
    phases = rng.randint(2, 4) if rng.random() < _PHASES_SHARE else 1
    if rng.random() < _SEVERAL_MODELS_SHARE:
        videos = [model for model in MODELS if _list_shapes(model)[-1].num_frames > 1]
        names = [rng.choice([model for model in MODELS if model not in videos]), rng.choice(videos)]
        share = rng.uniform(0.2, 0.8)
        return tuple(_draw_model(name, work, phases, rng) for name, work in zip(names, (share, 1 - share), strict=True))
    return (_draw_model(rng.choice(MODELS), 1.0, phases, rng),)


def _draw_model(model: str, work: float, phases: int, rng: Random) -> ModelLoad:
    mix = load_mix(f"{model}-{LEVELS[0]}")
    steps = mix.steps_of(mix.shapes[0])[0] * rng.choice((1, 1, 2, 4))
    shapes = _list_shapes(model)
    return ModelLoad(
        model, work, min(steps, _MAX_STEPS), shapes, tuple(_draw_dirichlet(len(shapes), rng) for _ in range(phases))
    )


def _list_shapes(model: str) -> tuple[Shape, ...]:
    """The sizes of the paper's mixes of a model, ascending."""
    shapes = {shape.shape for level in LEVELS for shape in load_mix(f"{model}-{level}").shapes}
    return tuple(sorted(shapes, key=lambda shape: (shape.tokens, shape.height)))


def _draw_dirichlet(size: int, rng: Random) -> tuple[float, ...]:
    parts = [rng.gammavariate(_CONCENTRATION, 1.0) for _ in range(size)]
    return tuple(part / sum(parts) for part in parts)


def make_unseen_traces(
    cell: UnseenCell, times: StageTimes, recorded: Sequence[Sequence[Arrival]]
) -> list[list[TraceRequest]]:
    """Traces of a cell, each drawn anew: as many as have about a thousand requests together. `recorded`: as in
    `make_unseen_trace`."""
    traces = [make_unseen_trace(cell, times, recorded)]
    while sum(map(len, traces)) + len(traces[0]) / 2 < _FEWEST_JUDGED:
        traces.append(make_unseen_trace(cell, times, recorded, len(traces)))
    return traces


def make_unseen_trace(
    cell: UnseenCell, times: StageTimes, recorded: Sequence[Sequence[Arrival]], number: int = 0
) -> list[TraceRequest]:
    """The requests of the trace of this number, in order of time, each with its deadline; the same for the same
    arguments. `recorded`: arrivals of published traces, one of which a cell of that pattern takes a stretch of."""
    rng = Random(f"unseen trace {cell.seed} {cell.index} {number}")
    kinds = [
        (RequestSpec("", part.model, shape, part.num_inference_steps), number)
        for number, part in enumerate(cell.models)
        for shape in part.shapes
    ]
    alone_s = [estimate_work(times, spec).seconds for spec, _ in kinds]
    gpu_seconds = [_estimate_gpu_seconds(spec, times) for spec, _ in kinds]
    weights = [_weigh_kinds(cell, phase, gpu_seconds) for phase in range(cell.phases)]
    mean_s, mean_gpu_seconds = (
        sum(sum(w * value for w, value in zip(phase, values, strict=True)) for phase in weights) / cell.phases
        for values in (alone_s, gpu_seconds)
    )
    rate_per_s = cell.load * cell.gpus / mean_gpu_seconds
    duration_s = max(_FEWEST / rate_per_s, _LENGTH * mean_s)
    requests = []
    for number, time_s in enumerate(_draw_times(cell, rate_per_s, duration_s, rng, recorded)):
        phase = min(int(time_s / duration_s * cell.phases), cell.phases - 1)
        chosen = rng.choices(range(len(kinds)), weights[phase])[0]
        spec, slo_s = kinds[chosen][0], alone_s[chosen] * rng.choice(cell.deadline_scales)
        requests.append(
            TraceRequest(
                request_id=str(number),
                timestamp_s=round(time_s, 6),
                height=spec.shape.height,
                width=spec.shape.width,
                num_frames=spec.shape.num_frames,
                prompt="a paper boat on a lake, watercolour",
                negative_prompt="",
                num_inference_steps=spec.num_inference_steps,
                slo_ms=1000 * slo_s,
                seed=number,
                model=spec.model,
            )
        )
    return requests


def _weigh_kinds(cell: UnseenCell, phase: int, gpu_seconds: Sequence[float]) -> list[float]:
    """The probability of each kind of request in a phase, in which every model has its share of the work."""
    weights: list[float] = []
    for part in cell.models:
        own = part.weights[phase]
        costs = gpu_seconds[len(weights) : len(weights) + len(own)]
        mean = sum(weight * cost for weight, cost in zip(own, costs, strict=True))
        weights += [weight * part.work / mean for weight in own]
    return [weight / sum(weights) for weight in weights]


def _estimate_gpu_seconds(spec: RequestSpec, times: StageTimes) -> float:
    """The least GPU-seconds of all stages, each at its cheapest degree."""
    return sum(min(_list_gpu_seconds(spec, stage, times)) for stage in Stage)


def _list_gpu_seconds(spec: RequestSpec, stage: Stage, times: StageTimes) -> Iterator[float]:
    for degree in times.degrees(spec.model, stage):
        try:
            yield degree * stage_seconds(times, spec, stage, degree)
        except ProfileError:
            continue  # wide sizes may be profiled at wide degrees alone


def _draw_times(
    cell: UnseenCell, rate_per_s: float, duration_s: float, rng: Random, recorded: Sequence[Sequence[Arrival]]
) -> list[float]:
    seed = rng.getrandbits(63)
    draws: dict[ArrivalPattern, Callable[[], list[float]]] = {
        "poisson": lambda: draw_poisson(rate_per_s, duration_s, seed),
        "gamma": lambda: draw_gamma(rate_per_s, duration_s, seed, cell.cv),
        "diurnal": lambda: draw_diurnal(rate_per_s, duration_s, seed, period_s=duration_s / rng.randint(1, 3)),
        "spikes": lambda: _draw_spikes(rate_per_s, duration_s, rng),
        "recorded": lambda: _cut_recorded(rng.choice(recorded), rate_per_s, duration_s, rng),
    }
    return draws[cell.pattern]()


def _draw_spikes(rate_per_s: float, duration_s: float, rng: Random) -> list[float]:
    """Poisson arrivals whose rate rises to a multiple of itself a few times, with the same mean."""
    spikes = [(rng.uniform(*_SPIKE_RATE), duration_s * rng.uniform(*_SPIKE_SHARE)) for _ in range(rng.randint(1, 4))]
    calm_s = duration_s - sum(length_s for _, length_s in spikes)
    base_per_s = rate_per_s * duration_s / (calm_s + sum(rise * length_s for rise, length_s in spikes))
    phases = []
    for rise, length_s in spikes:
        phases += [Phase(calm_s / len(spikes), base_per_s), Phase(length_s, rise * base_per_s)]
    return draw_phases(phases, rng.getrandbits(63))


def _cut_recorded(arrivals: Sequence[Arrival], rate_per_s: float, duration_s: float, rng: Random) -> list[float]:
    """As many arrivals in a row as the rate asks for, or all, from a random one on. Their times are stretched to the
    duration, which keeps their pattern."""
    number = min(round(rate_per_s * duration_s), len(arrivals) - 1)
    first = rng.randrange(len(arrivals) - number)
    start_s, end_s = arrivals[first].time_s, arrivals[first + number].time_s
    return [
        (arrival.time_s - start_s) / (end_s - start_s) * number / rate_per_s
        for arrival in arrivals[first : first + number]
    ]
