"""The table of the NVIDIA H200 is one that a service can plan with, at degree 1."""

from __future__ import annotations

import pytest

from profiler import CostModel, read_shipped_table
from tridentserve.requests import Shape
from tridentserve.stages import Stage

TABLE = read_shipped_table("h200")
MODELS = ("sd3-medium", "flux.1-dev", "qwen-image", "wan2.1-1.3b")


def test_all_rows_are_measured_on_the_gpu() -> None:
    assert {row.model for row in TABLE.rows} == set(MODELS)
    assert {row.gpu for row in TABLE.rows} == {"NVIDIA H200"}
    assert all(row.source.startswith("measured: torch 2.11.0") for row in TABLE.rows)


@pytest.mark.parametrize("model", MODELS)
def test_each_model_can_be_planned_with(model: str) -> None:
    costs = CostModel([TABLE], "NVIDIA H200")
    shapes = {row.shape for row in TABLE.rows if row.model == model}
    for shape in shapes:
        assert all(costs.seconds(model, stage, shape, 1) > 0 for stage in Stage)
    assert Shape(1024, 1024) in shapes or model.startswith("wan")
