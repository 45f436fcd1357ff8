"""Completes the published step times on NVIDIA L20 with modelled rows, from the figures of `profiler.l20.figures`.

Deterministic and pure: the shipped table is what `complete` makes of the published rows in it, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from profiler.l20 import figures
from profiler.l20.figures import GPU, MODELS, ModelFigures
from profiler.tables.curves import TokenCurve
from profiler.tables.rows import LinksRow, ProfileRow, ProfileTable, WeightsRow
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# The first is what the paper's authors published; the others are ours.
PUBLISHED = "published: TridentServe authors' research code (PKU-DAIR/Hetu-DiT)"
_MODELLED = "modelled: profiler/l20/figures.py"
_PEAK_BATCH = "modelled: a longer sequence of as many tokens, or one after the other"
# One published time cannot be right: degree 2 as fast as degree 4, and 2.9 times as fast as degree 1.
_OFF_MODEL, _OFF_SHAPE, _OFF_DEGREE = "cogvideox1.5-5b", Shape(768, 432, 33), 2
_OFF_NEIGHBOURS = (Shape(768, 432, 17), Shape(768, 432, 65))
_OFF_SOURCE = "modelled: speedup between those of 17 and 65 frames (published is 0.7519 as for degree 4)"

_StepSeconds = dict[tuple[Shape, int], float]


def complete(published: Sequence[ProfileRow], name: str = "l20.csv") -> ProfileTable:
    """The whole table: `published` DIFFUSE rows of batch 1 (their seconds are kept, their memory is filled in), and
    modelled ENCODE and DECODE rows of the same sizes, batches, weights and links. Rows of other sources are ignored."""
    rows: list[ProfileRow] = []
    for model in MODELS:
        steps = {
            (row.shape, row.degree): row.seconds
            for row in published
            if row.model == model.name and row.source.startswith("published")
        }
        rows += _make_model_rows(model, steps)
    weights = tuple(row for model in MODELS for row in _make_weights_rows(model))
    return ProfileTable(name, tuple(rows), weights, (LinksRow(GPU, figures.LINKS, _MODELLED),))


def _make_model_rows(model: ModelFigures, published: _StepSeconds) -> Iterator[ProfileRow]:
    """The rows of one model, sizes ascending in tokens, each with E, D and C."""
    steps = _add_off_entry(model, published)
    curve = TokenCurve((shape.tokens, seconds) for (shape, degree), seconds in steps.items() if degree == 1)
    for shape in sorted({shape for shape, _ in steps}, key=lambda size: (size.tokens, size)):
        yield from _make_encode_rows(model, shape)
        for degree in sorted(k for size, k in steps if size == shape):
            source = PUBLISHED if (shape, degree) in published else _OFF_SOURCE
            yield _make_row(model, Stage.DIFFUSE, shape, steps[shape, degree], source, degree)
        yield from _make_diffuse_batch_rows(model, shape, steps[shape, 1], curve)
        for degree in figures.DECODE_DEGREES:
            share = figures.DECODE_SERIAL_SHARE + (1 - figures.DECODE_SERIAL_SHARE) / degree
            yield _make_row(model, Stage.DECODE, shape, compute_decode_seconds(model, shape) * share, _MODELLED, degree)


def _add_off_entry(model: ModelFigures, published: _StepSeconds) -> _StepSeconds:
    if model.name != _OFF_MODEL:
        return published
    gains = [published[shape, _OFF_DEGREE] / published[shape, 1] for shape in _OFF_NEIGHBOURS]
    return published | {(_OFF_SHAPE, _OFF_DEGREE): published[_OFF_SHAPE, 1] * math.sqrt(gains[0] * gains[1])}


def _make_encode_rows(model: ModelFigures, shape: Shape) -> Iterator[ProfileRow]:
    single_s = compute_encode_seconds(model)
    for batch in (1, *figures.ENCODE_BATCHES):
        seconds = single_s * (1 + figures.ENCODE_COST_OF_A_FURTHER_PROMPT * (batch - 1))
        yield _make_row(model, Stage.ENCODE, shape, seconds, _MODELLED, batch=batch)


def _make_diffuse_batch_rows(
    model: ModelFigures, shape: Shape, single_s: float, curve: TokenCurve
) -> Iterator[ProfileRow]:
    """A batch is at most as slow as one sequence of as many tokens, whose attention costs more."""
    for batch in figures.DIFFUSE_BATCHES:
        if not curve.covers(batch * shape.tokens):
            return
        seconds = curve.interpolate(batch * shape.tokens)
        if seconds <= (1 - figures.DIFFUSE_BATCH_LEAST_SAVING) * batch * single_s:
            yield _make_row(model, Stage.DIFFUSE, shape, seconds, _PEAK_BATCH, batch=batch)


def _make_row(
    model: ModelFigures, stage: Stage, shape: Shape, seconds: float, source: str, degree: int = 1, batch: int = 1
) -> ProfileRow:
    # The value is as precise as in the file, so that the table in memory is the one that was read.
    seconds = float(f"{seconds:.6g}")
    return ProfileRow(
        model.name,
        GPU,
        stage,
        shape,
        degree,
        batch,
        seconds,
        compute_peak_bytes(model, stage, shape, degree, batch),
        source,
    )


def compute_encode_seconds(model: ModelFigures) -> float:
    """One prompt: two FLOP per parameter and token, or reading the weights once, whichever is slower."""
    compute_s = (
        2 * model.encoder_parameters * figures.PROMPT_TOKENS / (figures.PEAK_FLOPS_PER_S * figures.MATMUL_EFFICIENCY)
    )
    read_s = model.encoder_parameters * figures.BF16_BYTES / figures.PEAK_BYTES_PER_S
    return figures.ENCODE_OVERHEAD_S + max(compute_s, read_s)


def compute_decode_seconds(model: ModelFigures, shape: Shape) -> float:
    """Seconds at degree 1: bytes moved over the bandwidth reached, and attention over the latents where there is any.

    A latent frame costs the same whether it becomes one pixel frame (the first) or `frames_per_token`.
    """
    traffic_bytes = model.decode_traffic_bytes * _count_decoded_pixels(model, shape)
    if shape.num_frames > 1:
        traffic_bytes *= model.temporal_overlap
    seconds = traffic_bytes / (figures.PEAK_BYTES_PER_S * figures.DECODER_BANDWIDTH_EFFICIENCY)
    if model.attends_over_latents:
        latents = shape.pixels / 64
        flops = 4 * latents**2 * figures.DECODER_ATTENTION_WIDTH
        seconds += flops / figures.DECODER_ATTENTION_FLOPS_PER_S
    return figures.DECODE_OVERHEAD_S + seconds


def compute_peak_bytes(model: ModelFigures, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
    """Peak activations on one worker. DIFFUSE shares its tokens among the workers; DECODE gathers its output on the
    leader, so width saves it no memory."""
    if stage is Stage.DECODE:
        live_bytes = model.decode_live_bytes * _count_decoded_pixels(model, shape)
    else:
        width, tokens = model.encoder_width, float(figures.PROMPT_TOKENS)
        if stage is Stage.DIFFUSE:
            width, tokens = model.width, model.guidance_passes * (tokens + shape.tokens)
        live_bytes = figures.LIVE_WIDTHS_PER_TOKEN * width * figures.BF16_BYTES * tokens / degree
    return figures.WORKSPACE_BYTES + math.ceil(batch * live_bytes)


def _count_decoded_pixels(model: ModelFigures, shape: Shape) -> float:
    """Pixels of all frames that the decoder works on (256 per token and frame)."""
    return 256 * shape.tokens * model.frames_per_token


def _make_weights_rows(model: ModelFigures) -> Iterator[WeightsRow]:
    """Weights, and what a stage hands on: the padded prompt's hidden states, 16 latent channels at an eighth of the
    pixels in both directions (2 x 2 per token), three bytes per pixel."""
    encode, diffuse, decode = (
        WeightsRow(model.name, stage, round(figures.BF16_BYTES * parameters), _MODELLED)
        for stage, parameters in (
            (Stage.ENCODE, model.encoder_parameters),
            (Stage.DIFFUSE, model.transformer_parameters),
            (Stage.DECODE, model.decoder_parameters),
        )
    )
    condition_bytes = model.guidance_passes * figures.PROMPT_TOKENS * model.encoder_width * figures.BF16_BYTES
    yield replace(encode, output_bytes=condition_bytes)
    yield replace(diffuse, output_bytes_per_token=16 * 2 * 2 * figures.BF16_BYTES)
    yield replace(decode, output_bytes_per_token=256 * 3 * model.frames_per_token)
