"""Each operator of a U-Net gives in patches what it gives for each image alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from diffusers.models.attention_processor import Attention
from hypothesis import given
from hypothesis import strategies as st

from tridentserve.errors import ConfigError
from tridentserve.pipelines.adapters.patched_unet import LatentSize, PatchLayout, install_patches

CHANNELS = 8
# (rows, height, width) of requests, those of one size behind one another.
MIXES = (
    [(2, 8, 12), (1, 8, 12), (2, 12, 8), (1, 4, 4)],
    [(1, 16, 16), (2, 32, 16)],
    [(3, 8, 8)],
)


def draw_images(mix: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(mix))
    # Means differ from image to image and from place to place, so that wrong statistics and wrong neighbours show.
    return [
        torch.randn(rows, CHANNELS, high, wide, generator=generator) * (index + 1)
        + torch.linspace(-5, 5, high)[:, None]
        + 3 * index
        for index, (rows, high, wide) in enumerate(mix)
    ]


def make_layout(images: Sequence[torch.Tensor]) -> PatchLayout:
    return PatchLayout([LatentSize.measure(image) for image in images], torch.device("cpu"))


def compute_in_patches(module: torch.nn.Module, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The module's results for whole images, computed by patches. Results may be of half the size."""
    layout = make_layout(images)
    with layout.active():
        patches = module(layout.cut(images))
    scale = patches.shape[-1] / layout.cut(images).shape[-1]
    results = [torch.empty(len(i), patches.shape[1], *(int(side * scale) for side in i.shape[2:])) for i in images]
    return make_layout(results).join(patches)


def assert_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], within: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= within


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Conv2d(CHANNELS, 6, 3, padding=1),
        lambda: torch.nn.Conv2d(CHANNELS, 6, 3, padding=1, stride=2),
        lambda: torch.nn.Conv2d(CHANNELS, 6, 1),
        lambda: torch.nn.GroupNorm(2, CHANNELS),
        lambda: torch.nn.GroupNorm(4, CHANNELS, affine=False),
        lambda: torch.nn.Sequential(torch.nn.GroupNorm(2, CHANNELS), torch.nn.SiLU(), torch.nn.Conv2d(8, 8, 3, 1, 1)),
    ],
    ids=["convolution", "downsampling", "one pixel", "group norm", "plain group norm", "norm and convolution"],
)
def test_layers_see_the_whole_image(mix: list[tuple[int, int, int]], make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(1)
    holder, images = torch.nn.Sequential(make()), draw_images(mix)
    for parameter in holder.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        alone = [holder(image) for image in images]
        install_patches(holder)
        assert_equal([holder(image) for image in images], alone, 0.0)
        # Relative to values of up to a few hundred.
        assert_equal(compute_in_patches(holder, images), alone, 1e-4)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("text_tokens", [None, 5], ids=["to the image", "to the text"])
def test_a_patch_attends_to_its_own_image_and_text(mix: list[tuple[int, int, int]], text_tokens: int | None) -> None:
    torch.manual_seed(1)
    attention = Attention(CHANNELS, 8 if text_tokens else None, heads=2, dim_head=4)
    images = [image / 5 for image in draw_images(mix)]
    texts = [torch.randn(len(image), text_tokens or 1, 8) for image in images]
    rows = torch.cat(texts) if text_tokens else None

    def run(image: torch.Tensor, text: torch.Tensor | None) -> torch.Tensor:
        tokens = image.flatten(2).transpose(1, 2)
        found: torch.Tensor = attention(tokens, encoder_hidden_states=text)
        return found.transpose(1, 2).view_as(image)

    with torch.no_grad():
        alone = [run(image, text if text_tokens else None) for image, text in zip(images, texts, strict=True)]
        install_patches(torch.nn.Sequential(attention))
        layout = make_layout(images)
        with layout.active():
            patches = run(layout.cut(images), rows)
    assert_equal(layout.join(patches), alone, 1e-5)


@given(
    mix=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3).map(
        lambda mix: sorted(mix, key=lambda size: size[1:])
    )
)
def test_every_pixel_has_its_neighbours(mix: list[tuple[int, int, int]]) -> None:
    """Whatever the sizes are, a patch with its surroundings is a piece of the image with zeros around it."""
    images = [torch.rand(rows, 1, 2 * high, 2 * wide) for rows, high, wide in mix]
    layout = make_layout(images)
    assert all(torch.equal(one, other) for one, other in zip(layout.join(layout.cut(images)), images, strict=True))
    surrounded = layout.surround(layout.cut(images))
    side = surrounded.shape[-1] - 2
    expected = [
        torch.nn.functional.pad(image, (1, 1, 1, 1))[row, :, top : top + side + 2, left : left + side + 2]
        for image in images
        for row in range(len(image))
        for top in range(0, image.shape[2], side)
        for left in range(0, image.shape[3], side)
    ]
    assert torch.equal(surrounded, torch.stack(expected))


def test_a_convolution_that_looks_further_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be computed in patches"):
        install_patches(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 5, padding=2)))
