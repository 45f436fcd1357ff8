"""Decoding in overlapping, blended tiles, which the VAEs of diffusers do themselves (`enable_tiling`).

The caller chooses the size of the tiles. The VAE's own default is the size of its training images, or a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_SIDES = ("height", "width")


@contextmanager
def decode_tiled(vae: Any, tile: int | None, strides: Mapping[str, int] | None = None) -> Iterator[None]:
    """Inside the context, `vae.decode` cuts larger outputs into overlapping tiles of `tile` pixels a side. Tiles are
    slightly smaller where their overlap would not be whole latents. None changes nothing. `strides`: the pixels from
    one tile to the next along `height` and `width`, for a VAE to which they can be told and does not take all."""
    if tile is None:
        yield
        return
    told = {f"tile_sample_stride_{side}": stride for side, stride in (strides or {}).items()}
    settings = {"use_tiling": True} | _compute_sizes(vae, tile) | told
    before = {name: getattr(vae, name) for name in settings}
    try:
        _set(vae, settings)
        yield
    finally:
        _set(vae, before)


def _set(vae: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        setattr(vae, name, value)


def _compute_sizes(vae: Any, tile: int) -> dict[str, Any]:
    """The attributes of a VAE that determine the size of its tiles, which have different names in three generations."""
    if hasattr(vae, "tile_latent_min_size"):
        return _compute_latent_sizes(vae, "size", tile, vae.tile_overlap_factor)
    if hasattr(vae, "tile_latent_min_height"):
        common = getattr(vae, "tile_overlap_factor", None)
        overlaps = {side: getattr(vae, f"tile_overlap_factor_{side}", common) for side in _SIDES}
        return {
            name: size
            for side, overlap in overlaps.items()
            for name, size in _compute_latent_sizes(vae, side, tile, overlap).items()
        }
    stride = tile * 3 // 4
    return {f"tile_sample_{name}_{side}": size for name, size in (("min", tile), ("stride", stride)) for side in _SIDES}


def _compute_latent_sizes(vae: Any, side: str, tile: int, overlap: Any) -> dict[str, Any]:
    """The sizes of one side in latents and in pixels. CogVideoX, whose tiles overlap by a sixth and a fifth, decodes to
    a wrong size where the overlap is not whole latents."""
    factor = getattr(vae, "spatial_compression_ratio", None) or 2 ** (len(vae.config.block_out_channels) - 1)
    whole = round(1 / overlap)
    latents = max(tile // factor // whole, 1) * whole
    return {f"tile_latent_min_{side}": latents, f"tile_sample_min_{side}": latents * factor}
