"""The memory that the shipped tables expect of models: that of steps stands beside what was measured, and a model that
needs more than a GPU has is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
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
    for gpu, name, profile in _list_profiles(model, device):
        with suppress(ProfileError):
            peak_bytes = MemoryTable(profile).peak_bytes(model, Stage.DIFFUSE, shape)
            return {"peak_bytes": peak_bytes, "table": name, "device": gpu}
    return None


def estimate_need_bytes(model: str, shape: Shape, stages: Iterable[Stage], device: str) -> int:
    """Bytes of tensors that a GPU has to hold for one request of this size, stage after stage, by the shipped tables; 0
    where none has the size."""
    for _, _, profile in _list_profiles(model, device):
        with suppress(ProfileError):
            memory = MemoryTable(profile)
            return max(
                profile.find_weights(model, stage).weights_bytes + memory.peak_bytes(model, stage, shape)
                for stage in stages
            )
    return 0


def _list_profiles(model: str, device: str) -> Iterator[tuple[str, str, DeviceProfile]]:
    """The shipped tables that have a model, each with its device and its name: first those of this device."""
    tables = {name: read_shipped_table(name) for name in list_shipped_tables()}
    known = {(row.gpu, name) for name, table in tables.items() for row in table.rows if row.model == model}
    for gpu, name in sorted(known, key=lambda each: (each[0] != device, each)):
        yield gpu, name, DeviceProfile([tables[name]], gpu)
