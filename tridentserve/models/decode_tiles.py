"""The size of the tiles in which C decodes where memory is short. Planners and workers both use it.

All images have one size of tile and all videos another, because a size that depended on the output would change how a
tile looks. At 512 pixels the VAE of an image family needs little memory (0.4 GiB in bfloat16) and no seams are visible;
256 is the default of the video VAEs in diffusers.
"""

from __future__ import annotations

from dataclasses import replace

from tridentserve.requests import Shape

_IMAGE, _VIDEO = 512, 256
# The time of a decode in tiles, which overlap, over that of a decode at once (40 to 65 % more operations, measured on
# five VAEs).
TILED_SLOWDOWN = 1.5


def choose_decode_tile(shape: Shape) -> int:
    """The side of an output's tiles, in pixels."""
    return _IMAGE if shape.num_frames == 1 else _VIDEO


def find_tiled_shape(shape: Shape) -> Shape | None:
    """The part of an output that the VAE decodes at once in tiles, or None where the output is no larger than a
    tile."""
    tile = choose_decode_tile(shape)
    if max(shape.height, shape.width) <= tile:
        return None
    return replace(shape, height=min(shape.height, tile), width=min(shape.width, tile))
