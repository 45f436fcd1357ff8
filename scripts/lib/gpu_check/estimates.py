"""Sets the measured memory of denoising steps beside what the cost model expects of them."""

from __future__ import annotations

from typing import Any

from profiler.memory import MemoryTable
from profiler.tables.device_profile import DeviceProfile
from profiler.tables.rows import list_shipped_tables, read_shipped_table
from tridentserve.errors import ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage


def add_estimates(figures: dict[str, Any], device: str) -> dict[str, Any]:
    """The figures of `compare_kernels.py` with `estimates`, the peak that a shipped table expects at each size (None
    where none has the size), and in each row its measured peak over that (`peak_ratio`)."""
    figures["estimates"] = {}
    for size, rows in figures["sizes"].items():
        estimate = _estimate_peak_bytes(figures["model"], Shape.parse(size), device)
        figures["estimates"][size] = estimate
        for row in rows:
            if estimate is not None and row.get("peak_bytes"):
                row["peak_ratio"] = float(f"{row['peak_bytes'] / estimate['peak_bytes']:.4g}")
    return figures


def _estimate_peak_bytes(model: str, shape: Shape, device: str) -> dict[str, Any] | None:
    """The expectation for a step on this device, or else on another one."""
    tables = {name: read_shipped_table(name) for name in list_shipped_tables()}
    known = {(row.gpu, name) for name, table in tables.items() for row in table.rows if row.model == model}
    for gpu, name in sorted(known, key=lambda each: (each[0] != device, each)):
        try:
            peak_bytes = MemoryTable(DeviceProfile([tables[name]], gpu)).peak_bytes(model, Stage.DIFFUSE, shape)
        except ProfileError:
            continue
        return {"peak_bytes": peak_bytes, "table": name, "device": gpu}
    return None
