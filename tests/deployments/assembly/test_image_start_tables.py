"""A model that may start from an image: its profile, its weights, and that a running service keeps to what it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.assembly.image_start_tables import add_vae_to_encode
from deployments.assembly.profiles import make_cost_model
from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from deployments.model_updates.change import find_refusals
from deployments.models.served import build_served_model
from deployments.models.sources import find_model_source
from deployments.validation.args import check_args
from profiler import load_tables
from tridentserve.models.layers import read_layer_sizes
from tridentserve.models.model_folder import find_shipped_model, stage_weights_bytes
from tridentserve.models.number_formats import NumberFormats, find_formats
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SIZE = Shape(64, 64)


def make_values(max_images: int | None, **more: Any) -> dict[str, Any]:
    limits = {"min_side": 64, "max_side": 256} | ({} if max_images is None else {"max_images": max_images})
    return {
        "models": [{"name": "shapes", "shipped": "shapes", "limits": limits}],
        "profiles": ["shapes-cpu"],
        "cluster": {"workers_per_node": 2, "memory_mb": 512},
        **more,
    }


def make_args(max_images: int | None, **more: Any) -> AppArgs:
    return AppArgs.model_validate(make_values(max_images, **more))


def test_e_has_the_memory_of_the_vae_where_images_are_allowed() -> None:
    plain, allowed = (make_cost_model(make_args(max_images)) for max_images in (None, 1))
    vae_bytes = plain.weights_bytes("shapes", Stage.DECODE)
    assert vae_bytes > 0
    for stage, more in ((Stage.ENCODE, vae_bytes), (Stage.DIFFUSE, 0), (Stage.DECODE, 0)):
        assert allowed.weights_bytes("shapes", stage) - plain.weights_bytes("shapes", stage) == more
        assert allowed.seconds("shapes", stage, SIZE) == plain.seconds("shapes", stage, SIZE)
    assert plain.peak_bytes("shapes", Stage.ENCODE, SIZE) < plain.peak_bytes("shapes", Stage.DECODE, SIZE)
    for size in (SIZE, Shape(256, 256)):
        assert allowed.peak_bytes("shapes", Stage.ENCODE, size) == plain.peak_bytes("shapes", Stage.DECODE, size)


def test_a_size_that_c_was_not_measured_at_has_the_activations_of_the_next_larger() -> None:
    (table,) = load_tables(["shapes-cpu"])
    decodes = {row.shape: row for row in table.rows if row.stage is Stage.DECODE and (row.degree, row.batch) == (1, 1)}
    shapes = sorted(decodes, key=lambda shape: shape.tokens)
    assert len(shapes) > 2
    for absent, expected in ((shapes[0], shapes[1]), (shapes[-1], shapes[-2])):
        rows = tuple(row for row in table.rows if row.stage is not Stage.DECODE or row.shape != absent)
        changed = add_vae_to_encode(type(table)(table.name, rows, table.weights), {decodes[absent].model})
        (encode,) = (
            row
            for row in changed.rows
            if row.stage is Stage.ENCODE and row.shape == absent and (row.degree, row.batch) == (1, 1)
        )
        assert encode.peak_bytes == decodes[expected].peak_bytes


def test_the_files_say_the_same_as_the_profile() -> None:
    args, folder = make_args(1), find_shipped_model("shapes")
    served = build_served_model(args.models[0])
    assert (served.max_images, served.family.needs_mask, served.edits(1)) == (1, False, True)
    formats = find_formats(served.family, NumberFormats(), "cpu")
    plain, allowed = (stage_weights_bytes(folder, formats, image_start) for image_start in (False, True))
    assert allowed == plain | {Stage.ENCODE: plain[Stage.ENCODE] + plain[Stage.DECODE]}
    layers = read_layer_sizes(folder, formats, True)
    assert {stage: sizes.rest_bytes + sizes.layers_bytes for stage, sizes in layers.items()} == allowed
    assert check_args(make_values(1)) == []


@pytest.mark.parametrize(
    ("model", "starts"),
    [
        ({"shipped": "shapes"}, False),
        ({"shipped": "shapes", "limits": {"max_images": 1}}, True),
        ({"tiny": "sdxl", "limits": {"max_images": 1}}, True),
        ({"tiny": "flux2", "limits": {"max_images": 2}}, False),
        ({"tiny": "pixart_sigma", "limits": {"max_images": 1}}, False),
    ],
)
def test_workers_are_told(model: dict[str, Any], starts: bool, tiny_cache: Path) -> None:
    one = ModelArgs.model_validate({"name": "m", **model})
    assert find_model_source(one, tiny_cache).image_start == starts
    assert build_served_model(one).family.starts_from_image == starts


def test_a_running_service_keeps_to_its_e() -> None:
    plain, allowed = make_args(None), make_args(1)
    for now, wanted in ((plain, allowed), (allowed, plain)):
        (found,) = find_refusals(wanted, now, {})
        assert found.startswith("models[0].limits.max_images: E of shapes holds its VAE or not since the start")
    assert find_refusals(allowed, allowed, {}) == []
