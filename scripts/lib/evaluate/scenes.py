"""The scenes that all policies of a cell serve: the cluster, a trace with its deadlines, and the bound; and one policy
that serves them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from deployments.assembly.simulation import (
    SimulationSetup,
    assemble_simulation,
    load_times,
    set_deadlines,
)
from lib.evaluate.cells import MIXED, Cell, Settings
from lib.evaluate.related_systems.settings import RELATED
from lib.evaluate.rows import CellResult, TraceRun, make_details, make_row
from placement.cluster_file import ClusterSpec
from profiler import CostModel, keep_diffuse_only, load_tables
from profiler.loading import TableSource
from traces.formats.external import read_arrivals
from traces.reports.bound import bound_on_time
from traces.simulated import make_arrivals
from traces.workloads.arrivals import Arrival
from traces.workloads.named import DIURNAL, DURATION_S, WORKLOADS, make_workload
from traces.workloads.unseen import make_unseen_traces
from tridentserve.engine.simulated import SimulationOptions, TimedRequest
from tridentserve.scheduling.estimation.expected_times import DEFAULT_SLO_SCALE

# A setting of a paper is never so short that fewer requests are expected, as no seed may draw none.
_FEWEST = 10


@dataclass(frozen=True, slots=True)
class Scene:
    """All of a cell but the policy, with one of its traces."""

    arrivals: tuple[TimedRequest, ...]
    """The requests, each with its deadline by the profile as it stands."""
    bound: int
    """No schedule has more of them on time."""
    cluster: ClusterSpec
    make_times: Callable[[], CostModel]
    engine: SimulationOptions
    duration_s: float
    """For how long requests arrive."""
    parameters: str
    """Those of an unseen cell or of a paper's setting, or the arrivals of a workload by name, as JSON."""


def run_cell(cell: Cell, settings: Settings) -> CellResult:
    """Simulates one cell, on each of its traces. Raises what `simulate` raises."""
    scenes = _make_scenes(replace(cell, policy=""), settings)
    options = settings.make_options(cell.policy)
    start_s = time.perf_counter()
    runs = []
    for scene in scenes:
        simulation = assemble_simulation(
            scene.arrivals,
            SimulationSetup(
                scene.cluster.list_workers(),
                scene.make_times,
                options,
                engine=scene.engine,
            ),
        )
        runs.append(TraceRun(simulation.engine.run(scene.arrivals), scene.duration_s))
    wall_s = time.perf_counter() - start_s
    parameters: dict[str, Any] = {**asdict(cell), "gpus": len(scenes[0].cluster.list_workers())}
    parameters |= {"duration_s": sum(run.duration_s for run in runs), "parameters": scenes[0].parameters}
    parameters["options"] = json.dumps(simulation.describe())
    row = make_row(runs, sum(scene.bound for scene in scenes), wall_s)
    return CellResult(parameters | row, make_details(runs))


@lru_cache(maxsize=2)
def _make_scenes(cell: Cell, settings: Settings) -> Sequence[Scene]:
    """The same for all policies, so that they are made once for those of a cell that follow each other."""
    if cell.is_unseen:
        return tuple(_make_unseen_scenes(cell, settings))
    if cell.workload in RELATED:
        return (_make_related_scene(cell, settings),)
    return (_make_named_scene(cell, settings),)


def _make_named_scene(cell: Cell, settings: Settings) -> Scene:
    cluster = settings.read_cluster_spec()
    make_times = load_times(cluster, [settings.profiles])
    times = make_times()
    asked = None if cell.model == MIXED else cell.model
    requests = make_workload(
        cell.workload,
        asked,
        cell.trace_seed,
        settings.duration_s,
        settings.named_load.rate_scale,
        arrivals=None if cell.workload == DIURNAL else settings.named_load.arrivals,
        deadline_scale=cell.slo_scale,
    )
    scale = cell.slo_scale * (WORKLOADS[cell.workload].slo_scale(asked) or DEFAULT_SLO_SCALE)
    arrivals = tuple(set_deadlines(make_arrivals(requests, times.models), times, scale))
    bound = bound_on_time(arrivals, times, settings.gpus)
    engine = SimulationOptions(solve_time=settings.solve_time_s, seed=cell.trace_seed)
    parameters = json.dumps({"arrivals": settings.named_load.process, "rate_scale": settings.named_load.rate_scale})
    return Scene(arrivals, bound, cluster, make_times, engine, settings.duration_s, parameters)


def _make_related_scene(cell: Cell, settings: Settings) -> Scene:
    setting = RELATED[cell.workload]
    cluster = setting.gpu.make_cluster()
    make_times = load_times(cluster, [setting.gpu.model_table(table) for table in load_tables([settings.profiles])])
    times = make_times()
    rate_scale = setting.rate_scales[cell.index]
    (mix,) = WORKLOADS[setting.workload].load_mixes()
    # `--duration-s` shortens or lengthens all settings alike; a few requests there are always.
    duration_s = max(setting.duration_s * settings.duration_s / DURATION_S, _FEWEST / (rate_scale * mix.rate_per_s))
    requests = make_workload(
        setting.workload,
        seed=cell.trace_seed,
        duration_s=duration_s,
        rate_scale=rate_scale,
        deadline_scale=cell.slo_scale,
        num_inference_steps=setting.num_inference_steps,
    )
    scale = cell.slo_scale * (mix.slo_scale or DEFAULT_SLO_SCALE)
    arrivals = tuple(set_deadlines(make_arrivals(requests, times.models), times, scale))
    bound = bound_on_time(arrivals, times, len(cluster.list_workers()))
    engine = SimulationOptions(solve_time=settings.solve_time_s, seed=cell.trace_seed)
    parameters = json.dumps({"gpu": asdict(setting.gpu), "rate_scale": rate_scale})
    return Scene(arrivals, bound, cluster, make_times, engine, duration_s, parameters)


def _make_unseen_scenes(cell: Cell, settings: Settings) -> Iterator[Scene]:
    """One scene for each trace of the cell."""
    drawn = cell.draw_unseen(settings)
    cluster = replace(settings, gpus=drawn.gpus).read_cluster_spec()
    profiles: list[TableSource] = [settings.profiles]
    if drawn.diffuse_only:
        profiles = [keep_diffuse_only(table) for table in load_tables(profiles)]
    make_times = load_times(cluster, profiles)
    times = make_times()
    recorded = read_recorded(settings.recorded) if settings.recorded else ()
    for number, requests in enumerate(make_unseen_traces(drawn, times, recorded)):
        arrivals = tuple(make_arrivals(requests, times.models))
        engine = SimulationOptions(
            solve_time=settings.solve_time_s,
            seed=cell.trace_seed + number,
            jitter=drawn.jitter,
            plan_overhead_s=drawn.overhead_s,
            report_overhead_s=drawn.overhead_s,
        )
        bound = bound_on_time(arrivals, times, drawn.gpus)
        yield Scene(arrivals, bound, cluster, make_times, engine, arrivals[-1][0], json.dumps(asdict(drawn)))


@lru_cache(maxsize=1)
def read_recorded(paths: tuple[str, ...]) -> tuple[tuple[Arrival, ...], ...]:
    """The arrivals of published traces. Raises `TraceError` and `OSError`."""
    return tuple(tuple(read_arrivals(Path(path))) for path in paths)
