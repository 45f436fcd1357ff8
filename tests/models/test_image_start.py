"""The steps that a strength leaves, and the schedule that leaves so many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridentserve.models.families import FAMILIES
from tridentserve.models.family import Family
from tridentserve.requests import GenerationInputs, ImageStart, Shape
from tridentserve.stages import Stage

STARTING = [family for family in FAMILIES.values() if family.image_start is not None]
strengths = st.floats(0.01, 1.0)


@given(st.integers(1, 1000), strengths, st.booleans())
def test_a_strength_leaves_its_part_of_the_steps(steps: int, strength: float, rounds_down: bool) -> None:
    left = ImageStart(strength, rounds_down=rounds_down).count_steps(steps)
    assert 0 <= left <= steps
    assert abs(left - steps * strength) < 1 + 1e-9
    assert left > 0 or rounds_down


@given(st.integers(2, 1000), st.integers(1, 100), st.booleans())
def test_any_smaller_number_of_steps_can_be_had(steps: int, percent: int, rounds_down: bool) -> None:
    start = ImageStart(percent / 100, rounds_down=rounds_down)
    inputs = GenerationInputs("x", Shape(64, 64), steps, 5.0, 0, start=start)
    for wanted in {1, inputs.computed_steps // 2, inputs.computed_steps} - {0}:
        if wanted > inputs.computed_steps:
            continue
        fewer = inputs.with_computed_steps(wanted)
        assert fewer.computed_steps == wanted
        assert fewer.num_inference_steps <= steps
        assert fewer.num_inference_steps == steps or start.count_steps(fewer.num_inference_steps + 1) > wanted


def test_requests_from_noise_have_the_steps_that_are_asked_for() -> None:
    inputs = GenerationInputs("x", Shape(64, 64), 9, 5.0, 0)
    assert (inputs.computed_steps, inputs.with_computed_steps(4).num_inference_steps) == (9, 4)


@pytest.mark.parametrize("family", STARTING, ids=lambda family: family.name)
def test_a_family_starts_from_an_image_only_where_it_is_allowed_to(family: Family) -> None:
    plain, allowed = family, family.with_image_start()
    assert (plain.max_images, plain.takes_mask, plain.starts_from_image) == (0, False, False)
    assert (allowed.max_images, allowed.takes_mask, allowed.starts_from_image) == (1, True, True)
    assert (allowed.needs_image, allowed.needs_mask) == (False, False)
    with_vae = {Stage.ENCODE: (*plain.components[Stage.ENCODE], "vae")}
    assert dict(allowed.components) == dict(plain.components) | with_vae
    assert allowed.own_fields == plain.own_fields | {"strength"}
    assert FAMILIES["flux2"].with_image_start() is FAMILIES["flux2"]
