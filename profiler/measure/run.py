"""The offline profiler: measures every stage of a model at every size and degree, and makes a profile table of it.

TridentServe, arXiv 2510.02838, section 5.1 ("Profiler"). Needs torch and diffusers, but no Ray: it runs on any machine
with the device in question.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import diffusers
import torch

from profiler.measure.checks import ProfilePoint, Sweep, check_measurable
from profiler.measure.processes import Processes
from profiler.measure.random_weights import count_weights_bytes
from profiler.measure.stages import Sample, Source, set_up_process
from profiler.tables.rows import ProfileRow, ProfileTable, WeightsRow
from tridentserve.device import find_device
from tridentserve.engine.options import WorkerOptions
from tridentserve.errors import ProfileError
from tridentserve.models.number_formats import describe_formats
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """The options of one measurement."""

    repeats: int = 10
    """Timed runs per point, of which the median counts."""
    passes: int = 1
    """The number of times that all points are measured; the lowest median counts, since other load on a machine only
    ever adds."""
    num_threads: int = WorkerOptions().num_threads
    """torch threads of one worker."""


def measure(
    source: Source,
    model: str,
    sweep: Sweep,
    options: MeasureOptions,
    on_point: Callable[[ProfilePoint, Sample, ProfileTable], None] = lambda point, sample, table: None,
    on_skip: Callable[[ProfilePoint, str], None] = lambda point, reason: None,
    known: ProfileTable | None = None,
    admit: Callable[[ProfilePoint], str | None] = lambda point: None,
) -> ProfileTable:
    """The table of one model on one device. `on_point` hears of each measured point, with the table so far.

    A point that the model or the memory of the device does not allow is left out, and `on_skip` hears why. What `known`
    has of the model on this device is taken over and not measured again. `admit` is asked right before each point is
    timed, once in each pass, and may give a reason to leave it out. Raises what `check_measurable` raises, and
    `ProfileError` when no point could be measured, a process was lost, or `known` was measured under other settings.
    """
    check_measurable(source, sweep)
    device, settings = find_device_name(source.device), _describe_settings(source, options)
    run = _Measurement(source, options, settings, _take_over(known, model, device, settings))
    wanted = run.list_wanted(sweep)
    if wanted:
        set_up_process(options.num_threads)
        with Processes(source, sweep.max_degree, options.repeats, options.num_threads) as processes:
            while wanted:
                for _ in range(options.passes):
                    run.take_pass(processes, wanted, on_point, on_skip, admit)
                wanted = run.list_wanted(sweep)
    if not run.table.rows:
        raise ProfileError(f"no point of {model} could be measured; choose smaller sizes")
    return run.table


class _Measurement:
    """All that was measured of one model so far. `begun`: the table to which it is added."""

    def __init__(self, source: Source, options: MeasureOptions, settings: str, begun: ProfileTable) -> None:
        self.table = begun
        """With all that was measured."""
        self._begun = begun
        self._source = source
        self._options = options
        self._settings = settings
        self._best: dict[ProfilePoint, Sample] = {}
        self._skipped: set[ProfilePoint] = set()
        self._weights_bytes: Mapping[Stage, int] | None = None

    def list_wanted(self, sweep: Sweep) -> list[ProfilePoint]:
        """The points to time next: those of the sweep that are left, then larger batches."""
        seconds = {_read_point(row): row.seconds for row in self.table.rows}
        left = [point for point in sweep.list_points() if point not in seconds and point not in self._skipped]
        return left or [point for point in sweep.list_larger_batches(seconds) if point not in self._skipped]

    def take_pass(
        self,
        processes: Processes,
        wanted: Sequence[ProfilePoint],
        on_point: Callable[[ProfilePoint, Sample, ProfileTable], None],
        on_skip: Callable[[ProfilePoint, str], None],
        admit: Callable[[ProfilePoint], str | None],
    ) -> None:
        """Time each point once; the fastest of all passes counts."""
        points = [point for point in wanted if point not in self._skipped]
        for point, sample in processes.take_samples(points, admit):
            if isinstance(sample, str):
                if point not in self._best:  # else a pass before this one has timed it
                    self._skipped.add(point)
                    on_skip(point, sample)
                continue
            if point not in self._best or sample.seconds < self._best[point].seconds:
                self._best[point] = sample
            self.table = self._make_table()
            on_point(point, sample, self.table)

    def _make_table(self) -> ProfileTable:
        model, device = self._begun.name, find_device_name(self._source.device)
        rows = (
            _make_row(model, device, point, sample, self._settings, self._options)
            for point, sample in self._best.items()
        )
        if self._weights_bytes is None:
            self._weights_bytes = count_weights_bytes(self._source.folder, self._source.find_formats())
        held = {row.stage: row for row in self._begun.weights}
        weights = (
            _make_weights_row(model, stage, self._weights_bytes[stage], self._best, held.get(stage)) for stage in Stage
        )
        return ProfileTable(model, (*self._begun.rows, *rows), tuple(weights))


def _read_point(row: ProfileRow) -> ProfilePoint:
    return ProfilePoint(row.stage, row.shape, row.degree, row.batch)


def _describe_settings(source: Source, options: MeasureOptions) -> str:
    """The settings that all rows of a table must have in common."""
    formats = describe_formats(source.find_formats())
    threads = f", threads {options.num_threads}" if find_device(source.device).is_host else ""
    weights = ", random weights" if source.random_weights else ""
    guidance = "" if source.guidance_scale is None else f", guidance {source.guidance_scale:g}"
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}"
    return f"{versions}, {formats}, {source.kernels}{threads}{weights}{guidance}"


def _make_row(
    model: str, device: str, point: ProfilePoint, sample: Sample, settings: str, options: MeasureOptions
) -> ProfileRow:
    how = f"median of {options.repeats} in the fastest of {options.passes} passes, spread {100 * sample.spread:.1f} %"
    source = f"measured: {settings}; {datetime.datetime.now(datetime.UTC).date()}; {how}"
    where = (model, device, point.stage, point.shape, point.degree, point.batch)
    return ProfileRow(*where, sample.seconds, sample.peak_bytes, source)


def _take_over(known: ProfileTable | None, model: str, device: str, settings: str) -> ProfileTable:
    """The rows that a table already has of a model on a device. Raises `ProfileError` for rows with other settings."""
    if known is None:
        return ProfileTable(model, (), ())
    rows = tuple(row for row in known.rows if (row.model, row.gpu) == (model, device))
    for row in rows:
        if not row.source.startswith(f"measured: {settings};"):
            raise ProfileError(
                f"{known.name} has {model} by {row.source.partition(';')[0]!r}, which is not this run's "
                f"{settings!r}; write into another table"
            )
    return ProfileTable(model, rows, tuple(row for row in known.weights if row.model == model))


def _make_weights_row(
    model: str, stage: Stage, weights_bytes: int, best: Mapping[ProfilePoint, Sample], known: WeightsRow | None
) -> WeightsRow:
    """Latents and pixels grow with the tokens; a condition does only as far as an image is in it."""
    outputs = [
        (point.shape, sample.output_bytes / point.batch)
        for point, sample in best.items()
        # Of a group's members, the first alone has the pixels.
        if point.stage is stage
    ]
    row = known or WeightsRow(model, stage, weights_bytes, "measured: the weights and the tensors returned")
    if stage is Stage.ENCODE:
        least = row.output_bytes or min((int(num_bytes) for _, num_bytes in outputs), default=0)
        row, outputs = replace(row, output_bytes=least), [(shape, num_bytes - least) for shape, num_bytes in outputs]
    per_token = (num_bytes / shape.tokens for shape, num_bytes in outputs)
    return replace(row, output_bytes_per_token=max([row.output_bytes_per_token, *per_token]))


def find_device_name(device: str) -> str:
    """The value of the `gpu` column: `cpu`, or the name that CUDA gives the GPU."""
    return find_device(device).name
