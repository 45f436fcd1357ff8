"""Random requests to the running service have the stock pipeline's result bit for bit, for every family.

They are the same in every run, but for those of `--requests-seed`, which `make fuzz` gives.

The last bits depend on the code that matrix libraries choose, and this choice depends on shapes, on the alignment of
weights and activations and on the number of threads: only the service itself has all of these as they are served.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.conftest import Service, decode_image
from tests.pipelines.models import ALL, QUICK, VIDEOS, families, family_of, make_image, make_inputs, stock_result
from tests.support import http
from tests.support.waiting import PATIENCE_S
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, Shape

# The families of the service that all end-to-end tests share; its FLUX may run at degree 2, which is not exact.
SHARED = tuple(family for family in QUICK if family != "flux")
# The lowest and the highest guidance scale. At 1 and below, most families leave out the pass of the negative prompt.
GUIDANCE = {"below 1": (0.0, 0.99), "at 1": (1.0, 1.0), "above 1": (1.01, 8.0)}
# Requests whose results once differed from the stock pipeline's.
REPORTED = [
    make_inputs(128, 128, 20, negative_prompt="", guidance_scale=1.0, seed=1234),
    make_inputs(256, 256, 8, negative_prompt="", guidance_scale=1.0, seed=1234),
]
PROMPTS = ("a red fox", "Ünïcode 灯台 at dawn", "a long road, " * 12)


@pytest.fixture(scope="module")
def all_families(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A second application with all families on three workers of its own: one runs E, one D and one C."""
    from ray import serve

    from deployments.app import build_app
    from deployments.config.app import AppArgs

    folder = tmp_path_factory.mktemp("exactness")
    names = [_name(family) for family in ALL]
    args: dict[str, Any] = {
        "models": [
            {
                "name": _name(family),
                "tiny": family,
                "profile_as": "tiny-wan" if family in VIDEOS else "tiny-flux",
                "limits": {"max_side": 512, "max_frames": 9},
            }
            for family in ALL
        ],
        "profiles": ["tiny-cpu", "tiny-video-cpu"],
        "videos": {"data_dir": str(folder / "videos")},
        "cluster": {"workers_per_node": 3, "memory_mb": 1024, "cpus_per_worker": 0.1},
        "placement": [dict.fromkeys(names, stage) for stage in "EDC"],
        "cache_dir": service.args["cache_dir"],
        "decision_log": str(folder / "decisions.jsonl"),
    }
    serve.run(build_app(AppArgs.model_validate(args)), name="exactness", route_prefix="/exactness")
    yield replace(service, url=f"{service.url}/exactness", decision_log=folder / "decisions.jsonl", args=args)
    serve.delete("exactness")


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("family", families(*ALL, quick=SHARED))
def test_random_requests_have_the_stock_pipelines_result(
    request: pytest.FixtureRequest, service: Service, tiny_cache: Path, family: str, guidance: str
) -> None:
    app, asked = ("tridentserve", service)
    if family not in SHARED:
        app, asked = ("exactness", request.getfixturevalue("all_families"))
    seed = request.config.getoption("requests_seed")
    draw = Random(f"{family}, guidance {guidance}" + (f", seed {seed}" if seed else ""))
    for num_outputs in (1, 1, draw.choice((2, 3))):
        inputs = draw_inputs(draw, family, guidance, num_outputs)
        served = get_frames(app, family, inputs) if family in VIDEOS else get_images(asked, family, inputs)
        check_result(served, tiny_cache, family, inputs, f"pytest --requests-seed={seed} repeats it")


@pytest.mark.parametrize("inputs", REPORTED, ids=lambda inputs: f"{inputs.shape}-{inputs.num_inference_steps}-steps")
def test_reported_requests_have_the_stock_pipelines_result(
    service: Service, tiny_cache: Path, inputs: GenerationInputs
) -> None:
    check_result(get_images(service, "sd3", inputs), tiny_cache, "sd3", inputs)


def check_result(served: NDArray[Any], cache: Path, family: str, inputs: GenerationInputs, note: str = "") -> None:
    expected = np.stack(stock_result(ensure_tiny(family, cache), inputs, "pil"))
    different = np.count_nonzero(served != expected)
    assert different == 0, f"{different} of {served.size} values differ: {inputs}; {note}"


def draw_inputs(draw: Random, family: str, guidance: str, num_outputs: int) -> GenerationInputs:
    """A random request that the tiny model of the family can serve."""
    multiple, is_video = max(16, family_of(family).size_multiple), family in VIDEOS
    most = 192 if not is_video else 64 if family in SHARED else 96
    sides = range(64, most + 1, multiple)
    num_frames = (family_of(family).frame_multiple or 0) * draw.choice((0, 1)) + 1
    shape = Shape(draw.choice(sides), draw.choice(sides), num_frames)
    inputs = make_inputs(
        variant=family,
        prompt=draw.choice(PROMPTS),
        negative_prompt=draw.choice(("", "fog, rain")) if family_of(family).negative_prompt else "",
        shape=shape,
        num_inference_steps=draw.randint(2, 4 if is_video else 8),  # not every stock pipeline can make one
        guidance_scale=round(draw.uniform(*GUIDANCE[guidance]), 2),
        seed=draw.randrange(2**63),
        num_outputs=num_outputs,
    )
    if not family_of(family).image_pixels:
        return inputs
    # These stock pipelines keep the proportions of an image, where the service takes those of the output.
    return replace(inputs, image=make_image(0, 5 * shape.height // 4, 5 * shape.width // 4))


def get_images(service: Service, family: str, inputs: GenerationInputs) -> NDArray[Any]:
    """The images of a request over HTTP, (num_outputs, height, width, 3)."""
    body, route = _make_body(family, inputs), "generations"
    if inputs.image is not None:
        body, route = body | {"image": base64.b64encode(inputs.image).decode()}, "edits"
    if inputs.mask is not None:
        body["mask"] = base64.b64encode(inputs.mask).decode()
    answer = http.post(f"{service.url}/v1/images/{route}", json=body)
    assert answer.status_code == 200, answer.text
    assert {run["degree"] for run in answer.json()["timeline"]} == {1}
    return np.stack([decode_image(entry["b64_json"]) for entry in answer.json()["data"]])


def get_frames(app: str, family: str, inputs: GenerationInputs) -> NDArray[Any]:
    """The videos of a request, (num_outputs, frames, height, width, 3), by the handle: MP4 files are lossy."""
    from ray import serve

    handle: Any = serve.get_app_handle(app)
    body = _make_body(family, inputs) | {"num_frames": inputs.shape.num_frames, "output_format": "frames"}
    if inputs.image is not None:
        body["input_reference"] = inputs.image
    return np.stack(handle.generate.remote(body).result(timeout_s=PATIENCE_S)["frames"])


def _make_body(family: str, inputs: GenerationInputs) -> dict[str, Any]:
    return {
        "model": _name(family),
        "prompt": inputs.prompt,
        "negative_prompt": inputs.negative_prompt,
        "size": f"{inputs.shape.width}x{inputs.shape.height}",
        "num_inference_steps": inputs.num_inference_steps,
        "guidance_scale": inputs.guidance_scale,
        "seed": inputs.seed,
        "n": inputs.num_outputs,
    }


def _name(family: str) -> str:
    return f"tiny-{family}"
