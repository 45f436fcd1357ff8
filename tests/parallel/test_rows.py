"""Decoding by several processes together gives the pixels of one, to rounding; in tiles, those of tiles on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.members import Member, Pool
from tests.pipelines.models import ALL, families, load_stage, make_inputs
from tridentserve.errors import ConfigError
from tridentserve.parallel import SequenceGroup, rows, sequence_parallel
from tridentserve.pipelines import load_adapter
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Model = Callable[[str], Path]
# One step of 255: rounding may differ where a value is close to half a step.
ONE_STEP = 1
# Decoders that are unlike those of their family: other norms and shortcuts (Wan 2.2), a factor of 16.
OTHERS = ("wan-2.2-ti2v",)


def decode(
    member: Member, folder: Path, latents: np.ndarray[Any, Any], inputs: GenerationInputs, tile: int | None
) -> Any:
    adapter = member.decoders.get(folder) or load_adapter(folder, frozenset({Stage.DECODE}))
    member.decoders[folder] = adapter
    with sequence_parallel(member.group("decode")):
        return adapter.decode({"latents": torch.from_numpy(latents)}, inputs, tile)


def latents_of(folder: Path, inputs: GenerationInputs) -> torch.Tensor:
    """Any latents of the right shape: the noise that D begins with."""
    condition = load_stage(folder, Stage.ENCODE).encode(inputs)
    return load_stage(folder, Stage.DIFFUSE).prepare(condition, inputs).tensors["latents"]


def together(pool: Pool, folder: Path, inputs: GenerationInputs, degree: int, tile: int | None = None) -> Any:
    latents = latents_of(folder, inputs).numpy()
    first, *others = pool.run(decode, degree, folder, latents, inputs, tile)
    for result in (first, *others):
        if isinstance(result, Exception):
            raise result
    assert all(len(other) == 0 for other in others)
    return first


def alone(folder: Path, inputs: GenerationInputs, tile: int | None = None) -> Any:
    return load_stage(folder, Stage.DECODE).decode({"latents": latents_of(folder, inputs)}, inputs, tile)


def assert_same(one: Any, other: Any) -> None:
    assert one.shape == other.shape
    difference = np.abs(one.astype(int) - other.astype(int))
    assert difference.max() <= ONE_STEP
    assert (difference > 0).mean() < 1e-3


@pytest.mark.parametrize("variant", families(*ALL, *OTHERS, quick=("sd3", "wan", "hunyuan_video")))
@pytest.mark.parametrize("degree", [2, 4])
def test_decoding_together_gives_the_pixels_of_one(pool: Pool, model: Model, variant: str, degree: int) -> None:
    """Ten rows of latents: 5 and 5, or 3, 3, 2 and 2. LTX-2 has half of them."""
    height, width = (160, 96) if variant == "wan-2.2-ti2v" else (80, 48)
    inputs = make_inputs(height, width, variant=variant, num_outputs=2)
    assert_same(together(pool, model(variant), inputs, degree), alone(model(variant), inputs))


@pytest.mark.parametrize("variant", families(*ALL, quick=("flux",)))
def test_tiles_are_those_of_the_family_at_any_degree(pool: Pool, model: Model, variant: str) -> None:
    inputs, tile = make_inputs(96, 112, variant=variant), 128 if variant == "ltx2" else 64
    plain, tiles = alone(model(variant), inputs), alone(model(variant), inputs, tile)
    assert plain.shape == tiles.shape
    assert not np.array_equal(plain, tiles)
    assert_same(together(pool, model(variant), inputs, 2, tile), tiles)
    assert np.array_equal(plain, alone(model(variant), inputs))  # the next decode is as before


def test_fewer_rows_than_members_are_computed_by_all(pool: Pool, model: Model) -> None:
    inputs = make_inputs(16, 64)
    assert_same(together(pool, model("sd3"), inputs, 4), alone(model("sd3"), inputs))


def spoilt(member: Member, folder: Path, latents: np.ndarray[Any, Any], inputs: GenerationInputs) -> Any:
    """Decode with statistics of the norms that are off by a hundredth."""
    stock = SequenceGroup.all_gather

    def all_gather(group: SequenceGroup, shard: torch.Tensor, shapes: Any) -> Any:
        return [part * 1.01 if part.dtype == torch.float64 else part for part in stock(group, shard, shapes)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceGroup, "all_gather", all_gather)
        return decode(member, folder, latents, inputs, None)


def test_an_error_of_a_hundredth_would_be_seen(pool: Pool, model: Model) -> None:
    inputs = make_inputs(80, 48)
    pixels = pool.run(spoilt, 2, model("sd3"), latents_of(model("sd3"), inputs).numpy(), inputs)[0]
    with pytest.raises(AssertionError):
        assert_same(pixels, alone(model("sd3"), inputs))


def downsample(member: Member) -> Any:
    decoder = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3, stride=2, padding=1))
    rows.install(decoder)
    with torch.no_grad(), sequence_parallel(member.group("downsample")):
        return decoder(torch.zeros(1, 1, 8, 8))


def test_what_cannot_be_shared_is_refused(pool: Pool) -> None:
    assert all(isinstance(result, ConfigError) for result in pool.run(downsample, 2))
