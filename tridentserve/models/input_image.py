"""The input images of an edit or of a video: they are read from what a client sent, which is not trusted."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Collection
from typing import NoReturn

from PIL import Image, ImageChops, ImageOps

from tridentserve.errors import InvalidRequestError
from tridentserve.models.family import Family
from tridentserve.requests import GenerationInputs, Shape

FORMATS = ("PNG", "JPEG", "WEBP")
# Only workers of this service read the PNG: speed counts more than the last tenth of its size.
_PNG_COMPRESS_LEVEL = 1
# Image encoders scale the shorter side to about 224 pixels, and the longer side with it.
_MAX_PROPORTION = 100
# A progressive JPEG has about ten scans. Each further scan costs a pass over all pixels and only a few bytes of file.
_MAX_JPEG_SCANS = 32
# What errors say of a model that may start from an image and is not allowed to.
IMAGE_START_SETTING = "`limits.max_images: 1` of this model in the service's configuration lets it start from an image"
# A scan's header states its length and its number of components, which tells it from other content of the file, such
# as the video of a phone's live photo.
_START_OF_SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")


def read_image(content: bytes, max_pixels: int, param: str = "image", beside: str = "") -> Image.Image:
    """Decode a still image (PNG, JPEG or WebP) as RGB, turned upright by its EXIF orientation, with transparent pixels
    flattened onto white.

    Nothing is decoded before the size is known to be at most `max_pixels`. Raises `InvalidRequestError`, which names
    the field `param` and quotes nothing of the file. `beside` says in the error that other images have taken a part of
    the pixels.
    """
    return _read(content, max_pixels, _convert_to_rgb, param, beside)


def read_mask(content: bytes, size: tuple[int, int], param: str = "mask") -> Image.Image:
    """Decode the mask of an image of this width and height: white where the image is to be painted anew. Where the file
    is transparent somewhere, the transparent part is painted anew, and otherwise the white part. Raises as `read_image`
    does, and for a mask of another size."""
    mask = _read(content, size[0] * size[1], _convert_to_mask, param, " with this image")
    if mask.size != size:
        _refuse(param, f"must have the size of the image, {size[0]}x{size[1]} pixels")
    return mask


def _read(
    content: bytes, max_pixels: int, convert: Callable[[Image.Image], Image.Image], param: str, beside: str
) -> Image.Image:
    """Decode a still image as `read_image` says, and convert it when it is upright."""
    if not content:
        _refuse(param, "is an empty file")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                _refuse_size(param, max_pixels, beside)
            _check_proportion(image, _MAX_PROPORTION, param)
            # The other images of an MPO file (as phones make them) are previews or depths of the first.
            if image.format != "MPO" and getattr(image, "is_animated", False):
                _refuse(param, "must be a still image, this one is animated")
            if image.format in ("JPEG", "MPO") and len(_START_OF_SCAN.findall(content)) > _MAX_JPEG_SCANS:
                _refuse(param, f"is a JPEG file with more than {_MAX_JPEG_SCANS} scans")
            return convert(ImageOps.exif_transpose(image))
    except InvalidRequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        _refuse_size(param, max_pixels, beside)
    except Exception:  # Pillow's decoders raise whatever broken bytes lead them to
        _refuse(param, f"cannot be read as an image; send a whole {', '.join(FORMATS)} file")


def check_sides(family: Family, image: Image.Image, param: str = "image") -> None:
    """Raise `InvalidRequestError`, which names the field `param`, for an input image whose sides the stock pipeline of
    the family does not take."""
    if min(image.size) < family.min_image_side:
        _refuse(param, f"must have at least {family.min_image_side} pixels on each side for this model")
    if family.max_image_proportion is not None:
        _check_proportion(image, family.max_image_proportion, param)


def shrink_image(image: Image.Image, shape: Shape, family: Family) -> Image.Image:
    """Resize an image with more pixels than its output needs, bit for bit as the processors of diffusers do (Lanczos).

    Smaller images stay as they are, and so do images that E needs as they are: E resizes those."""
    fit, size = family.image_fit, (shape.width, shape.height)
    if fit == "area":
        return _shrink_to_area(image, family.image_pixels or shape.pixels)
    width, height = size if fit != "crop" else _compute_covering_size(image, shape)
    if fit is None or width * height >= image.width * image.height:
        return image
    resized = image.resize((width, height), Image.Resampling.LANCZOS)
    if fit == "stretch":
        return resized
    # `VaeImageProcessor._resize_and_crop` rounds both halves down, each for itself.
    cropped = Image.new("RGB", size)
    cropped.paste(resized, (shape.width // 2 - width // 2, shape.height // 2 - height // 2))
    return cropped


def _shrink_to_area(image: Image.Image, most_pixels: int) -> Image.Image:
    """Resize as `Flux2ImageProcessor._resize_if_exceeds_area` does."""
    if image.width * image.height <= most_pixels:
        return image
    scale = math.sqrt(most_pixels / (image.width * image.height))
    return image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.LANCZOS)


def _compute_covering_size(image: Image.Image, shape: Shape) -> tuple[int, int]:
    """Width and height in the image's proportions that cover an output. One of the sides equals the output's."""
    if shape.width / shape.height > image.width / image.height:
        return shape.width, image.height * shape.width // image.width
    return image.width * shape.height // image.height, shape.height


def encode_png(image: Image.Image) -> bytes:
    """Encode a PNG file without metadata. The same pixels give the same bytes."""
    image.info.clear()  # otherwise Pillow writes profiles and other metadata of the client's file
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=_PNG_COMPRESS_LEVEL)
    return buffer.getvalue()


def check_images(family: Family, inputs: GenerationInputs) -> None:
    """Raise `InvalidRequestError` unless a request has as many input images as its family takes, and a mask where it
    needs one, or none where it takes none."""
    check_image_count(family, len(inputs.images), family.max_images, "image")
    check_mask_presence(family, inputs.mask is not None)


def check_mask_presence(family: Family, is_given: bool, others: Collection[str] = ()) -> None:
    """Raise `InvalidRequestError` unless a mask is given where the family needs one, and left out where it takes none.

    `others` names the models that would take the request with its mask, or without one."""
    there = f"; {', '.join(others)}" if others else "; no served model"
    if family.needs_mask and not is_given:
        _refuse("mask", f"is required: {family.name} paints the masked part of an image{there} would do without")
    if is_given and not family.takes_mask:
        _refuse("mask", f"must be left out: {family.name} makes the whole image{there} would take it")


def check_image_count(family: Family, count: int, most: int, param: str, others: Collection[str] = ()) -> None:
    """Make the check of `check_images` before the images in the field `param` are read. `most`: the most that the model
    takes.

    `others` names the models that accept the request as it is, for the error message."""
    instead = f"; {', '.join(others)} would take the request as it is" if others else ""
    if family.needs_image and not count:
        _refuse(param, f"is required: {family.name} starts from an image{instead}")
    if not family.takes_image and count:
        unless = f"; {IMAGE_START_SETTING}" if family.image_start is not None else ""
        _refuse(param, f"must be left out: {family.name} starts from a prompt alone{instead}{unless}")
    if count > most:
        _refuse(param, f"has {count} images, this model takes {most} at most{instead}")


def open_input_image(inputs: GenerationInputs) -> Image.Image:
    """Decode a request's first input image as RGB in its own size. Raises `InvalidRequestError` when it has none."""
    if inputs.image is None:
        _refuse("image", "is required: this model starts from an image")
    return _open_png(inputs.image)


def open_input_images(inputs: GenerationInputs) -> list[Image.Image]:
    """Decode all input images of a request as RGB in their own sizes."""
    return [_open_png(content) for content in inputs.images]


def open_mask(inputs: GenerationInputs) -> Image.Image:
    """Decode a request's mask in its own size. Raises `InvalidRequestError` when it has none."""
    if inputs.mask is None:
        _refuse("mask", "is required: this model paints the masked part of an image")
    return _open_png(inputs.mask)


def _open_png(content: bytes) -> Image.Image:
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        return image.convert("RGB")


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode that the formats know to RGB."""
    if image.mode.startswith("I"):  # 16 bits of grey: Pillow's own conversion cuts values off at 255
        image = image.convert("I").point(_take_high_byte).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _convert_to_mask(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        if alpha.getextrema()[0] != alpha.getextrema()[1] or alpha.getpixel((0, 0)) == 0:
            return ImageChops.invert(alpha)
    return _convert_to_rgb(image).convert("L")


def _check_proportion(image: Image.Image, most: int, param: str) -> None:
    if max(image.size) > most * min(image.size):
        _refuse(param, f"has one side more than {most} times as long as the other")


def _take_high_byte(value: float) -> float:
    return value * (1 / 256)


def _refuse_size(param: str, max_pixels: int, beside: str) -> NoReturn:
    _refuse(param, f"has more than {max_pixels} pixels, the most that this model takes{beside}; send a smaller image")


def _refuse(param: str, problem: str) -> NoReturn:
    raise InvalidRequestError(f"{param}: {problem}", param) from None
