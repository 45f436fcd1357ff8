"""Images of all qualities of a request: what the steps that leave out work save, and how close the images are."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from tridentserve.pipelines import PipelineAdapter
from tridentserve.pipelines.base import SKIPPED_STEPS
from tridentserve.requests import GenerationInputs, Quality, Shape

PROMPTS = (
    "a red circle above a blue square",
    "two small yellow stars on a gray background",
    "a large green heart on the left",
    "three orange triangles",
    "a purple cross to the right of a black circle",
    "a pink star in the top left corner on a dark green background",
)
# Wang et al., Image Quality Assessment: From Error Visibility to Structural Similarity (2004).
_SIGMA, _BRIGHTNESS, _CONTRAST = 1.5, (0.01 * 255) ** 2, (0.03 * 255) ** 2

QUALITIES: tuple[Quality, ...] = ("exact", "high", "fast")


@dataclass(frozen=True, slots=True)
class MadeImage:
    """One request, made alone."""

    seconds: float
    """Time of all its denoising steps."""
    skipped: float
    """Share of its steps, or of the patches of its steps, that took over what others had found."""
    pixels: NDArray[np.uint8]


def make_all(
    adapter: PipelineAdapter, side: int, number: int, steps: int, guidance_scale: float
) -> dict[Quality, MadeImage]:
    """Make the request `number` in each quality, one after another. `side` in pixels; `number` chooses the prompt."""
    made: dict[Quality, MadeImage] = {}
    for quality in QUALITIES:
        inputs = GenerationInputs(
            PROMPTS[number % len(PROMPTS)],
            Shape(side, side),
            steps,
            guidance_scale,
            seed=number,
            quality=quality,
        )
        state = adapter.prepare(adapter.encode(inputs), inputs)
        began_s = time.perf_counter()
        while state.step < state.num_steps:
            state = adapter.step(state)
        seconds = time.perf_counter() - began_s
        pixels = adapter.decode(adapter.latents(state), inputs)
        made[quality] = MadeImage(seconds, state.values[SKIPPED_STEPS] / state.num_steps, pixels)
    return made


def compare_qualities(side: int, quality: Quality, made: list[dict[Quality, MadeImage]]) -> dict[str, Any]:
    """The figures of one quality, beside those of `exact`, of all requests that were made."""
    ones, exact = [each[quality] for each in made], [each["exact"] for each in made]
    pairs = list(zip(ones, exact, strict=True))
    return {
        "side": side,
        "quality": quality,
        "skipped": statistics.mean(one.skipped for one in ones),
        "seconds": statistics.median(one.seconds for one in ones),
        "time_ratio": statistics.median(one.seconds / whole.seconds for one, whole in pairs),
        "psnr_db": statistics.mean(measure_psnr(one.pixels, whole.pixels) for one, whole in pairs),
        "ssim": statistics.mean(measure_ssim(one.pixels, whole.pixels) for one, whole in pairs),
    }


def measure_psnr(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in decibels; infinity where all values are equal."""
    error = np.square(one.astype(np.float64) - other).mean()
    return float(10 * np.log10(255**2 / error)) if error else float("inf")


def measure_ssim(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Mean structural similarity of pictures (..., height, width, channels), at most 1."""
    pair = np.stack([one, other]).astype(np.float64)
    sigma = (0.0,) * (pair.ndim - 3) + (_SIGMA, _SIGMA, 0.0)
    means = gaussian_filter(pair, sigma, truncate=3.5)
    variances = gaussian_filter(np.square(pair), sigma, truncate=3.5) - np.square(means)
    covariance = gaussian_filter(pair[0] * pair[1], sigma[1:], truncate=3.5) - means[0] * means[1]
    like = (2 * means[0] * means[1] + _BRIGHTNESS) * (2 * covariance + _CONTRAST)
    return float((like / ((np.square(means).sum(0) + _BRIGHTNESS) * (variances.sum(0) + _CONTRAST))).mean())
