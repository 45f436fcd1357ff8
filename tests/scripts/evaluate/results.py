"""Results that no simulation made, for tests of what becomes of results."""

from __future__ import annotations

import json
from typing import Any

from lib.evaluate.cells import Cell, Settings
from lib.evaluate.rows import CellResult

from deployments.assembly.options import describe_options

SETTINGS = Settings(gpus=8, duration_s=60.0, profiles="l20")


def cell(policy: str = "default", workload: str = "light", model: str = "flux.1-dev", seed: int = 0) -> Cell:
    return Cell(model, workload, 1.0, seed, policy)


def made(of: Cell, attainment: float = 0.5, mean_s: float | None = 2.0, **other: Any) -> CellResult:
    row = {
        "model": of.model,
        "workload": of.workload,
        "policy": of.policy,
        "seed": of.seed,
        "slo_scale": of.slo_scale,
        "gpus": 8,
        "duration_s": 60.0,
        "requests": 100,
        "completed": 100,
        "slo_attainment": attainment,
        **{f"{name}_s": mean_s for name in ("mean", "p50", "p95", "p99", "mean_all", "p95_all")},
        "failed": 0,
        "ooms": 0,
        "unfinished": 0,
        "utilisation": 0.7,
        "placement_switches": 1,
        "moved_bytes": 2e9,
        "v0_share": 1.0,
        "v1_share": 0.0,
        "v2_share": 0.0,
        "v3_share": 0.0,
        "bound_attainment": 0.9,
        "end_s": 70.0,
        "wall_s": 1.0,
        "solve_mean_ms": 1.5,
        "ticks": 50,
        "cut_short": 0,
        "index": of.index,
        "parameters": "",
        "options": json.dumps(describe_options(SETTINGS.make_options())),
        "version": "abc",
        "command": "evaluate",
        **other,
    }
    details = {
        "latency_percentiles_s": [1.0 + percent / 10 for percent in range(101)],
        "throughput": [[15.0, 1.0], [45.0, 2.0]],
        "placements": [[0.0, {"EDC": 8}], [30.0, {"DC": 6, "E": 2}]],
    }
    return CellResult(row, details)


def fake_run(of: Cell, settings: Settings) -> CellResult:
    """Stands for a simulation; importable by other processes. The policy b6 has a fault."""
    if of.policy == "b6":
        raise ZeroDivisionError("a fault of b6")
    return made(of, attainment=0.25)
