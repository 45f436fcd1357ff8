"""Models of which `expected_load` names no size: requests that name neither a size nor steps are expected of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.assembly.expected_load import assume_load, list_expected_load
from deployments.assembly.planning import assemble_service, list_service_workers
from deployments.assembly.profiles import list_unmeasured, make_cost_model
from deployments.assembly.service_times import make_service_times
from deployments.config.app import AppArgs
from deployments.model_updates.change import build_known_model
from deployments.validation.args import check_args
from tridentserve.models.model_folder import find_shipped_model
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.events import Reject, RequestArrived

FOLDER = find_shipped_model("shapes")


def make_config(cache: Path, model: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A model folder by its path alone."""
    return {
        "models": [{"path": str(FOLDER), "limits": {"max_side": 512}, **(model or {})}],
        "cluster": {"workers_per_node": 2, "memory_mb": 1024},
        "profiles": ["shapes-cpu"],
        "cache_dir": str(cache),
        **more,
    }


def make_args(cache: Path, model: dict[str, Any] | None = None, **more: Any) -> AppArgs:
    return AppArgs.model_validate(make_config(cache, model, **more))


def test_a_folder_by_its_path_alone_is_planned_and_takes_requests(tmp_path: Path) -> None:
    config, args = make_config(tmp_path), make_args(tmp_path)
    assert check_args(config) == []
    assert args.expected_load == []
    (expected,) = list_expected_load(args)
    assert (expected.model, expected.shape, expected.weight) == ("shapes", Shape(512, 512), 1)
    scheduler = assemble_service(args, make_service_times(args), list_service_workers(args)).scheduler
    effects = scheduler.on(
        RequestArrived(RequestSpec("r", "shapes", expected.shape, expected.num_inference_steps)), 0.0
    )
    assert not any(isinstance(effect, Reject) for effect in effects)


def test_a_folder_that_is_measured_at_the_start_needs_no_load_either(tmp_path: Path) -> None:
    config = make_config(tmp_path, profiles=["tiny-cpu"])
    assert check_args(config) == []
    assert [model.name for model in list_unmeasured(AppArgs.model_validate(config))] == ["shapes"]


def test_the_defaults_of_the_model_are_expected(tmp_path: Path) -> None:
    (load,) = assume_load(make_args(tmp_path, {"defaults": {"side": 256, "num_inference_steps": 7}}))
    assert (load.width, load.height, load.num_inference_steps) == (256, 256, 7)
    (video,) = assume_load(make_args(tmp_path, models=[{"tiny": "wan"}]))
    assert video.num_frames > 1


def test_what_is_said_of_a_model_is_all_that_is_expected_of_it(tmp_path: Path) -> None:
    said = {"model": "shapes", "width": 128, "height": 128, "num_inference_steps": 9}
    args = make_args(tmp_path, models=[{"path": str(FOLDER)}, {"tiny": "sd3"}], expected_load=[said])
    assert [load.model for load in list_expected_load(args)] == ["shapes", "tiny-sd3"]
    assert [load.model for load in assume_load(args)] == ["tiny-sd3"]
    known = [build_known_model(args, model, "serving") for model in args.models]
    assert [[load.width for load in one.load] for one in known] == [[128], [1024]]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0),
        ({"replan": {"enabled": True}}, 1),
        ({"dispatch": {"policy": "tetriserve"}}, 1),
    ],
)
def test_nothing_is_expected_where_no_load_is_needed(changes: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert len(assume_load(make_args(tmp_path, placement=["EDC"] * 2, **changes))) == expected


def test_a_default_outside_the_profile_is_named(tmp_path: Path) -> None:
    found = check_args(
        make_config(tmp_path, {"limits": {"max_side": 4096, "max_pixels": 1 << 24}, "defaults": {"side": 4096}})
    )
    assert any(line.startswith("args.expected_load (default of shapes): shapes diffuse") for line in found)
    assert any("list a size that is profiled in expected_load" in line for line in found)


def test_a_default_that_was_not_profiled_is_expected_smaller(tmp_path: Path) -> None:
    """On a CPU what is measured at the start ends below the default of most families."""
    args = make_args(tmp_path, {"defaults": {"side": 1024}, "limits": {"max_side": 1024}})
    assert [load.shape for load in list_expected_load(args)] == [Shape(1024, 1024)]
    times = make_cost_model(args)
    assert [load.shape for load in list_expected_load(args, times)] == [Shape(512, 512)]
    assert [load.width for load in assume_load(args, times)] == [512]
    make_service_times(args)  # which has to know the memory of what is expected
