"""A service of a model of which nothing but the folder is said, and that no profile table knows: the service measures
the model, serves it, and writes the table."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from deployments.assembly.profiles import list_unmeasured, make_cost_model
from deployments.config.app import AppArgs
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import Shape
from tridentserve.stages import Stage

NAME = "unprofiled"


def test_a_model_without_a_profile_is_served(ray_cluster: None, tiny_cache: Path, tmp_path: Path) -> None:
    from ray import serve

    from deployments.app import build_app

    args = AppArgs.model_validate(
        {
            "models": [{"path": str(ensure_tiny("flux", tiny_cache)), "limits": {"max_side": 128}}],
            "cluster": {"workers_per_node": 2},
            "profiling": {"folder": str(tmp_path)},
            "cache_dir": str(tiny_cache),
        }
    )
    assert list_unmeasured(args)
    try:
        handle = serve.run(build_app(args), name=NAME, route_prefix=None)
        body = {"prompt": "a red circle", "size": "96x96", "num_inference_steps": 2}
        answer = handle.generate.remote(body).result(timeout_s=300)
    finally:
        serve.delete(NAME)
    assert Image.open(io.BytesIO(answer["images"][0])).size == (96, 96)
    assert not list_unmeasured(args)
    times = make_cost_model(args)
    for stage in Stage:
        for side in (64, 96, 128):
            assert times.seconds(args.models[0].name, stage, Shape(side, side)) > 0
