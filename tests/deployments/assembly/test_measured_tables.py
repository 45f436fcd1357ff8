"""Models without a profile: which ones the service measures, and that later starts read what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.assembly.measured_tables import list_measured_degrees, name_measured_table
from deployments.assembly.profiles import list_missing, list_unmeasured, make_cost_model
from deployments.config.app import AppArgs
from deployments.model_updates.change import find_refusals
from deployments.validation.args import check_args
from profiler import ProfileRow, ProfileTable, WeightsRow, write_table
from tridentserve.errors import ProfileError
from tridentserve.models.model_folder import find_shipped_model, read_family, stage_weights_bytes
from tridentserve.models.number_formats import NumberFormats, find_formats
from tridentserve.requests import Shape
from tridentserve.stages import Stage

FOLDER = find_shipped_model("shapes")
LOAD = {"model": "own", "width": 256, "height": 256, "num_inference_steps": 20}


def make_config(cache: Path, model: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "models": [{"name": "own", "path": str(FOLDER), "limits": {"max_side": 512}, **(model or {})}],
        "cluster": {"workers_per_node": 2, "memory_mb": 1024},
        "expected_load": [LOAD],
        "cache_dir": str(cache),
        **more,
    }


def make_args(cache: Path, model: dict[str, Any] | None = None, **more: Any) -> AppArgs:
    return AppArgs.model_validate(make_config(cache, model, **more))


def write_measured(args: AppArgs) -> None:
    """The table as the service writes it."""
    (model,) = args.models
    rows = tuple(
        ProfileRow(model.name, "cpu", stage, Shape(side, side), 1, 1, side / 1000, side << 10, "measured: here")
        for stage in Stage
        for side in (64, 512)
    )
    held = stage_weights_bytes(FOLDER, find_formats(read_family(FOLDER), NumberFormats(), "cpu"))
    weights = tuple(WeightsRow(model.name, stage, held[stage], "measured: here") for stage in Stage)
    write_table(name_measured_table(model, args), ProfileTable("own", rows, weights))


def test_a_model_without_rows_is_measured_once(tmp_path: Path) -> None:
    args = make_args(tmp_path)
    assert list_unmeasured(args) == list_missing(args) == args.models
    assert check_args(make_config(tmp_path)) == []
    with pytest.raises(ProfileError, match=r"'own' is in none of the profile tables.*a start of the service measures"):
        make_cost_model(args)
    write_measured(args)
    assert list_missing(args) == args.models
    assert list_unmeasured(args) == []
    assert make_cost_model(args).seconds("own", Stage.DIFFUSE, Shape(512, 512)) == pytest.approx(0.512)
    assert check_args(make_config(tmp_path)) == []


def test_the_sizes_that_a_measured_model_cannot_make_are_no_mistake_of_the_configuration(tmp_path: Path) -> None:
    """Its table may end below the limits, where the memory did. An expected size has to be in it all the same."""
    wide = {"limits": {"max_side": 1024}}
    write_measured(make_args(tmp_path, wide))
    assert check_args(make_config(tmp_path, wide)) == []
    large = {**LOAD, "width": 1024, "height": 1024}
    (found,) = check_args(make_config(tmp_path, wide, expected_load=[large]))
    assert found.startswith("args.expected_load[0]: own diffuse at degree 1: 1024x1024 is outside the profiled sizes")


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ({"profile_as": "others"}, {}),
        ({}, {"profiling": {"budget_s": 0}}),
        ({}, {"scheduler": {"cells": 2}, "cluster": {"nodes": 2, "workers_per_node": 2, "memory_mb": 1024}}),
    ],
)
def test_a_model_that_is_not_measured_needs_a_profile(
    model: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    assert list_missing(make_args(tmp_path, model, **more)) == []
    (found,) = check_args(make_config(tmp_path, model, **more))
    assert "is in none of the profile tables" in found
    assert not found.endswith("measures it too")


def test_models_with_rows_for_the_device_are_not_measured(tmp_path: Path) -> None:
    load = [{**LOAD, "model": "shapes"}]
    assert not list_missing(make_args(tmp_path, {"name": "shapes"}, profiles=["shapes-cpu"], expected_load=load))
    tiny: dict[str, Any] = {"models": [{"name": "own", "tiny": "sdxl"}]}
    assert list_missing(make_args(tmp_path, **tiny)) == []
    gpu = {"workers_per_node": 2, "memory_mb": 1024, "device": "cuda", "device_name": "Some GPU"}
    assert len(list_missing(make_args(tmp_path, **tiny, cluster=gpu))) == 1


def test_the_file_is_another_one_when_the_rows_would_be(tmp_path: Path) -> None:
    def name(model: dict[str, Any] | None = None, **more: Any) -> Path:
        args = make_args(tmp_path, model, **more)
        return name_measured_table(args.models[0], args)

    assert name() == name({"limits": {"max_side": 512, "max_steps": 7}}, max_retries=1)
    others = {
        name({"dtype": "bfloat16"}),
        name({"dtype": {"C": "bfloat16"}}),
        name({"attention": "math"}),
        name({"defaults": {"guidance_scale": 0}}),
        name({"limits": {"max_side": 256}}),
        name(cluster={"workers_per_node": 2, "memory_mb": 1024, "cpu_threads": 2}),
        name(cluster={"workers_per_node": 1, "memory_mb": 1024}),
    }
    assert len(others - {name()}) == 7
    assert name({"defaults": {"guidance_scale": 4}}) == name({"defaults": {"guidance_scale": 5}}) == name()
    assert name().parent == tmp_path / "profiles"
    assert name(profiling={"folder": str(tmp_path / "own")}).parent == tmp_path / "own"
    in_group = name({"name": "lab/own"}, expected_load=[{**LOAD, "model": "lab/own"}])
    assert in_group.name.startswith("lab-own-cpu-")


def test_the_folder_can_be_written_to(tmp_path: Path) -> None:
    (found,) = check_args(make_config(tmp_path, profiling={"folder": f"{__file__}/profiles"}))
    assert found == f"args.profiling.folder: {__file__} is a file, it should be a directory"


def test_groups_are_measured_where_one_process_reaches_all_members(tmp_path: Path) -> None:
    assert list_measured_degrees(make_args(tmp_path)) == (1, 2)
    assert list_measured_degrees(make_args(tmp_path, dispatch={"max_degree": 1})) == (1,)
    gpu = {"workers_per_node": 2, "memory_mb": 1024, "device": "cuda", "device_name": "Some GPU"}
    assert list_measured_degrees(make_args(tmp_path, cluster=gpu)) == (1,)


def test_a_running_service_measures_nothing(tmp_path: Path) -> None:
    args = make_args(tmp_path)
    (found,) = find_refusals(args, args, {})
    assert found.startswith("models: no profile has rows of own")
    write_measured(args)
    assert find_refusals(args, args, {}) == []
