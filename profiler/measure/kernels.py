"""Measures the time and the memory of a denoising step with each attention kernel, compiled and not, side by side.

All ways share one set of weights and take turns, so that what else a machine does falls on all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import safetensors.torch
import torch

from profiler.measure.memory import measure_peak_bytes
from profiler.measure.stages import (
    WARM_UP,
    Source,
    build_inputs,
    compute_condition,
    load_stage,
    load_weightless,
    measure_seconds,
    release,
)
from profiler.measure.stock import StockPipeline
from tridentserve.device import find_device
from tridentserve.errors import TridentServeError
from tridentserve.models.kernels import Kernels
from tridentserve.pipelines import PipelineAdapter, kernels
from tridentserve.pipelines.base import DenoisingState
from tridentserve.pipelines.weights import attach, named_tensors
from tridentserve.requests import Shape
from tridentserve.stages import Stage

STOCK = Kernels()


@dataclass(slots=True)
class Timing:
    """The times of one way at one size."""

    kernels: Kernels
    """The way: the attention kernel, and compilation."""
    first_step_s: float = 0.0
    """Seconds of the first step, compilation included."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of a step, in each round."""
    difference: float = 0.0
    """The largest difference of the latents after the first step from those of the first way, over the largest of
    these."""
    peak_bytes: int | None = None
    """The peak of the activations in a step after all rounds, as profile tables have it. None where it is not known: of
    compiled code on a CPU, which torch runs as it is while operators are watched."""
    error: str = ""
    """The reason why the kernel cannot compute the model; empty where it can."""


def compare_kernels(
    source: Source,
    shapes: Sequence[Shape],
    ways: Sequence[Kernels],
    rounds: int,
    steps_per_round: int = 1,
    on_stock: Callable[[Shape, list[float]], None] | None = None,
) -> Iterator[tuple[Shape, list[Timing]]]:
    """Time the steps of one request at each size by each way: first by `STOCK`, the reference for the others.

    With `on_stock`, the stock diffusers pipeline takes `rounds` steps before and after them, on the same weights, and
    `on_stock` is given their seconds. Raises `ModelFolderError` and `MemoryError` for a model that cannot be loaded,
    and `ProfileError` for a stock pipeline that starts from an image.
    """
    requests = [build_inputs(source, shape, 2 + WARM_UP + rounds * steps_per_round) for shape in shapes]
    conditions = [safetensors.torch.load(compute_condition(source, inputs, cheap=True)) for inputs in requests]
    release()
    adapters = dict(_load_adapters(source, ways))
    pipeline = StockPipeline(source, adapters[STOCK]) if on_stock else None
    for inputs, condition in zip(requests, conditions, strict=True):
        stock_s = pipeline.time_steps(inputs.shape, rounds) if pipeline else []
        runs = [_KernelRun(way, adapter, adapter.prepare(condition, inputs)) for way, adapter in adapters.items()]
        for run in runs:
            run.begin(runs[0])
        able = [run for run in runs if not run.timing.error]
        for number in range(WARM_UP + rounds):
            # Every other round runs backwards, so that no kernel always comes first.
            for run in able[:: (-1) ** number]:
                seconds = run.advance(1 if number < WARM_UP else steps_per_round)
                if number >= WARM_UP:
                    run.timing.seconds.append(seconds)
        for run in able:
            run.measure_peak()
        if pipeline and on_stock:
            on_stock(inputs.shape, stock_s + pipeline.time_steps(inputs.shape, rounds))
        yield inputs.shape, [run.timing for run in runs]


def _load_adapters(source: Source, ways: Sequence[Kernels]) -> Iterator[tuple[Kernels, PipelineAdapter]]:
    """One for each way, all with the same weights."""
    weights = named_tensors(load_stage(source, Stage.DIFFUSE))
    for way in dict.fromkeys((STOCK, *ways)):
        adapter = load_weightless(source)
        attach(adapter, weights)
        kernels.install(adapter, way)
        yield way, adapter


def compute_ratios(timing: Timing, stock: Timing) -> list[float]:
    """The seconds of a step of `timing` over those of `stock`, round by round."""
    return [one / other for one, other in zip(timing.seconds, stock.seconds, strict=True)]


def compute_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    return statistics.median(values), min(values), max(values)


class _KernelRun:
    """A request on its way through D."""

    def __init__(self, way: Kernels, adapter: PipelineAdapter, state: DenoisingState) -> None:
        self.timing = Timing(way)
        self.state = state
        self._adapter = adapter

    def begin(self, first: _KernelRun) -> None:
        """The first step: it compiles, or finds out that it cannot."""
        try:
            self.timing.first_step_s = self.advance(1)
        except (TridentServeError, RuntimeError) as error:
            if self is first:
                raise
            self.timing.error = " ".join(str(error).partition("\n")[0].split())
            return
        ours, others = self.state.tensors["latents"].float(), first.state.tensors["latents"].float()
        self.timing.difference = float((ours - others).abs().max() / others.abs().max())

    def advance(self, num_steps: int) -> float:
        """Seconds of a step."""
        return measure_seconds(lambda: self._step(num_steps), self._device) / num_steps

    def measure_peak(self) -> None:
        """One step more, whose memory is watched."""
        if self.timing.kernels.compiled and not find_device(self._device).counts_allocations:
            return
        self.timing.peak_bytes = measure_peak_bytes(lambda: self._step(1), self.state.tensors, self._device)

    def _step(self, num_steps: int) -> None:
        (self.state,) = self._adapter.advance([self.state], num_steps)

    @property
    def _device(self) -> torch.device:
        return self.state.tensors["latents"].device
