"""The size of the tiles in which C is done where memory is short, for planners and workers.

All images have one tile size and all videos another, whatever their own size, because a size that depended on theirs
would change how a tile looks. At 512 the VAE of an image takes little memory (0.4 GiB in bfloat16) and no seams are
visible; 256 is the default of the VAEs of videos in diffusers.
"""

from __future__ import annotations

from dataclasses import replace

from tridentserve.requests import Shape

_IMAGE, _VIDEO = 512, 256
# Tiles overlap: a decode in tiles takes this number of times as long (40 to 65 % more operations on five VAEs).
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
