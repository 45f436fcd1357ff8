"""A profile made of formulas, for tests of the planners: two models on a device called `gpu`."""

from __future__ import annotations

from dataclasses import replace

from profiler import CostModel, ProfileRow, ProfileTable, WeightsRow
from tridentserve.requests import Shape
from tridentserve.stages import Stage

MIB = 1 << 20
SHAPES = tuple(Shape(side, side) for side in (256, 512, 1024, 2048))
DEGREES = (1, 2, 4)
WEIGHTS_BYTES = {Stage.ENCODE: 400 * MIB, Stage.DIFFUSE: 800 * MIB, Stage.DECODE: 100 * MIB}
# The condition is one for all sizes; latents and pixels grow with the tokens.
CONDITION_BYTES, LATENT_BYTES_PER_TOKEN, PIXEL_BYTES_PER_TOKEN = 2 * MIB, 128.0, 768.0
OUTPUTS = {
    Stage.ENCODE: (CONDITION_BYTES, 0.0),
    Stage.DIFFUSE: (0, LATENT_BYTES_PER_TOKEN),
    Stage.DECODE: (0, PIXEL_BYTES_PER_TOKEN),
}
# The memory that a worker needs for EDC of one model at 1024x1024, and a little more.
EDC_BYTES = 3000 * MIB


def step_seconds(shape: Shape, degree: int) -> float:
    """Linear plus quadratic work over the degree, plus communication: wide pays off for large sizes only."""
    n = shape.tokens
    return (1e-5 * n + 5e-9 * n * n) / degree + 0.001 * (degree - 1)


def row(
    model: str, stage: Stage, shape: Shape, degree: int, seconds: float, peak_bytes: int, **other: int
) -> ProfileRow:
    return ProfileRow(
        model, "gpu", stage, shape, degree, other.get("batch", 1), seconds, peak_bytes, "modelled: a test"
    )


def model_rows(model: str) -> list[ProfileRow]:
    rows = []
    for shape in SHAPES:
        rows.append(row(model, Stage.ENCODE, shape, 1, 0.02, 50 * MIB))
        rows.append(row(model, Stage.DECODE, shape, 1, 1e-6 * shape.pixels / 4, 1536 * shape.pixels))
        rows += [
            row(model, Stage.DIFFUSE, shape, k, step_seconds(shape, k), int(100_000 * shape.tokens / k))
            for k in DEGREES
        ]
    return rows


def table(models: tuple[str, ...] = ("one", "two")) -> ProfileTable:
    rows = [entry for model in models for entry in model_rows(model)]
    weights = [
        WeightsRow(model, stage, WEIGHTS_BYTES[stage], "modelled: a test", *OUTPUTS[stage])
        for model in models
        for stage in Stage
    ]
    return ProfileTable("synthetic.csv", tuple(rows), tuple(weights))


def wide_only_table() -> ProfileTable:
    """D above 512x512 was profiled at degrees 2 and 4 only."""
    whole = table()
    rows = tuple(r for r in whole.rows if r.stage is not Stage.DIFFUSE or r.degree > 1 or r.shape.height <= 512)
    return replace(whole, rows=rows)


def cost_model(models: tuple[str, ...] = ("one", "two")) -> CostModel:
    return CostModel([table(models)], device="gpu")
