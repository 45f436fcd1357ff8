"""Denoising steps of a U-Net for requests that differ in size, as patches of one size (PatchedServe, arXiv 2501.09253).

The images of all requests are cut into squares, whose side is the greatest common divisor of all heights and widths.
The patches of all of them are one batch, (patches, channels, side, side), image by image, and images of one size behind
one another. What a U-Net computes for each pixel alone it computes with its own code. Hooks do what looks further, so
that each request gets what it would get alone, but for rounding:

- a convolution gets the pixels next to each patch from the patches around it, and zeros at the edges of the image;
- a group norm has the mean and the variance of the whole image;
- an attention has the tokens of whole images, all images of one size as one batch. That they stand in the order of the
  patches changes nothing, since the tokens of these U-Nets have no positions.

Hooks are installed once, when the first such step comes. They act inside `PatchLayout.active` only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_processor import Attention
from torch.nn import functional

from tridentserve.errors import ConfigError
from tridentserve.pipelines.context_values import hold_value

_ACTIVE: ContextVar[PatchLayout | None] = ContextVar("patch_layout", default=None)


class LatentSize(NamedTuple):
    """The size of the latents of one request, in latent pixels."""

    height: int
    width: int
    rows: int
    """One for each pass of guidance and output."""

    @classmethod
    def measure(cls, latents: torch.Tensor) -> LatentSize:
        """The size of latents, (rows, channels, height, width)."""
        rows, _, height, width = latents.shape
        return cls(height, width, rows)


class PatchLayout:
    """The places of the patches of several requests in one batch."""

    def __init__(self, sizes: Sequence[LatentSize], device: torch.device) -> None:
        """`sizes` of all requests, those of one height and width behind one another."""
        self._sizes = sizes
        self._side = math.gcd(*(side for size in sizes for side in size[:2]))
        grids = [self._find_grid(size) for size in sizes]
        counts = [high * wide for high, wide in grids]
        self._owners = torch.arange(sum(size.rows for size in sizes)).repeat_interleave(
            torch.tensor([count for size, count in zip(sizes, counts, strict=True) for _ in range(size.rows)])
        )
        self._owners = self._owners.to(device)
        # The images of each size: how many there are, and the patches of each, high and wide.
        by_size = [(grid, list(members)) for grid, members in itertools.groupby(sizes, self._find_grid)]
        self._images = [sum(size.rows for size in members) for _, members in by_size]
        self._grids = [grid for grid, _ in by_size]
        images = [grid for size, grid in zip(sizes, grids, strict=True) for _ in range(size.rows)]
        self._above, self._below, self._left, self._right = (part.to(device) for part in _find_neighbours(images))

    def active(self) -> AbstractContextManager[None]:
        """Have hooked modules treat their batch as the patches of this layout."""
        return hold_value(_ACTIVE, self)

    def cut(self, images: Sequence[torch.Tensor], side: int | None = None) -> torch.Tensor:
        """Cut the images of all requests, or of each size, (rows, channels, height, width) each, into patches. `side`:
        that of patches on the level of the U-Net; None for that of the latents."""
        side = side or self._side
        parts = []
        for image in images:
            rows, channels, height, width = image.shape
            grid = image.reshape(rows, channels, height // side, side, width // side, side)
            parts.append(grid.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels, side, side))
        return torch.cat(parts)

    def join(self, patches: torch.Tensor) -> list[torch.Tensor]:
        """Put the images of all requests together again."""
        return _join(patches, [(size.rows, *self._find_grid(size)) for size in self._sizes])

    def join_sizes(self, patches: torch.Tensor) -> list[torch.Tensor]:
        """Put the images of each size together, on any level of the U-Net: (images, channels, height, width)."""
        return _join(patches, [(images, *grid) for images, grid in zip(self._images, self._grids, strict=True)])

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Give each patch the values of its image: from (images, ...) to (patches, ...)."""
        return rows.index_select(0, self._owners)

    def surround(self, patches: torch.Tensor) -> torch.Tensor:
        """Give each patch the pixels around it, and zeros beyond the edges of its image: (patches, channels, side + 2,
        side + 2)."""
        number, channels, side, _ = patches.shape
        surrounded = patches.new_empty(number, channels, side + 2, side + 2)
        surrounded[:, :, 1:-1, 1:-1] = patches
        self.fill_borders(surrounded)
        return surrounded

    def fill_borders(self, surrounded: torch.Tensor) -> None:
        """Fill the outermost pixels of patches that are (patches, channels, side + 2, side + 2) with those next to
        them, whose corners come with the columns."""
        rows = surrounded[..., 1:-1]
        rows[:, :, 0] = _take(rows[:, :, -2], self._above)
        rows[:, :, -1] = _take(rows[:, :, 1], self._below)
        surrounded[..., 0] = _take(surrounded[..., -2], self._left)
        surrounded[..., -1] = _take(surrounded[..., 1], self._right)

    def normalize(self, patches: torch.Tensor, norm: torch.nn.GroupNorm) -> torch.Tensor:
        """Apply a group norm with the statistics of each whole image, in float32."""
        channels = patches.shape[1]
        grouped = patches.float().view(len(patches), norm.num_groups, -1)
        variances, means = torch.var_mean(grouped, dim=-1, correction=0)
        mean = self.spread(self._average(means))
        variance = self.spread(self._average(variances + (means - mean).square()))
        factor = torch.rsqrt(variance + norm.eps).repeat_interleave(channels // norm.num_groups, 1)
        offset = -mean.repeat_interleave(channels // norm.num_groups, 1) * factor
        if norm.weight is not None:
            factor, offset = factor * norm.weight, offset * norm.weight + norm.bias
        return torch.addcmul(offset[..., None, None], patches, factor[..., None, None]).to(patches.dtype)

    def regroup(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """The tokens of the patches, (patches, tokens, channels), as those of the images of each size, (images, tokens,
        channels)."""
        split = torch.split(tokens, self._count_patches())
        return [part.reshape(images, -1, part.shape[-1]) for part, images in zip(split, self._images, strict=True)]

    def split_images(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """The rows of the images of each size."""
        return torch.split(rows, self._images)

    def _average(self, values: torch.Tensor) -> torch.Tensor:
        """The means over the patches of each image: from (patches, groups) to (images, groups)."""
        split = torch.split(values, self._count_patches())
        return torch.cat(
            [part.view(images, -1, values.shape[1]).mean(1) for part, images in zip(split, self._images, strict=True)]
        )

    def _count_patches(self) -> list[int]:
        """The patches of all images of each size."""
        return [images * high * wide for images, (high, wide) in zip(self._images, self._grids, strict=True)]

    def _find_grid(self, size: LatentSize) -> tuple[int, int]:
        return size.height // self._side, size.width // self._side


def get_current_layout() -> PatchLayout | None:
    """The layout that is active; None where a U-Net gets whole images."""
    return _ACTIVE.get()


def without_layout() -> AbstractContextManager[None]:
    """Have hooked modules treat their batch as whole images, inside a layout that is active."""
    return hold_value(_ACTIVE, None)


def order_by_size(latents: Sequence[torch.Tensor]) -> list[int]:
    """The order in which the requests with these latents have a layout: those of one height and width behind one
    another."""
    return sorted(range(len(latents)), key=lambda index: latents[index].shape[-2:])


def find_least_side(unet: Any) -> int:
    """The least side of a patch, in latent pixels: on the coarsest level of the U-Net it is two pixels."""
    levels: int = len(unet.config.block_out_channels)
    side: int = 2**levels
    return side


def install_patches(unet: torch.nn.Module) -> None:
    """Hook all layers of a U-Net that look beyond one pixel. Raises `ConfigError` for a convolution that is neither of
    one pixel nor of three by three."""
    for name, module in unet.named_modules():
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1):
            if (module.kernel_size, module.padding, module.dilation) != ((3, 3), (1, 1), (1, 1)):
                raise ConfigError(f"{name} is a convolution that cannot be computed in patches: {module}")
            _replace(module, _convolve)
        elif isinstance(module, torch.nn.GroupNorm):
            _replace(module, lambda layout, stock, norm, patches: layout.normalize(patches, norm))
        elif isinstance(module, Attention):
            _replace(module, _attend)


def _replace(module: Any, compute: Callable[..., torch.Tensor]) -> None:
    """Have a module call `compute` where a layout is active, with it, its stock forward, itself and its arguments."""
    stock = module.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        layout = _ACTIVE.get()
        return stock(*args, **kwargs) if layout is None else compute(layout, stock, module, *args, **kwargs)

    module.forward = forward


def _convolve(layout: PatchLayout, stock: Any, conv: torch.nn.Conv2d, patches: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(layout.surround(patches), conv.weight, conv.bias, conv.stride, groups=conv.groups)


def _attend(
    layout: PatchLayout,
    stock: Callable[..., torch.Tensor],
    attention: Attention,
    tokens: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The tokens of a patch attend to all of its image, or to the text of the image."""
    images = layout.regroup(tokens)
    texts = [None] * len(images) if encoder_hidden_states is None else layout.split_images(encoder_hidden_states)
    attended = [
        stock(image, encoder_hidden_states=text, **kwargs).reshape(-1, *tokens.shape[1:])
        for image, text in zip(images, texts, strict=True)
    ]
    return torch.cat(attended)


def _join(patches: torch.Tensor, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Put images together that lie behind one another: of each part so many, with so many patches (high, wide)."""
    split = torch.split(patches, [rows * high * wide for rows, high, wide in parts])
    channels, side = patches.shape[1:3]
    images = []
    for part, (rows, high, wide) in zip(split, parts, strict=True):
        grid = part.reshape(rows, high, wide, channels, side, side).permute(0, 3, 1, 4, 2, 5)
        images.append(grid.reshape(rows, channels, high * side, wide * side))
    return images


def _take(edges: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
    """The edge of each patch's neighbour; zeros where it has none."""
    return torch.cat([edges, torch.zeros_like(edges[:1])]).index_select(0, neighbours)


def _find_neighbours(images: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The patches above, below, to the left and to the right of each patch, for images of so many patches (high, wide).
    The number of all patches stands for none."""
    total = sum(high * wide for high, wide in images)
    first = 0
    found: list[list[torch.Tensor]] = [[], [], [], []]
    for high, wide in images:
        grid = torch.arange(first, first + high * wide).view(high, wide)
        padded = functional.pad(grid, (1, 1, 1, 1), value=total)
        around = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
        for side, neighbours in zip(found, around, strict=True):
            side.append(neighbours.flatten())
        first += high * wide
    return [torch.cat(side) for side in found]
