"""Which models are warmed up, and at which sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.assembly.service_times import make_service_times
from deployments.config.app import AppArgs
from deployments.preparation.warm_up import choose_shapes, plan_warm_up
from tridentserve.engine.live.warming.warm_up_runs import WarmUpOrder
from tridentserve.models.input_image import open_input_image
from tridentserve.requests import Shape

LOAD = {"model": "m", "width": 256, "height": 256, "num_inference_steps": 8}


def plan(cache: Path, warm_up: str = "always", model: dict[str, Any] | None = None, **more: Any) -> list[WarmUpOrder]:
    cluster = {"workers_per_node": 4, "memory_mb": 1024, "warm_up": warm_up}
    given = {"name": "m", "tiny": "sd3", "limits": {"min_side": 128, "max_side": 512}, **(model or {})}
    args = AppArgs.model_validate(
        {"models": [given], "cluster": cluster, "expected_load": [LOAD], "cache_dir": str(cache), **more}
    )
    return list(plan_warm_up(args, make_service_times(args)))


def test_the_smallest_the_usual_and_the_largest_size_are_chosen() -> None:
    small, usual, wide, large = Shape(64, 64), Shape(512, 512), Shape(256, 1024), Shape(1024, 1024)
    assert choose_shapes([large, usual, small, wide], usual) == [small, usual, large]
    assert choose_shapes([large, small], Shape(900, 900)) == [small, large]
    assert choose_shapes([large], usual) == [large]
    assert choose_shapes([], usual) == []


def test_sizes_are_profiled_ones_that_the_limits_allow(tmp_path: Path) -> None:
    (order,) = plan(tmp_path)
    assert (order.model, order.degrees, order.is_compiled) == ("m", (1, 2, 4), False)
    assert [inputs.shape for inputs in order.requests] == [Shape(128, 128), Shape(512, 512)]
    assert {inputs.num_inference_steps for inputs in order.requests} == {2}
    (narrow,) = plan(tmp_path, model={"defaults": {"side": 256}}, dispatch={"max_degree": 2})
    assert narrow.degrees == (1, 2)
    assert [inputs.shape for inputs in narrow.requests] == [Shape(128, 128), Shape(256, 256), Shape(512, 512)]


def test_sizes_that_take_long_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.preparation.warm_up._LONGEST_S", 0.0)
    (order,) = plan(tmp_path)
    assert order.requests == ()


def test_on_a_cpu_only_compiled_models_are_warmed_up_unless_asked_for(tmp_path: Path) -> None:
    assert plan(tmp_path, "auto") == []
    (order,) = plan(tmp_path, "auto", {"compile": True})
    assert order.is_compiled
    assert plan(tmp_path, "never", {"compile": True}) == []


def test_a_model_that_starts_from_an_image_gets_one(tmp_path: Path) -> None:
    (order,) = plan(tmp_path, model={"tiny": "flux_kontext"})
    assert [open_input_image(inputs).size for inputs in order.requests] == [(128, 128), (512, 512)]
    (video,) = plan(tmp_path, model={"tiny": "wan", "limits": {"max_side": 128, "max_frames": 17}})
    assert [inputs.shape.num_frames for inputs in video.requests][-1] == 17
