"""A simulation of a cluster in several cells, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from deployments.assembly.simulation import SimulationSetup, assemble_planners, find_load, make_engine_options
from tridentserve.cells.division import divide_nodes
from tridentserve.cells.router import CellRouter
from tridentserve.engine.simulated import SimulationResult, TimedRequest
from tridentserve.engine.simulated.cells import CellLoss, CellParts, SimulatedCells
from tridentserve.errors import ConfigError
from tridentserve.scheduling.estimation.request_work import estimate_work


def simulate_cells(
    arrivals: Sequence[TimedRequest], setup: SimulationSetup, num_cells: int, losses: Sequence[CellLoss] = ()
) -> SimulationResult:
    """Serve a trace with a cluster whose nodes are divided among so many cells, each with a scheduler of its own and
    its share of the load. Raises what `assemble_simulation` raises, and `ConfigError` where there are fewer nodes than
    cells, or where a placement for the whole cluster is given."""
    if setup.placement is not None:
        raise ConfigError("each cell plans its own placement: leave `placement` out")
    load = find_load(arrivals, setup)
    cells, engine = [], setup.engine
    for workers in divide_nodes(setup.workers, num_cells):
        share = len(workers) / len(setup.workers)
        part = [replace(kind, weight=kind.weight * share) for kind in load]
        planners, truth = assemble_planners(setup, workers, part)
        cells.append(CellParts(planners.scheduler, workers, planners.placement, truth))
        engine = replace(setup.engine, decodes_in_tiles=planners.policy.decodes_in_tiles)
    router = CellRouter(partial(estimate_work, truth), setup.engine.seed)
    return SimulatedCells(cells, router, make_engine_options(setup.options, engine), losses).run(arrivals)
