"""Expected seconds of stages as plans run them: the one place where a plan's degree becomes a stage's degree."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from tridentserve.errors import ProfileError
from tridentserve.models.decode_tiles import find_tiled_shape
from tridentserve.packing.rings import plan_rings
from tridentserve.protocols import StageMemory, StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import Stage

# Three channels of float32, what a VAE in float32 gives; one in another number format gives half of it. Blended tiles
# are held twice.
_PIXEL_BYTES = 12
# In a packed step each token has values of its own that modulate it, which a request alone has once: six beside the
# eleven or so that a block has for a token at its peak.
PACKED_PEAK_FACTOR = 2


def stage_degree(times: StageMemory, model: str, stage: Stage, degree: int) -> int:
    """The number of a plan's `degree` workers that really run this stage.

    All of them run D. E and C use the widest degree that was profiled up to it, the leader alone (1) as a rule; the
    others wait.
    """
    if stage is Stage.DIFFUSE or degree == 1:
        return degree
    return max((k for k in times.degrees(model, stage) if k <= degree), default=1)


def stage_seconds(
    times: StageTimes,
    spec: RequestSpec,
    stage: Stage,
    degree: int = 1,
    batch: int = 1,
    num_steps: int | None = None,
) -> float:
    """Seconds of one stage of `batch` requests like `spec` on a plan of `degree` workers; for DIFFUSE `num_steps` steps
    (None: all of the request's). `ProfileError` when that was not profiled."""
    used = stage_degree(times, spec.model, stage, degree)
    seconds = times.seconds(spec.model, stage, spec.shape, used, batch * spec.num_outputs)
    if stage is not Stage.DIFFUSE:
        return seconds
    return seconds * spec.step_share * (spec.num_inference_steps if num_steps is None else num_steps)


def batch_seconds(
    times: StageTimes, specs: Sequence[RequestSpec], stage: Stage, degree: int, num_steps: int | None = None
) -> float:
    """Seconds of one stage of a plan for these requests, which may differ in size; as `stage_seconds` has it."""
    first = specs[0]
    if len({spec.shape for spec in specs}) == 1:
        return stage_seconds(times, first, stage, degree, len(specs), num_steps)
    used = stage_degree(times, first.model, stage, degree)
    members = [(spec.shape, spec.num_outputs) for spec in specs]
    seconds = mixed_seconds(times, first.model, stage, used, members)
    if stage is not Stage.DIFFUSE:
        return seconds
    return seconds * first.step_share * (first.num_inference_steps if num_steps is None else num_steps)


def mixed_seconds(
    times: StageTimes, model: str, stage: Stage, degree: int, members: Sequence[tuple[Shape, int]]
) -> float:
    """Seconds of one stage (per step for DIFFUSE) of a plan at a stage's degree. `members`: the shape and the number of
    outputs of each. Where several workers run D of sizes that differ, the one with the most to do decides."""
    shape, outputs = members[0][0], sum(count for _, count in members)
    if stage is Stage.ENCODE or all(own == shape for own, _ in members):
        return times.seconds(model, stage, shape, degree, outputs)
    if stage is Stage.DECODE:
        return sum(times.seconds(model, stage, own, degree, count) for own, count in members)
    if degree > 1:
        return max(
            sum(times.seconds(model, stage, own, width, count) for own, count, width in held)
            for held in _list_held(members, degree)
        )
    return times.packed_seconds(model, [own for own, count in members for _ in range(count)])


def _list_held(members: Sequence[tuple[Shape, int]], degree: int) -> list[list[tuple[Shape, int, int]]]:
    """The members whose tokens each of `degree` workers holds in a packed step, with the widths of their rings."""
    rings = plan_rings([shape.tokens * outputs for shape, outputs in members], degree)
    pairs = list(zip(members, rings, strict=True))
    return [[(*member, len(ring)) for member, ring in pairs if worker in ring] for worker in range(degree)]


def rank_peaks(
    times: StageMemory,
    model: str,
    stages: Sequence[Stage],
    degree: int,
    members: Sequence[tuple[Shape, int]],
    frugal: bool = False,
    token_ratio: float = 1.0,
) -> tuple[int, ...]:
    """Peak activation bytes on each worker of a plan, in rank order. `members`: the shape and the number of outputs of
    each. A batch is decoded one request after another. Sizes that differ have a ring each where several workers run D.
    `frugal`: E is done so, too, and C in tiles. `token_ratio`: the
    tokens of D relative to those that were profiled. `ProfileError` when that was not profiled."""
    peaks = [0] * degree
    outputs_of: defaultdict[Shape, list[int]] = defaultdict(list)
    for shape, outputs in members:
        outputs_of[shape].append(outputs)
    of_texts = {members[0][0]: [outputs for _, outputs in members]}
    for stage in stages:
        used = stage_degree(times, model, stage, degree)
        if stage is Stage.DIFFUSE and used > 1 and len(outputs_of) > 1:
            for rank, held in enumerate(_list_held(members, used)):
                shares = sum(times.peak_bytes(model, stage, shape, width, outputs) for shape, outputs, width in held)
                peaks[rank] = max(peaks[rank], math.ceil(token_ratio * PACKED_PEAK_FACTOR * shares))
            continue
        one_by_one = stage is Stage.DECODE or (frugal and stage is Stage.ENCODE)
        of_shapes = []
        for shape, each in (of_texts if stage is Stage.ENCODE else outputs_of).items():
            batch = max(each) if one_by_one else sum(each)
            if frugal and stage is Stage.DECODE:
                of_shapes.append(frugal_decode_bytes(times, model, shape, used, batch))
            else:
                of_shapes.append(times.peak_bytes(model, stage, shape, used, batch))
        stage_peak = max(of_shapes) if one_by_one else sum(of_shapes)
        if stage is Stage.DIFFUSE:
            packed = PACKED_PEAK_FACTOR if len(outputs_of) > 1 else 1
            stage_peak = math.ceil(token_ratio * packed * stage_peak)
        peaks[:used] = [max(peak, stage_peak) for peak in peaks[:used]]
    return tuple(peaks)


def frugal_decode_bytes(times: StageMemory, model: str, shape: Shape, degree: int = 1, batch: int = 1) -> int:
    """Peak activation bytes of C where memory is short: that of one tile, of the nearest size that was profiled, and
    the pixels of all tiles; that of the whole where there are no tiles. `ProfileError` when that was not profiled."""
    whole_bytes = times.peak_bytes(model, Stage.DECODE, shape, degree, batch)
    tile = find_tiled_shape(shape)
    if tile is None:
        return whole_bytes
    try:
        tile_bytes = times.peak_bytes(model, Stage.DECODE, tile, degree, batch)
    except ProfileError:  # tiles may be smaller than all that was profiled; activations grow in proportion to pixels
        tile_bytes = math.ceil(whole_bytes * tile.pixels / shape.pixels)
    pixels_bytes = 2 * _PIXEL_BYTES * batch * shape.pixels * shape.num_frames
    return min(tile_bytes + pixels_bytes, whole_bytes)
