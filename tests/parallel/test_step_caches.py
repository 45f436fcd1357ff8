"""What earlier steps found moves with a request: decisions and results are the same at any degree, and when it
changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.parallel.members import Pool
from tests.parallel.test_ulysses import TOLERANCE, plain, run_steps
from tests.pipelines.adapters.test_step_caches import STEPS, find_limit_between, finish, with_limit
from tests.pipelines.models import families, load_stage, make_inputs, start
from tridentserve.pipelines.base import SKIPPED_STEPS
from tridentserve.stages import Stage

CACHING = (
    "sd3",
    "flux",
    "flux2",
    "flux2_klein",
    "wan",
    "wan_i2v",
    "qwen_image",
    "qwen_image_edit",
    "z_image",
    "cogvideox",
    "hunyuan_video",
    "mochi",
    "pixart_sigma",
    "sdxl",
)
DEGREES = (1, 2, 4, 3, 2, 1)


@pytest.mark.parametrize("variant", families(*CACHING))
def test_a_request_takes_what_it_knows_along(pool: Pool, model: Callable[[str], Path], variant: str) -> None:
    folder = model(variant)
    diffuse, begun = load_stage(folder, Stage.DIFFUSE), start(folder, make_inputs(64, 96, steps=STEPS, variant=variant))
    limit = find_limit_between(diffuse, begun)
    expected = finish(diffuse, with_limit(begun, limit))
    state = plain(with_limit(begun, limit))
    for degree in DEGREES:
        results = pool.run(run_steps, degree, folder, state, 1)
        for result in results:
            if isinstance(result, Exception):
                raise result
            assert result["values"] == results[0]["values"]
            for name, tensor in results[0]["tensors"].items():
                assert np.array_equal(result["tensors"][name], tensor)
        state = results[-1]
    assert state["values"][SKIPPED_STEPS] == expected.values[SKIPPED_STEPS] > 0
    assert np.abs(state["tensors"]["latents"] - expected.tensors["latents"].numpy()).max() <= TOLERANCE
