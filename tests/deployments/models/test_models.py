"""The sizes of a served model, against all sizes that the limits allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config.models import Limits, ModelArgs, RequestDefaults
from deployments.models.served import ServedModel, build_served_model, build_served_models
from deployments.schemas.common.model_choice import check_size
from deployments.schemas.image import build_image_request, parse_image_request
from deployments.schemas.video import build_video_request, parse_video_request
from tridentserve.errors import InvalidRequestError
from tridentserve.models.families import FAMILIES
from tridentserve.requests import Shape

SIDES = st.integers(16, 300)


@given(SIDES, SIDES, st.integers(256, 90_000), st.integers(1, 2048))
def test_sizes_within_the_limits(min_side: int, max_side: int, max_pixels: int, side: int) -> None:
    limits = Limits(min_side=min_side, max_side=max_side, max_pixels=max_pixels)
    model = ServedModel("m", FAMILIES["sd3"], limits)
    sides = [side for side in range(0, max_side + 1, 16) if side >= min_side]
    allowed = [(width, height) for width in sides for height in sides if width * height <= max_pixels]
    if not allowed:
        assert model.smallest.width > model.largest.width
        return
    most = model.longest
    assert (most.width, most.height) in allowed
    assert most.pixels == max(width * height for width, height in allowed)
    squares = [width for width, height in allowed if width == height]
    assert (model.smallest.width, model.largest.width) == (min(squares), max(squares))
    below = [square for square in squares if square <= side]
    assert model.choose_side_near(side) == max(below, default=min(squares))


@given(SIDES, SIDES, st.integers(256, 90_000), st.integers(1, 5000), st.integers(1, 5000))
def test_a_size_like_that_of_an_image(min_side: int, max_side: int, max_pixels: int, width: int, height: int) -> None:
    model = ServedModel(
        "m", FAMILIES["flux_kontext"], Limits(min_side=min_side, max_side=max_side, max_pixels=max_pixels)
    )
    if model.smallest.width > model.largest.width:
        return
    size = model.choose_size_near(width, height)
    check_size(size.width, size.height, "size", model)
    assert model.choose_size_near(size.width, size.height) == size
    turned = model.choose_size_near(height, width)
    assert (turned.width, turned.height) == (size.height, size.width)
    if min(size.width, size.height) > model.smallest.width + 16:  # else it may have been stretched to the smallest side
        longer, shorter = max(width, height), min(width, height)
        # Each side is off by less than two multiples.
        assert (max(size.width, size.height) - 32) / (min(size.width, size.height) + 32) <= longer / shorter
        assert (max(size.width, size.height) + 32) / (min(size.width, size.height) - 32 or 1) >= longer / shorter


FROM_IMAGES = [name for name, family in FAMILIES.items() if family.frame_multiple and family.takes_image]


@given(st.sampled_from(FROM_IMAGES), SIDES, SIDES, SIDES, SIDES)
def test_the_default_size_of_a_video_is_like_its_image(
    name: str, min_side: int, max_side: int, width: int, height: int
) -> None:
    model = ServedModel("m", FAMILIES[name], Limits(min_side=min_side, max_side=max_side))
    if model.smallest.width > model.largest.width:
        return
    default, shape = model.default_shape, model.choose_shape_like(width, height)
    check_size(shape.width, shape.height, "size", model)
    assert (shape.num_frames, shape.pixels <= default.pixels) == (default.num_frames, True)
    if model.family.one_size:
        assert shape == default
    elif width != height:
        assert (shape.width <= shape.height) if width < height else (shape.width >= shape.height)


def test_the_default_size_of_a_video_keeps_proportions_and_pixels() -> None:
    model = ServedModel("m", FAMILIES["wan_i2v"], Limits())
    assert model.default_shape == Shape(480, 832, 81)
    sizes = {(1080, 1920): (480, 832), (4000, 3000): (720, 544), (50, 50): (624, 624), (832, 480): (832, 480)}
    for image, size in sizes.items():
        assert model.choose_shape_like(*image) == Shape(width=size[0], height=size[1], num_frames=81)


@given(st.sampled_from([name for name, family in FAMILIES.items() if family.frame_multiple]), st.data())
def test_lengths_within_the_limits(name: str, data: st.DataObject) -> None:
    pixel_frames = data.draw(st.integers(64 * 64, 4_000_000))
    limits = Limits(min_side=64, max_side=256, max_frames=data.draw(st.integers(1, 90)), max_pixel_frames=pixel_frames)
    model = ServedModel("m", FAMILIES[name], limits)
    lengths = [frames for frames in range(1, limits.max_frames + 1) if model.family.allows_frames(frames)]
    assert list(model.frame_numbers) == lengths
    sides = range(64, 257, max(16, model.family.size_multiple))
    allowed = [
        (width, height, frames)
        for width in sides
        for height in sides
        for frames in lengths
        if width * height * frames <= pixel_frames
    ]
    for shape in (model.longest, model.default_shape):
        assert (shape.width, shape.height, shape.num_frames) in allowed
    most = max(Shape(height, width, frames).tokens for width, height, frames in allowed)
    assert model.longest.tokens == most
    asked = data.draw(st.floats(0, 100))
    multiple = model.family.frame_multiple or 1
    assert model.family.allows_frames(model.choose_frames_near(asked))
    assert abs(model.choose_frames_near(asked) - max(1.0, asked)) <= multiple / 2


def test_a_model_may_want_larger_multiples_than_its_family(tmp_path: Path) -> None:
    """Wan 2.2 TI2V-5B: also of a size that nobody asked for."""
    for name, content in {
        "model_index.json": {"_class_name": "WanImageToVideoPipeline"},
        "vae/config.json": {"scale_factor_spatial": 16},
        "transformer/config.json": {"patch_size": [1, 2, 2]},
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    model = build_served_model(ModelArgs(name="m", path=tmp_path))
    assert model.to_json()["limits"]["size_multiple"] == 32
    for image, size in {(4000, 3000): (704, 544), (50, 50): (608, 608)}.items():
        shape = model.choose_shape_like(*image)
        assert (shape.width, shape.height) == size
        check_size(*size, "size", model)
    with pytest.raises(InvalidRequestError, match="32"):
        check_size(720, 544, "size", model)


def test_loras_are_the_files_of_their_directory(tmp_path: Path) -> None:
    for family in ("flux", "pixart_sigma"):
        folder = tmp_path / family / "loras"
        folder.mkdir(parents=True)
        index = f'{{"_class_name": "{FAMILIES[family].pipeline_class}"}}'
        (tmp_path / family / "model_index.json").write_text(index)
        for name in ("pastel.safetensors", "ink.safetensors", "notes.txt"):
            (folder / name).touch()
    served = build_served_models([ModelArgs(name=name, path=tmp_path / name) for name in ("flux", "pixart_sigma")])
    assert served["flux"].to_json()["loras"] == ["ink", "pastel"]
    assert served["pixart_sigma"].loras == ()


@pytest.mark.parametrize(
    ("defaults", "steps", "guidance_scale"),
    [({}, 28, 7.0), ({"num_inference_steps": 4}, 4, 7.0), ({"guidance_scale": 0.0}, 28, 0.0)],
    ids=str,
)
def test_requests_that_name_none_have_the_defaults_of_the_model(
    defaults: dict[str, float], steps: int, guidance_scale: float
) -> None:
    model = build_served_model(ModelArgs.model_validate({"name": "m", "tiny": "sd3", "defaults": defaults}))
    spec, inputs = build_image_request(parse_image_request({"prompt": "a fox"}), {"m": model})
    assert (spec.num_inference_steps, inputs.guidance_scale) == (steps, guidance_scale)
    told = model.to_json()["defaults"]
    assert (told["num_inference_steps"], told["guidance_scale"]) == (steps, guidance_scale)
    named = parse_image_request({"prompt": "a fox", "num_inference_steps": 9, "guidance_scale": 2.0})
    spec, inputs = build_image_request(named, {"m": model})
    assert (spec.num_inference_steps, inputs.guidance_scale) == (9, 2.0)


@pytest.mark.parametrize(("defaults", "fps"), [({}, 16), ({"fps": 8}, 8)], ids=str)
def test_videos_whose_requests_name_no_rate_have_that_of_the_model(defaults: dict[str, int], fps: int) -> None:
    args = {"name": "m", "tiny": "wan", "defaults": defaults}
    model = build_served_model(ModelArgs.model_validate(args))
    assert build_video_request(parse_video_request({"prompt": "a fox"}), {"m": model})[1].fps == fps
    assert build_video_request(parse_video_request({"prompt": "a fox", "fps": 3}), {"m": model})[1].fps == 3
    assert model.to_json()["defaults"]["fps"] == fps


@pytest.mark.parametrize(("side", "chosen"), [(None, 512), (256, 256), (250, 240), (4096, 512), (1, 16)])
def test_requests_that_name_no_size_have_the_side_of_the_model(side: int | None, chosen: int) -> None:
    limits = Limits(max_side=512, min_side=16)
    model = ServedModel("m", FAMILIES["sd3"], limits, (), RequestDefaults(side=side))
    spec, _ = build_image_request(parse_image_request({"prompt": "a fox"}), {"m": model})
    assert (spec.shape.width, spec.shape.height) == (chosen, chosen)
    assert model.to_json()["defaults"]["size"] == f"{chosen}x{chosen}"


def test_default_steps_are_within_the_limits() -> None:
    model = ServedModel("m", FAMILIES["sd3"], Limits(max_steps=5), (), RequestDefaults(num_inference_steps=8))
    assert model.default_steps == 5
