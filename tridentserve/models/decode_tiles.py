"""The size of the tiles in which C is done where memory is short, for planners and workers.

One size for all images and one for all videos, whatever their own: a size that depended on them would change what a
tile looks like. 512 is what the memory of an image's VAE is small at (0.4 GiB in bfloat16) and an eye finds no seams;
256 is the default of the videos' VAEs in diffusers.
"""

from __future__ import annotations

from dataclasses import replace

from tridentserve.requests import Shape

_IMAGE, _VIDEO = 512, 256
# Tiles overlap: a decode in tiles takes so many times as long (40 to 65 % more operations, measured on five VAEs).
TILED_SLOWDOWN = 1.5


def decode_tile(shape: Shape) -> int:
    """The side of a tile, in pixels."""
    return _IMAGE if shape.num_frames == 1 else _VIDEO


def tiled_shape(shape: Shape) -> Shape | None:
    """The size of a tile of an output that is decoded in tiles; None where the output is no larger than a tile."""
    tile = decode_tile(shape)
    if max(shape.height, shape.width) <= tile:
        return None
    return replace(shape, height=min(shape.height, tile), width=min(shape.width, tile))
