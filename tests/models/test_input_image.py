"""Images that clients send: every mode and orientation becomes plain RGB, and nothing that is sent does harm."""

from __future__ import annotations

import io
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tridentserve.errors import InvalidRequestError
from tridentserve.models.families import FAMILIES
from tridentserve.models.family import ImageFit
from tridentserve.models.input_image import (
    check_images,
    check_sides,
    encode_png,
    open_input_image,
    open_input_images,
    read_image,
    shrink_image,
)
from tridentserve.requests import GenerationInputs, Shape

FITTING = {family.image_fit: family for family in (FAMILIES["flux_kontext"], FAMILIES["hunyuan_video_15_i2v"])}
MANY = 10**6
NOISE = np.random.default_rng(0).integers(0, 256, (24, 40, 4), dtype=np.uint8)
COLOURS = Image.fromarray(NOISE[..., :3])


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(content: bytes) -> np.ndarray[Any, Any]:
    image = Image.open(io.BytesIO(encode_png(read_image(content, MANY))))
    assert (image.format, image.mode, image.info) == ("PNG", "RGB", {})
    return np.asarray(image)


def refuse(content: bytes, max_pixels: int = MANY) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read_image(content, max_pixels, "input_reference")
    assert caught.value.param == "input_reference"
    assert str(caught.value).startswith("input_reference: ")
    return str(caught.value)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_modes_without_transparency_keep_their_colours(mode: str) -> None:
    image = COLOURS.convert(mode)
    assert np.array_equal(pixels(file_of(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_other_formats(kind: str) -> None:
    content = file_of(COLOURS, kind)
    assert np.array_equal(pixels(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


def test_a_jpeg_in_cmyk() -> None:
    assert pixels(file_of(COLOURS.convert("CMYK"), "JPEG")).shape == (24, 40, 3)


def test_sixteen_bits_of_grey_are_not_cut_off() -> None:
    grey = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    found = pixels(file_of(Image.fromarray(grey)))
    assert np.array_equal(found, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_what_is_transparent_becomes_white(kind: str) -> None:
    red = np.zeros((8, 8, 4), np.uint8)
    red[..., 0], red[:4, :, 3] = 255, 255  # its upper half is opaque, the lower one transparent
    found = pixels(file_of(Image.fromarray(red), kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert (found[:4] == (255, 0, 0)).all()
    assert (found[4:] == 255).all()


def test_transparency_in_part_and_of_a_palette() -> None:
    half = Image.new("LA", (4, 4), (0, 128))
    assert np.abs(pixels(file_of(half)).astype(int) - 127).max() <= 1
    spots = Image.new("P", (4, 4), 1)
    spots.putpalette([0, 0, 0, 10, 20, 30])
    assert (pixels(file_of(spots, transparency=1)) == 255).all()
    assert (pixels(file_of(spots, transparency=0)) == (10, 20, 30)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_it_is_turned_upright(orientation: int) -> None:
    ways = [
        None,
        "FLIP_LEFT_RIGHT",
        "ROTATE_180",
        "FLIP_TOP_BOTTOM",
        "TRANSPOSE",
        "ROTATE_270",
        "TRANSVERSE",
        "ROTATE_90",
    ]
    way = ways[orientation - 1]
    upright = COLOURS if way is None else COLOURS.transpose(Image.Transpose[way])
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = file_of(COLOURS, exif=exif)
    assert np.array_equal(pixels(content), np.asarray(upright))
    assert read_image(content, MANY).size == upright.size


def test_the_same_pixels_are_the_same_file_whatever_else_it_holds() -> None:
    exif = Image.Exif()
    exif[0x010E] = "a description"
    plain, described = file_of(COLOURS), file_of(COLOURS, exif=exif, dpi=(300, 300), icc_profile=b"x" * 200)
    assert plain != described
    assert encode_png(read_image(plain, MANY)) == encode_png(read_image(described, MANY))


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["PNG", "JPEG", "WEBP"]))
def test_any_size_up_to_the_limit(width: int, height: int, kind: str) -> None:
    content = file_of(COLOURS.resize((width, height)), kind)
    assert read_image(content, width * height).size == (width, height)
    assert f"more than {width * height - 1} pixels" in refuse(content, width * height - 1)


def test_a_strip_that_an_image_encoder_would_blow_up_is_refused() -> None:
    assert read_image(file_of(COLOURS.resize((100, 1))), MANY).size == (100, 1)
    for size in ((101, 1), (2, 201)):
        assert "one side more than 100 times as long as the other" in refuse(file_of(COLOURS.resize(size)))


def test_a_bomb_is_not_decoded() -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    for side in (1001, 10_000, 60_000):
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
        assert "more than 1000000 pixels" in refuse(bomb)


def test_a_jpeg_of_thousands_of_scans_is_not_decoded() -> None:
    progressive = file_of(COLOURS, "JPEG", progressive=True)
    assert pixels(progressive).shape == (24, 40, 3)
    start = progressive.rindex(b"\xff\xda")
    for more, is_read in ((20, True), (40, False), (300, False)):
        many = progressive[:start] + progressive[start:-2] * more + b"\xff\xd9"
        assert pixels(many).shape == (24, 40, 3) if is_read else "more than 32 scans" in refuse(many)
    assert pixels(progressive + b"\xff\xda" * 300).shape == (24, 40, 3)


def moving(kind: str) -> bytes:
    return file_of(COLOURS, kind, save_all=True, append_images=[COLOURS.convert("L").convert("RGB")])


@pytest.mark.parametrize("content", [moving("PNG"), moving("WEBP")], ids=["PNG", "WEBP"])
def test_animations_are_refused(content: bytes) -> None:
    assert "animated" in refuse(content)


def test_the_first_image_of_a_phones_file_counts() -> None:
    assert pixels(moving("MPO")).shape == (24, 40, 3)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM", "ICO", "PDF"])
def test_other_formats_are_refused(kind: str) -> None:
    assert "PNG, JPEG, WEBP" in refuse(file_of(COLOURS, kind))


@pytest.mark.parametrize("content", [b"", b"\0", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"a fox", b"<svg/>", b"RIFF"])
def test_a_file_that_is_no_image_is_refused(content: bytes) -> None:
    refuse(content)


@given(st.sampled_from(["PNG", "JPEG", "WEBP"]), st.data())
def test_a_file_that_is_cut_off_or_damaged_is_refused_or_read(kind: str, data: st.DataObject) -> None:
    whole = file_of(COLOURS, kind)
    end = data.draw(st.integers(0, len(whole) * 3 // 4))
    refuse(whole[:end])
    damaged = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8)):
        damaged[place] = data.draw(st.integers(0, 255))
    with suppress(InvalidRequestError):
        read_image(bytes(damaged), MANY)


def test_a_request_has_an_image_when_its_family_starts_from_one() -> None:
    without = GenerationInputs("a fox", Shape(64, 64), 4, 3.5, 7)
    png = encode_png(read_image(file_of(COLOURS), MANY))
    with_one = GenerationInputs("a fox", Shape(64, 64), 4, 3.5, 7, image=png)
    check_images(FAMILIES["flux_kontext"], with_one)
    check_images(FAMILIES["flux"], without)
    for family, inputs in (("flux_kontext", without), ("flux", with_one)):
        with pytest.raises(InvalidRequestError, match=f"image: .*{family} starts from a"):
            check_images(FAMILIES[family], inputs)
    assert np.array_equal(np.asarray(open_input_image(with_one)), np.asarray(COLOURS))
    assert open_input_image(with_one).mode == "RGB"
    with pytest.raises(InvalidRequestError, match="required"):
        open_input_image(without)
    assert "PNG" not in repr(with_one)


def test_a_request_has_as_many_images_as_its_family_takes() -> None:
    png = encode_png(read_image(file_of(COLOURS), MANY))
    three = GenerationInputs("a fox", Shape(64, 64), 4, 3.5, 7, image=png, more_images=(png, png))
    for family in ("flux2", "flux2_klein", "qwen_image_edit_plus"):
        check_images(FAMILIES[family], three)
    for inputs in (three.without_images(), replace(three, more_images=())):
        check_images(FAMILIES["flux2"], inputs)
    assert len(open_input_images(three)) == 3
    assert not open_input_images(three.without_images())
    for family, most in (("flux_kontext", 1), ("qwen_image_edit", 1), ("flux2_klein", 4)):
        with pytest.raises(InvalidRequestError, match=f"image: has 5 images, this model takes {most} at most"):
            check_images(FAMILIES[family], replace(three, more_images=(png,) * 4))


def test_sides_that_the_stock_pipeline_refuses_are_refused() -> None:
    flux2, kontext = FAMILIES["flux2"], FAMILIES["flux_kontext"]
    for width, height in ((64, 512), (1000, 1000)):
        check_sides(flux2, Image.new("RGB", (width, height)))
    for size, says in (((63, 100), "at least 64 pixels"), ((64, 513), "more than 8 times as long")):
        with pytest.raises(InvalidRequestError, match=says):
            check_sides(flux2, Image.new("RGB", size), "image[1]")
        check_sides(kontext, Image.new("RGB", size))


def test_tokens_of_further_images_count_beside_those_of_profiles() -> None:
    square = Shape(1024, 1024)  # 4096 tokens, as one of a megapixel has
    flux2, plus, kontext = (FAMILIES[name] for name in ("flux2", "qwen_image_edit_plus", "flux_kontext"))
    assert flux2.compute_token_ratio(square, []) == 1.0
    assert flux2.compute_token_ratio(square, [(1024, 1024), (512, 1039)]) == 1 + 1 + 32 * 64 / 4096
    assert plus.compute_token_ratio(square, [(70, 70)]) == kontext.compute_token_ratio(square, [(9, 9)]) == 1.0
    assert plus.compute_token_ratio(square, [(70, 70)] * 3) == 2.0


@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_an_image_is_made_smaller_and_never_larger(fit: ImageFit) -> None:
    square = Image.new("RGB", (200, 200))
    square.paste("white", (50, 0, 150, 200))  # of 100:200, the middle that a crop leaves
    family = FITTING[fit]
    small = shrink_image(square, Shape(100, 50), family)
    assert small.size == (50, 100)
    assert (np.asarray(small)[:, 5:45] == 255).all() == (fit == "crop")
    for shape in (Shape(200, 200), Shape(64, 1000), Shape(400, 400)):
        assert shrink_image(square, shape, family) is square
    assert shrink_image(square, Shape(16, 16), FAMILIES["wan_i2v"]) is square


def test_a_strip_is_not_blown_up_to_be_cropped() -> None:
    strip = Image.new("RGB", (1000, 10))
    assert shrink_image(strip, Shape(64, 64), FITTING["crop"]) is strip
    assert shrink_image(strip, Shape(64, 64), FITTING["stretch"]).size == (64, 64)


def test_an_image_keeps_its_proportions_and_has_a_megapixel_at_most() -> None:
    flux2 = FAMILIES["flux2"]
    assert shrink_image(Image.new("RGB", (4096, 1024)), Shape(64, 64), flux2).size == (2048, 512)
    whole = Image.new("RGB", (1024, 1024))
    assert shrink_image(whole, Shape(64, 64), flux2) is whole
