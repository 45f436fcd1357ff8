"""The check of a config file: every problem is one line that names the key, and a good file has none."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from deployments.assembly.profiles import make_cost_model
from deployments.config.app import AppArgs
from deployments.validation.args import check_args
from deployments.validation.serve_file import check_config, list_unchecked
from profiler import ProfileRow, ProfileTable, WeightsRow, read_table, write_table
from tests.support.processes import run
from tridentserve.errors import ProfileError
from tridentserve.models.cache import CACHE_ENV
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import Shape
from tridentserve.stages import Stage

ROOT = Path(__file__).parents[3]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A table of one model, `sd3-like`, from 64x64 to 512x512 on a CPU, with 1 KiB of weights in each stage."""
    rows = tuple(
        ProfileRow("sd3-like", "cpu", stage, Shape(side, side), degree, 1, side / degree / 1000, side << 12, "modelled")
        for stage in Stage
        for side in (64, 512)
        for degree in (1, 2, 4)
    )
    weights = tuple(WeightsRow("sd3-like", stage, 1 << 10, "modelled") for stage in Stage)
    write_table(tmp_path / "own.csv", ProfileTable("own", rows, weights))
    return str(tmp_path / "own.csv")


def make_good_config(profile: str) -> dict[str, Any]:
    return {
        "models": [{"name": "m", "tiny": "sd3", "profile_as": "sd3-like", "limits": {"max_side": 512}}],
        "cluster": {"workers_per_node": 2, "memory_mb": 512},
        "profiles": [profile],
        "placement": ["DC", "E"],
    }


def _make_scheduler(**options: Any) -> dict[str, Any]:
    return {"deployments": [{"name": "Scheduler", **options}]}


LOAD = {"model": "m", "width": 512, "height": 512, "num_inference_steps": 4}
TOO_SMALL = {"workers_per_node": 2, "memory_mb": 73, "nodes": 1}


def _make_limits(**limits: int) -> dict[str, Any]:
    return {"models": [{"name": "m", "tiny": "sd3", "profile_as": "sd3-like", "limits": {"max_side": 512, **limits}}]}


def _make_policy(name: str, **replan: bool) -> dict[str, Any]:
    return {"dispatch": {"policy": name}, "expected_load": [LOAD], "replan": replan}


def _make_packing(ring_sizes: tuple[str, ...] = (), **model: Any) -> dict[str, Any]:
    limits = {"max_side": 512}
    return {
        "models": [{"name": "m", "profile_as": "sd3-like", "limits": limits, **model}],
        "dispatch": {"pack_sizes": ["m"], "ring_sizes": list(ring_sizes), "max_batch": 4},
    }


def write_config(folder: Path, args: dict[str, Any], **app: Any) -> Path:
    file = folder / "config.yaml"
    application = {"name": "tridentserve", "import_path": "deployments.app:build_app", "args": args, **app}
    file.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1"}, "applications": [application]}))
    return file


def test_each_cell_has_a_scheduler_and_the_first_has_the_models_of_all(profile: str, tmp_path: Path) -> None:
    args = make_good_config(profile)
    args |= {"scheduler": {"cells": 2}, "cluster": {**args["cluster"], "nodes": 2}, "placement": ["DC", "E"] * 2}

    def check(**override: Any) -> list[str]:
        return check_config(write_config(tmp_path, args, deployments=[override]))

    assert check(name="Scheduler-1", health_check_period_s=3) == []
    (unknown,) = check(name="Scheduler-2")
    assert unknown.endswith("there is no such deployment; there are Scheduler, Scheduler-1, Api, Videos")
    (twice,) = check(name="Scheduler-1", user_config={"drain_timeout_s": 1})
    assert "user_config: give it to Scheduler, whose models all cells follow" in twice
    (two,) = check(name="Scheduler-1", num_replicas=2)
    assert "Scheduler-1 has exactly one replica" in two
    args["scheduler"] = {"cells": 10**12}
    (too_many,) = check(name="Scheduler", health_check_period_s=3)
    assert "more than cluster.nodes" in too_many


def test_a_good_file_has_no_problem(profile: str, tmp_path: Path) -> None:
    file = write_config(tmp_path, make_good_config(profile), deployments=[{"name": "Api", "num_replicas": 2}])
    assert check_config(file) == []


def test_profiles_are_read_under_the_name_of_the_model(profile: str) -> None:
    times = make_cost_model(AppArgs.model_validate(make_good_config(profile)))
    assert times.models == ("m",)
    assert times.seconds("m", Stage.DIFFUSE, Shape(512, 512)) == pytest.approx(0.512)
    assert times.weights_bytes("m", Stage.ENCODE) == 1 << 10


@pytest.mark.parametrize(
    ("dispatch", "degrees"), [({}, (1, 2)), ({"max_degree": 1}, (1,)), ({"max_degree": 2}, (1, 2))]
)
def test_degrees_that_may_be_used(dispatch: dict[str, int], degrees: tuple[int, ...], profile: str) -> None:
    times = make_cost_model(AppArgs.model_validate({**make_good_config(profile), "dispatch": dispatch}))
    assert times.degrees("m", Stage.DIFFUSE) == degrees


def test_problems_of_the_args(profile: str, tmp_path: Path) -> None:
    args = make_good_config(profile)
    args["models"] += [{"name": "n", "path": str(tmp_path / "none"), "profile_as": "sd3-like"}]
    args["placement"] = [{"m": "EDC"}, {"n": "EDC"}]
    args["models"][0]["limits"] = {"min_side": 32, "max_side": 512}
    args["expected_load"] = [{"model": "m", "width": 1024, "height": 1024, "num_inference_steps": 4}]
    found = check_args(args)
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
        (
            {"models": [{"name": "m", "path": "some-lab/some-model", "profile_as": "x"}]},
            "args.models[0].profile_as: 'x' is in none",
        ),
        ({"models": [{"name": "m", "tiny": "sd3", "profile_as": "x"}]}, "args.models[0].profile_as: 'x' is in none"),
        ({"cluster": {"workers_per_node": 2, "memory_mb": 512, "device_name": "GPU"}}, "args.profiles: "),
        ({"max_queued": 3}, "args.max_queued: unknown key"),
        ({"placement": "auto", "expected_load": [LOAD], "cluster": TOO_SMALL}, "args.placement: "),
        ({"cluster": TOO_SMALL}, "args.models[0].limits.max_side: m cannot make 512x512 here: DC workers: no aux"),
        ({"placement": ["EDC"]}, "args.placement: the placement lists 1 workers and there are 2"),
        ({"placement": ["E", "C"]}, "args.placement: no worker holds the diffuse stage of m"),
        ({"placement": ["DC", "DC"]}, "args.placement: worker n0w0 holds DC of m and can never run a request"),
        ({"placement": ["EDC", {}]}, "args.placement: worker n0w1 holds nothing"),
        (_make_limits(min_side=100, max_side=100), "args.models[0].limits: no size is left: sides are multiples of 16"),
        (_make_limits(min_side=128, max_side=64), "args.models[0].limits: no size is left"),
        (_make_limits(min_side=128, max_pixels=128 * 127), "args.models[0].limits: no size is left"),
        (
            _make_limits(max_side=1024, max_pixels=512 * 528),
            "args.models[0].limits.max_pixels: m diffuse at degree 1: 528x",
        ),
        (
            {**_make_policy("b5"), "placement": "auto"},
            "args.dispatch.policy: b5: a cluster for each stage needs 3 workers",
        ),
        ({**_make_policy("b5", enabled=True)}, "args.dispatch.policy: b5: "),
        (
            {**_make_policy("tetriserve", enabled=True)},
            "args.replan.enabled: policy tetriserve keeps its first placement",
        ),
        ({"cache_dir": f"{__file__}/cache"}, f"args.cache_dir: {__file__} is a file"),
        ({"replicas": {"host_dir": f"{__file__}/host"}}, f"args.replicas.host_dir: {__file__} is a file"),
        ({"decision_log": f"{__file__}/log"}, f"args.decision_log: {__file__} is a file"),
        ({"loras_file": str(ROOT)}, "args.loras_file: is a directory"),
        ({"decision_log": str(ROOT)}, "args.decision_log: is a directory"),
        (
            _make_packing(tiny="z_image"),
            "args.dispatch.pack_sizes: m is of the family z_image; those of sd3, flux, sdxl, wan",
        ),
        (
            _make_packing(("m",), tiny="sdxl"),
            "args.dispatch.ring_sizes: m is of the family sdxl, whose tokens no workers can share",
        ),
        (
            {**_make_packing(("m",), tiny="sd3"), "dispatch": {"ring_sizes": ["m"], "max_batch": 4}},
            "args.dispatch.ring_sizes: m is not in dispatch.pack_sizes",
        ),
        (_make_packing(tiny="sd3", compile=True), "args.dispatch.pack_sizes: m has attention sdpa, compiled; only"),
    ],
)
def test_a_problem_of_the_args_names_its_key(changes: dict[str, Any], expected: str, profile: str) -> None:
    found = check_args({**make_good_config(profile), **changes})
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_a_model_folder_shows_its_family(profile: str, tmp_path: Path) -> None:
    args = make_with_model_folder(profile, tmp_path)
    assert check_args(args) == []
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusion3Pipeline", "OtherPipeline"))
    assert "'OtherPipeline', which the installed diffusers does not have" in check_args(args)[0]
    index.write_text("{")
    assert check_args(args)[0].startswith("args.models[0].path: ")


def make_with_model_folder(profile: str, folder: Path, **model: Any) -> dict[str, Any]:
    """A model folder whose loaded weights are those of the profile: 256 float32 in each stage, stored as float16."""
    index: dict[str, Any] = {"_class_name": "StableDiffusion3Pipeline"}
    elements = {"text_encoder": 128, "text_encoder_2": 128, "transformer": 256, "vae": 256}
    for name in (*elements, "tokenizer", "tokenizer_2", "scheduler"):
        library = "transformers" if name.startswith(("text", "token")) else "diffusers"
        index[name] = [library, "SomeClass"]
        (folder / name).mkdir()
        if name in elements:
            file = "model" if library == "transformers" else "diffusion_pytorch_model"
            save_file({"weight": np.zeros(elements[name], np.float16)}, folder / name / f"{file}.safetensors")
    (folder / "model_index.json").write_text(json.dumps(index))
    return {
        **make_good_config(profile),
        "models": [{"name": "sd3-like", "path": str(folder), "limits": {"max_side": 512}, **model}],
    }


def test_a_model_folder_is_complete(profile: str, tmp_path: Path) -> None:
    args = make_with_model_folder(profile, tmp_path)
    weights = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (cut,) = check_args(args)
    assert cut.startswith(f"args.models[0].path: {weights} is cut short")
    weights.unlink()
    (missing,) = check_args(args)
    assert missing.startswith(f"args.models[0].path: {weights} is missing")


@pytest.mark.parametrize(("elements", "is_good"), [(180, True), (370, True), (160, False), (400, False)])
def test_the_weights_are_those_of_the_profile(elements: int, is_good: bool, profile: str, tmp_path: Path) -> None:
    args = make_with_model_folder(profile, tmp_path, name="m", profile_as="sd3-like")
    save_file(
        {"weight": np.zeros(elements, np.float16)}, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    found = check_args(args)
    assert (found == []) == is_good
    assert all(line.startswith("args.models[0].profile_as: the weights of diffuse are ") for line in found)


def test_the_dtype_counts_for_the_weights(profile: str, tmp_path: Path) -> None:
    (found,) = check_args(make_with_model_folder(profile, tmp_path, dtype="bfloat16"))
    assert found.startswith("args.models[0].name: the weights of encode are 0.0 MiB")
    assert found.endswith("or set the `dtype` that was profiled")


def test_a_profile_of_another_format_is_not_taken_for_int8(profile: str, tmp_path: Path) -> None:
    args = make_with_model_folder(profile, tmp_path, dtype={"D": "int8"})
    matrices = {"layer.weight": np.zeros((16, 16), np.float16)}
    save_file(matrices, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    (found,) = check_args(args)
    assert found.startswith("args.models[0].name: the weights of diffuse are 0.0 MiB")
    assert found.endswith("or set the `dtype` that was profiled")


def test_each_stage_counts_with_its_own_number_format(profile: str, tmp_path: Path) -> None:
    (found,) = check_args(make_with_model_folder(profile, tmp_path, dtype={"E": "float32", "C": "float16"}))
    assert found.startswith("args.models[0].name: the weights of decode are 0.0 MiB")


def test_a_size_that_is_profiled_at_higher_degrees_only_is_good(profile: str) -> None:
    table = read_table(profile)
    rows = tuple(row for row in table.rows if (row.stage, row.degree, row.shape) != (Stage.DIFFUSE, 1, Shape(512, 512)))
    more = replace(rows[0], stage=Stage.DIFFUSE, degree=1, shape=Shape(256, 256))
    write_table(Path(profile), replace(table, rows=(*rows, more)))
    assert check_args({**make_good_config(profile), "placement": ["EDC", "EDC"]}) == []
    (found,) = check_args(make_good_config(profile))
    assert found.startswith("args.models[0].limits.max_side: m cannot make 512x512 here")


def test_a_service_with_too_little_memory_is_reported() -> None:
    config = yaml.safe_load((ROOT / "deployments" / "tiny.yaml").read_text())
    args = config["applications"][0]["args"]
    args["cluster"]["memory_mb"] = 79
    found = check_args(args)
    assert found
    assert all("bytes beside the handoff buffer and need" in line for line in found)


def test_a_cache_directory_of_an_unknown_home_is_refused(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_ENV, "~nobody-here/cache")
    (found,) = check_args(make_good_config(profile))
    assert found.startswith("args.cache_dir: ~nobody-here/cache names no known home directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_directory_that_is_read_only(profile: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert check_args({**make_good_config(profile), "cache_dir": str(tmp_path / "cache")})[0].startswith(
        "args.cache_dir: "
    )


def test_two_models_may_share_a_profile(profile: str) -> None:
    args = make_good_config(profile)
    args["models"].append({**args["models"][0], "name": "n"})
    args["placement"] = [{"m": "EDC"}, {"n": "EDC"}]
    assert make_cost_model(AppArgs.model_validate(args)).models == ("m", "n")


def test_a_table_that_repeats_another_is_refused(profile: str) -> None:
    with pytest.raises(ProfileError, match=r"^profiles: "):
        make_cost_model(AppArgs.model_validate({**make_good_config(profile), "profiles": [profile, profile]}))


@pytest.mark.parametrize(
    ("app", "expected"),
    [
        ({"import_path": "no.such.module:app"}, "applications[0].import_path: there is no module 'no.such.module'"),
        ({"import_path": "json:dumps"}, "applications: none has the import_path deployments.app:build_app"),
        ({"import_path": "a:b:c"}, "applications[0].import_path: "),
        ({"arg": {}}, "applications[0].arg: unknown key"),
        ({"deployments": [{"name": "Api", "replicas": 2}]}, "applications[0].deployments[0].replicas: unknown key"),
        ({"deployments": [{"name": "API"}]}, "applications[0].deployments[0].name: there is no such deployment"),
        (_make_scheduler(num_replicas=2), "applications[0].deployments[0].num_replicas: Scheduler has exactly one"),
        (_make_scheduler(num_replicas="auto"), "applications[0].deployments[0].num_replicas: "),
        (
            _make_scheduler(autoscaling_config={"max_replicas": 1}),
            "applications[0].deployments[0].autoscaling_config: ",
        ),
        (
            _make_scheduler(placement_group_bundles=[{"CPU": 1}]),
            "applications[0].deployments[0].placement_group_bundles: ",
        ),
        ({"runtime_env": {"working_dir": "."}}, "applications[0].runtime_env: "),
    ],
)
def test_problems_around_the_args(app: dict[str, Any], expected: str, profile: str, tmp_path: Path) -> None:
    assert any(
        line.startswith(expected) for line in check_config(write_config(tmp_path, make_good_config(profile), **app))
    )


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
        ("applications: []\nhttp_options:", "http_options: "),
        ("applications: []\nhttp_options: {port: 99999}", "http_options.port: must be 1 to 65535"),
        ("applications: []\nhttp_options: {port: 0}", "http_options.port: must be 1 to 65535"),
        ("applications: []\nhttp_options:\n  port: 1\n  port: 2\n", "port: stands twice, in lines 3 and 4"),
        ("applications: [{import_path: a:b,\n args: {x: 1,\n x: 2}}]", "x: stands twice, in lines 2 and 3"),
    ],
)
def test_files_that_are_no_config(content: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert expected in check_config(file)[0]
    file.write_bytes(b"\xff\xfe\xff")
    assert "is not valid YAML" in check_config(file)[0]
    file.unlink()
    assert "cannot be read" in check_config(file)[0]


def test_the_script_prints_one_line_per_problem(profile: str, tmp_path: Path) -> None:
    file = write_config(tmp_path, {**make_good_config(profile), "models": [], "x": 1})
    command = [sys.executable, str(ROOT / "scripts" / "check_config.py"), str(file)]
    ended = run(command, ROOT)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 1
    assert [line.split(": ")[0] for line in lines] == ["applications[0].args.models", "applications[0].args.x"]


def test_what_only_the_start_can_measure_is_told(tmp_path: Path, tiny_cache: Path) -> None:
    """Nothing can be planned with a model that has no profile; that weights cannot be divided shows anyway."""
    model = {"name": "own", "path": str(ensure_tiny("sdxl", tiny_cache))}
    cluster = {"workers_per_node": 1, "device": "cuda", "device_name": "my-gpu", "memory_mb": "auto"}
    app = {"name": "a", "route_prefix": "/", "import_path": "deployments.app:build_app"}
    file = tmp_path / "config.yaml"

    def write(**changes: Any) -> None:
        args = {"models": [model | changes], "cluster": cluster, "cache_dir": str(tmp_path)}
        file.write_text(json.dumps({"applications": [app | {"args": args}]}))

    write()
    assert check_config(file) == []
    (line,) = list_unchecked(file)
    assert line.startswith("applications[0].args.models[0]: own has no profile for the device (my-gpu) and")
    assert "(cluster.memory_mb: auto, weights: auto)" in line
    write(weights="divided")
    (problem,) = check_config(file)
    assert "models[0].weights: 'divided' cannot be with cluster.workers_per_node: 1" in problem
