"""Shifts of the load: what a placement that follows gains over one that stays, and over those that could have stayed.

A trace is two phases of the same length, each as busy as its mix says. The start knows the first minute. The fixed
placements are the splits into primaries and auxiliaries that the Orchestrator plans for the two phases in different
proportions, as one who knows the whole trace could, and all stages on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from deployments.assembly.planning import plan_placement
from deployments.assembly.simulation import (
    SimulationSetup,
    list_mix,
    load_times,
    make_cluster_options,
    set_deadlines,
    simulate,
)
from dispatch.options import DEFAULT_POLICY
from lib.evaluate.cells import Settings
from lib.evaluate.rows import TraceRun, count_types, make_row
from lib.evaluate.tables import Table
from profiler import CostModel
from traces.simulated import make_arrivals
from traces.workloads.arrivals import draw_arrival_times
from traces.workloads.mixes import draw, load_figure, load_mix
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import TimedRequest
from tridentserve.errors import ConfigError
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.stages import Stage

# The default's dispatcher with a placement that stays.
_FIXED = "wo-switch"
# The default with splits alone, which follow the load.
_SPLIT = "tridentserve-paper+all-together"
# Shares of the second phase in the mixes that the fixed placements are planned for.
_SWEEP = (0.0, 0.25, 0.5, 0.75, 1.0)
_FIGURES = ("slo_attainment", "mean_all_s", "p95_all_s", "placement_switches", "moved_bytes")


@dataclass(frozen=True, slots=True)
class _ShiftPhase:
    """A mix of the model (`light`), and the steps that its requests have in place of its own."""

    mix: str
    steps: int | None = None


SHIFTS = {
    "light to heavy": (_ShiftPhase("light"), _ShiftPhase("heavy")),
    "decode-heavy to diffuse-heavy": (_ShiftPhase("medium", 1), _ShiftPhase("medium", 20)),
    "diffuse-heavy to decode-heavy": (_ShiftPhase("medium", 20), _ShiftPhase("medium", 1)),
}


@dataclass(frozen=True, slots=True)
class _ShiftScene:
    workers: Sequence[WorkerSpec]
    make_times: Callable[[], CostModel]
    phases: tuple[Sequence[TimedRequest], Sequence[TimedRequest]]
    settings: Settings

    def run(self, policy: str, placement: PlacementPlan | None = None) -> dict[str, Any]:
        """The figures of one simulation, and the placements that it had, in words."""
        arrivals = [*self.phases[0], *self.phases[1]]
        options = self.settings.make_options(policy)
        result = simulate(arrivals, SimulationSetup(self.workers, self.make_times, options, placement=placement))
        row = make_row([TraceRun(result, self.settings.duration_s)], len(arrivals), 0.0)
        placed = ", then ".join(f"{_describe(plan)} at {since_s:.0f} s" for since_s, plan in result.placements)
        return {name: row[name] for name in _FIGURES} | {"placements": placed}


def compare_shifts(models: Sequence[str], seeds: int, settings: Settings) -> Iterator[Table]:
    """One table for each model and shift; figures are means over the seeds. Raises what `simulate` raises."""
    for model in models:
        for name, phases in SHIFTS.items():
            runs: dict[str, list[dict[str, Any]]] = {}
            for seed in range(seeds):
                for way, figures in _run_all(_make_scene(model, phases, seed, settings)):
                    runs.setdefault(way, []).append(figures)
            yield _make_table(f"{model}, {settings.gpus} GPUs: {name}", runs, settings.duration_s / 2)


def _make_scene(model: str, phases: tuple[_ShiftPhase, _ShiftPhase], seed: int, settings: Settings) -> _ShiftScene:
    cluster = settings.read_cluster_spec()
    make_times = load_times(cluster, [settings.profiles])
    times, drawn, phase_s = make_times(), [], settings.duration_s / 2
    for number, phase in enumerate(phases):
        mix = load_mix(f"{model}-{phase.mix}")
        changed = mix.model_copy(update={"num_inference_steps": phase.steps or mix.num_inference_steps})
        rate_per_s = mix.rate_per_s * mix.load / load_figure(changed, times, settings.gpus)
        arrival_times_s = draw_arrival_times("poisson", rate_per_s, phase_s, 2 * seed + number)
        if not arrival_times_s:
            raise ConfigError(f"no request of {mix.name} comes in {phase_s:g} s; raise --duration-s or --gpus")
        requests = [
            replace(request, timestamp_s=request.timestamp_s + number * phase_s, request_id=f"{number}-{index}")
            for index, request in enumerate(draw(changed, arrival_times_s, 2 * seed + number))
        ]
        drawn.append(set_deadlines(make_arrivals(requests, times.models), times))
    return _ShiftScene(cluster.list_workers(), make_times, (drawn[0], drawn[1]), settings)


def _run_all(scene: _ShiftScene) -> Iterator[tuple[str, dict[str, Any]]]:
    """All ways to serve a scene, each with its figures. Fixed placements that are alike are run once."""
    yield DEFAULT_POLICY, scene.run(DEFAULT_POLICY)
    yield _FIXED, scene.run(_FIXED)
    yield "splits that follow the load", scene.run(_SPLIT)
    ran: dict[str, dict[str, Any]] = {}
    for way, plan in _list_fixed(scene):
        kinds = _describe(plan)
        if kinds not in ran:
            ran[kinds] = scene.run(_FIXED, plan)
        yield way, ran[kinds]


def _list_fixed(scene: _ShiftScene) -> Iterator[tuple[str, PlacementPlan]]:
    options, times = make_cluster_options(scene.settings.read_cluster_spec(), _SPLIT), scene.make_times()
    for share in _SWEEP:
        load = [
            replace(kind, weight=kind.weight * weight)
            # Both phases are as long, and `list_mix` counts from the start of the first.
            for phase, weight in zip(scene.phases, (1 - share, 2 * share), strict=True)
            for kind in list_mix(phase)
        ]
        yield (
            f"a split planned for {1 - share:.0%} first, {share:.0%} second",
            plan_placement(options, times, scene.workers, load),
        )
    models = {spec.model for phase in scene.phases for _, spec in phase}
    everything = frozenset(Replica(model, stage) for model in models for stage in Stage)
    yield "all stages on every worker", PlacementPlan({worker.worker_id: everything for worker in scene.workers})


def _make_table(title: str, runs: dict[str, list[dict[str, Any]]], phase_s: float) -> Table:
    rows = []
    for way, figures in runs.items():
        on_time, mean_s, p95_s, switches, moved = (fmean(run[name] for run in figures) for name in _FIGURES)
        rows.append(
            (
                *(
                    way,
                    f"{100 * on_time:.1f}",
                    f"{mean_s:.1f}",
                    f"{p95_s:.1f}",
                    f"{switches:.1f}",
                    f"{moved / 1e9:.0f}",
                ),
                figures[0]["placements"],
            )
        )
    header = ("served with", "on time %", "mean s", "P95 s", "switches", "moved GB", "placements (first seed)")
    note = (
        f"Means of {len(next(iter(runs.values())))} seeds; two phases of {phase_s:.0f} s. Latencies count all requests."
    )
    return Table(title, header, tuple(rows), note)


def _describe(plan: PlacementPlan) -> str:
    return " + ".join(f"{number} {kind}" for kind, number in count_types(plan).items())
