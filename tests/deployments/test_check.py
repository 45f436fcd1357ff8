"""The check of a config file: every problem is one line that names the key, and a good file has none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.check import args_problems, config_problems
from deployments.config import AppArgs
from deployments.profiles import cost_model
from profiler import ProfileRow, ProfileTable, WeightsRow, write_table
from tridentserve.errors import ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

ROOT = Path(__file__).parents[2]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A table of one model, `sd3-like`, from 64x64 to 512x512 on a CPU."""
    rows = tuple(
        ProfileRow("sd3-like", "cpu", stage, Shape(side, side), degree, 1, side / degree / 1000, 1000, "modelled")
        for stage in Stage
        for side in (64, 512)
        for degree in (1, 2, 4)
    )
    weights = tuple(WeightsRow("sd3-like", stage, 100 << 20, "modelled") for stage in Stage)
    write_table(tmp_path / "own.csv", ProfileTable("own", rows, weights))
    return str(tmp_path / "own.csv")


def good(profile: str) -> dict[str, Any]:
    return {
        "models": [{"name": "m", "tiny": "sd3", "profile_as": "sd3-like", "limits": {"max_side": 512}}],
        "cluster": {"workers_per_node": 2, "memory_mb": 512},
        "profiles": [profile],
        "placement": ["DC", "E"],
    }


LOAD = {"model": "m", "width": 512, "height": 512, "num_inference_steps": 4}
TOO_SMALL = {"workers_per_node": 2, "memory_mb": 128}


def write_config(folder: Path, args: dict[str, Any], **app: Any) -> Path:
    file = folder / "config.yaml"
    application = {"name": "tridentserve", "import_path": "deployments.app:build_app", "args": args, **app}
    file.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1"}, "applications": [application]}))
    return file


def test_a_good_file_has_no_problem(profile: str, tmp_path: Path) -> None:
    file = write_config(tmp_path, good(profile), deployments=[{"name": "Api", "num_replicas": 2}])
    assert config_problems(file) == []


def test_profiles_are_read_under_the_name_of_the_model(profile: str) -> None:
    times = cost_model(AppArgs.model_validate(good(profile)))
    assert times.models == ("m",)
    assert times.seconds("m", Stage.DIFFUSE, Shape(512, 512)) == pytest.approx(0.512)
    assert times.weights_bytes("m", Stage.ENCODE) == 100 << 20


@pytest.mark.parametrize(
    ("dispatch", "degrees"), [({}, (1, 2)), ({"max_degree": 1}, (1,)), ({"max_degree": 2}, (1, 2))]
)
def test_degrees_that_may_be_used(dispatch: dict[str, int], degrees: tuple[int, ...], profile: str) -> None:
    times = cost_model(AppArgs.model_validate({**good(profile), "dispatch": dispatch}))
    assert times.degrees("m", Stage.DIFFUSE) == degrees


def test_problems_of_the_args(profile: str, tmp_path: Path) -> None:
    args = good(profile)
    args["models"] += [{"name": "n", "path": str(tmp_path / "none"), "profile_as": "sd3-like"}]
    args["placement"] = [{"m": "EDC"}, {"n": "EDC"}]
    args["models"][0]["limits"] = {"min_side": 32, "max_side": 512}
    args["expected_load"] = [{"model": "m", "width": 1024, "height": 1024, "num_inference_steps": 4}]
    found = args_problems(args)
    assert [line.split(": ")[0] for line in found] == [
        "args.models[1].path",
        "args.models[0].limits.min_side",
        "args.expected_load[0]",
    ]
    assert "model_index.json" in found[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"profiles": ["no-such"]}, "args.profiles[0]: "),
        ({"profiles": ["no/such.csv"]}, "args.profiles[0]: "),
        ({"models": [{"name": "m", "tiny": "sd3"}]}, "args.models[0].name: 'm' is in none of the profile tables"),
        ({"models": [{"name": "m", "tiny": "sd3", "profile_as": "x"}]}, "args.models[0].profile_as: 'x' is in none"),
        ({"cluster": {"workers_per_node": 2, "memory_mb": 512, "device_name": "GPU"}}, "args.profiles: "),
        ({"max_queued": 3}, "args.max_queued: unknown key"),
        ({"placement": "auto", "expected_load": [LOAD], "cluster": TOO_SMALL}, "args.placement: "),
    ],
)
def test_a_problem_of_the_args_names_its_key(changes: dict[str, Any], expected: str, profile: str) -> None:
    found = args_problems({**good(profile), **changes})
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_a_model_folder_tells_its_family(profile: str, tmp_path: Path) -> None:
    index = tmp_path / "model_index.json"
    args = good(profile)
    args["models"] = [{"name": "sd3-like", "path": str(tmp_path), "limits": {"max_side": 512}}]
    for class_name, is_good in (("StableDiffusion3Pipeline", True), ("OtherPipeline", False)):
        index.write_text(json.dumps({"_class_name": class_name}))
        assert (args_problems(args) == []) == is_good
    index.write_text("{")
    assert args_problems(args)[0].startswith("args.models[0].path: ")


def test_two_models_may_share_a_profile(profile: str) -> None:
    args = good(profile)
    args["models"].append({**args["models"][0], "name": "n"})
    args["placement"] = [{"m": "EDC"}, {"n": "EDC"}]
    assert cost_model(AppArgs.model_validate(args)).models == ("m", "n")


def test_a_table_that_repeats_another_is_refused(profile: str) -> None:
    with pytest.raises(ProfileError, match=r"^profiles: "):
        cost_model(AppArgs.model_validate({**good(profile), "profiles": [profile, profile]}))


@pytest.mark.parametrize(
    ("app", "expected"),
    [
        ({"import_path": "no.such.module:app"}, "applications[0].import_path: there is no module 'no.such.module'"),
        ({"import_path": "json:dumps"}, "applications: none has the import_path deployments.app:build_app"),
        ({"import_path": "a:b:c"}, "applications[0].import_path: "),
        ({"arg": {}}, "applications[0].arg: unknown key"),
        ({"deployments": [{"name": "Api", "replicas": 2}]}, "applications[0].deployments[0].replicas: unknown key"),
        ({"deployments": [{"name": "API"}]}, "applications[0].deployments[0].name: there is no such deployment"),
        ({"runtime_env": {"working_dir": "."}}, "applications[0].runtime_env: "),
    ],
)
def test_problems_around_the_args(app: dict[str, Any], expected: str, profile: str, tmp_path: Path) -> None:
    assert any(line.startswith(expected) for line in config_problems(write_config(tmp_path, good(profile), **app)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("applications: [", "is not valid YAML"),
        ("- a", "must be a mapping"),
        ("", "must be a mapping"),
        ("applications: 3", "applications: "),
        ("{}", "applications: "),
        ("applications: []", "applications: none has the import_path"),
        ("applications: []\nhttp_options: {prot: 1}", "http_options.prot: unknown key"),
        ("applications: []\nproxy_location: Nowhere", "proxy_location: "),
    ],
)
def test_files_that_are_no_config(content: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert expected in config_problems(file)[0]
    file.write_bytes(b"\xff\xfe\xff")
    assert "is not valid YAML" in config_problems(file)[0]
    file.unlink()
    assert "cannot be read" in config_problems(file)[0]


def test_the_script_prints_one_line_per_problem(profile: str, tmp_path: Path) -> None:
    file = write_config(tmp_path, {**good(profile), "models": [], "x": 1})
    command = [sys.executable, str(ROOT / "scripts" / "check_config.py"), str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 1
    assert [line.split(": ")[0] for line in lines] == ["applications[0].args.models", "applications[0].args.x"]
