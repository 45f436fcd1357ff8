"""Measures, at the start of a service, the models that no profile table has rows of, and writes their tables."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deployments.assembly.measured_tables import list_measured_degrees, name_measured_table
from deployments.assembly.options import make_service_options
from deployments.assembly.profiles import list_unmeasured
from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from deployments.models.served import build_served_model
from deployments.models.sources import find_model_source
from deployments.preparation.start_news import open_start_news
from deployments.preparation.worker_seat import WorkerSeats
from deployments.replica_logs import prepare_logs
from profiler import ProfileTable, write_table
from profiler.measure.sizes import SizeRange
from profiler.tables.rows import ProfileRow
from tridentserve.engine.live.messages import ModelSource
from tridentserve.errors import ConfigError, TridentServeError
from tridentserve.models.model_folder import read_family
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MeasuringOrder:
    """One model, and how far it is to be measured."""

    source: ModelSource
    sizes: SizeRange
    degrees: tuple[int, ...]
    device: str
    """The device as torch names it."""
    device_name: str
    """The device as the configuration names it."""
    num_threads: int
    budget_s: float
    guidance_scale: float | None
    """The guidance scale of a request that names none, where the configuration has one of its own for the model."""
    compile_dir: Path
    """The folder in which workers will look for the code that is compiled here."""


async def measure_unprofiled(args: AppArgs, seats: WorkerSeats) -> None:
    """Measure one model after another, in the place of the first worker. Raises `ConfigError` for a model that cannot
    be measured."""
    models = await asyncio.to_thread(list_unmeasured, args)
    if not models:
        return
    with open_start_news("profiling") as news:
        for model in models:
            await _measure_model(model, args, seats, news)


async def _measure_model(model: ModelArgs, args: AppArgs, seats: WorkerSeats, news: Any) -> None:
    path, cluster = name_measured_table(model, args), args.cluster
    logger.info(
        "no profile has rows of %s for %s: it is measured now, for about %g s (docs/planning.md)",
        model.name,
        cluster.device_name,
        args.profiling.budget_s,
    )
    source = await asyncio.to_thread(find_model_source, model, args.cache_dir)
    order = MeasuringOrder(
        source,
        find_size_range(model),
        list_measured_degrees(args),
        cluster.device,
        cluster.device_name,
        cluster.cpu_threads,
        args.profiling.budget_s,
        model.defaults.guidance_scale,
        make_service_options(args).worker.compile_dir,
    )
    began_s = time.monotonic()
    try:
        table: ProfileTable = await seats.run(0, measure_model, order, news)
    except TridentServeError as error:
        raise ConfigError(
            f"models: {model.name} could not be measured ({error}); profile it with scripts/profile_model.py, and name "
            "its table in profiles"
        ) from error
    await asyncio.to_thread(write_table, path, table)
    took_s = time.monotonic() - began_s
    logger.info("%s was measured in %.0f s: %s; written to %s", model.name, took_s, _describe(table), path)


def find_size_range(model: ModelArgs) -> SizeRange:
    """The sizes that the limits of a model allow. Raises `ModelFolderError`."""
    served = build_served_model(model)
    return SizeRange(served.smallest, served.usual_shape, served.longest)


def measure_model(order: MeasuringOrder, news: Any) -> ProfileTable:
    """Measure one model in this process, on its first device."""
    from profiler.measure.quick import measure_quickly
    from profiler.measure.stages import Source
    from tridentserve.pipelines.compile_cache import open_compile_cache

    prepare_logs()
    open_compile_cache(order.compile_dir)
    began_s, source = time.monotonic(), order.source
    told: dict[str, Any] = {"model": source.name, "device": order.device_name, "budget_s": order.budget_s}

    def tell(latest: Mapping[str, Any]) -> None:
        news.tell.remote({**told, **latest, "elapsed_s": round(time.monotonic() - began_s, 1)})

    tell({})
    measured = Source(
        source.folder, order.device, source.formats, kernels=source.kernels, guidance_scale=order.guidance_scale
    )
    table = measure_quickly(
        measured,
        source.name,
        order.sizes,
        order.degrees,
        order.num_threads,
        order.budget_s,
        lambda point, sample: tell({"latest": str(point), "latest_s": round(sample.seconds, 4)}),
    )
    peaks = _leave_room_for_guidance(table, source.folder, order.guidance_scale)
    return replace(table, rows=tuple(replace(row, gpu=order.device_name) for row in peaks))


def _leave_room_for_guidance(table: ProfileTable, folder: Path, guidance_scale: float | None) -> list[ProfileRow]:
    """The rows of a table, with the memory of a second pass in D where it was measured without guidance: a request may
    ask for it, and both passes of a step can be one call."""
    family = read_family(folder)
    has_pass = guidance_scale is None or guidance_scale > family.unguided_scale or not family.negative_prompt
    return [
        row if has_pass or row.stage is not Stage.DIFFUSE else replace(row, peak_bytes=2 * row.peak_bytes)
        for row in table.rows
    ]


def _describe(table: ProfileTable) -> str:
    """The times at the smallest and the largest size, in words."""
    parts = []
    for stage in Stage:
        rows = [row for row in table.rows if row.stage is stage and row.degree == 1]
        ends = (choose(rows, key=lambda row: row.shape.tokens) for choose in (min, max))
        parts.append(f"{stage} " + " to ".join(f"{1000 * row.seconds:.0f} ms at {row.shape}" for row in ends))
    return ", ".join(parts)
