"""An evaluation as figures: a row for each setting and policy, as ratios to the first policy where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib.evaluate.tables import Results, means


def summarize(results: Results, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Means over the seeds, in the order of `policies`. Ratios are to the first of these in the same setting, None
    where it has no such figure or the figure is 0."""
    found = means(results)
    rows = []
    for model, workload, slo_scale in dict.fromkeys(key[:3] for key in found):
        base = found.get((model, workload, slo_scale, policies[0]), {})
        for policy in policies:
            row = found.get((model, workload, slo_scale, policy))
            if row is None:
                continue
            names = ("slo_attainment", "bound_attainment", "mean_s", "p95_s")
            figures = {name: row[name] for name in names}
            ratios = {f"{name}_ratio": _divide(row[name], base.get(name)) for name in ("slo_attainment", "mean_s")}
            setting = {"model": model, "workload": workload, "slo_scale": slo_scale, "policy": policy}
            rows.append(setting | figures | ratios)
    return rows


def _divide(figure: float | None, base: float | None) -> float | None:
    return None if figure is None or not base else figure / base
