"""The tables that were measured on GPUs are ones that a service can plan with, at degree 1."""

from __future__ import annotations

import pytest

from profiler import CostModel, read_shipped_table
from tridentserve.requests import Shape
from tridentserve.stages import Stage

GPUS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
TABLES = {name: read_shipped_table(name) for name in GPUS}
IMAGES = ("sd3-medium", "flux.1-dev", "qwen-image")
MODELS = {"h100": (*IMAGES, "wan2.1-1.3b", "wan2.1-14b", "hunyuanvideo"), "h200": (*IMAGES, "wan2.1-1.3b")}


@pytest.mark.parametrize("name", GPUS)
def test_all_rows_are_measured_on_the_gpu(name: str) -> None:
    table = TABLES[name]
    assert {row.model for row in table.rows} == set(MODELS[name])
    assert {row.gpu for row in table.rows} == {GPUS[name]}
    assert all(row.source.startswith("measured: torch 2.11.0") for row in table.rows)


@pytest.mark.parametrize(("name", "model"), [(name, model) for name, models in MODELS.items() for model in models])
def test_each_model_can_be_planned_with(name: str, model: str) -> None:
    costs = CostModel([TABLES[name]], GPUS[name])
    shapes = {row.shape for row in TABLES[name].rows if row.model == model}
    for shape in shapes:
        assert all(costs.seconds(model, stage, shape, 1) > 0 for stage in Stage)
    assert Shape(1024, 1024) in shapes or model not in IMAGES
