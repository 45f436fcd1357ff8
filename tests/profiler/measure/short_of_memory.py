"""Stands in for one step of a group in which one rank has no memory; a module, as other processes import it."""

from __future__ import annotations

from functools import partial

import torch

from profiler.measure import stages as measure_stages
from profiler.measure.stages import MeasuredMember, Sample, Source, sample_diffuse
from tridentserve.requests import GenerationInputs


def diffuse_without_memory(
    poor_rank: int,
    source: Source,
    inputs: GenerationInputs,
    condition: bytes,
    repeats: int,
    batch: int = 1,
    member: MeasuredMember | None = None,
) -> Sample:
    """`sample_diffuse`, but for `poor_rank` of a group."""
    if member is not None and member.rank == poor_rank:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
    if member is not None:  # a process of its own does not see what the test patched
        measure_stages._GROUP_TIMEOUT_S = 3.0
    return sample_diffuse(source, inputs, condition, repeats, batch, member)


rank_0, rank_1 = partial(diffuse_without_memory, 0), partial(diffuse_without_memory, 1)
