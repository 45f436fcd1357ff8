"""plan.py says in one line what is wrong with a cluster or a workload file, with the file and the key."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = {"nodes": 1, "gpus_per_node": 8, "gpu": "NVIDIA L20", "memory_gb": 48}
SHAPE = {"height": 1024, "width": 1024, "weight": 1.0}
WORKLOAD = yaml.safe_load((ROOT / "traces" / "data" / "mixes" / "flux.1-dev-light.yaml").read_text())
main = runpy.run_path(str(ROOT / "scripts" / "plan.py"))["main"]


def run(folder: Path, capsys: pytest.CaptureFixture[str], cluster: Any, workload: Any, *options: str) -> str:
    """The text on stderr with exit status 2; '' for status 0."""
    paths = {"cluster": folder / "cluster.yaml", "workload": folder / "workload.yaml"}
    paths["cluster"].write_text(yaml.safe_dump(cluster))
    paths["workload"].write_text(yaml.safe_dump(workload))
    status = main([*(f"--{name}={path}" for name, path in paths.items()), *options])
    errors = capsys.readouterr().err
    assert status == (2 if errors else 0)
    return errors


def test_files_without_a_mistake_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, capsys, CLUSTER, WORKLOAD) == ""
    assert run(tmp_path, capsys, [CLUSTER], WORKLOAD, "--handoff-mb", "0") == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_gb": -4}, "memory_gb: Input should be greater than 0"),
        ({"memory_gb": 0}, "memory_gb: Input should be greater than 0"),
        ({"memory_gb": float("inf")}, "memory_gb: Input should be a finite number"),
        ({"memory_mb": -49152}, "memory_mb: unknown key; check its spelling"),
        ({"nodes": 0}, "nodes: Input should be greater than or equal to 1"),
        ({"gpus_per_node": 1.5}, "gpus_per_node: Input should be a valid integer, got a number with a fractional part"),
        ({"intra_node_gb_s": -1}, "intra_node_gb_s: Input should be greater than 0"),
    ],
)
def test_a_cluster_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert run(tmp_path, capsys, CLUSTER | changes, WORKLOAD) == f"plan: {tmp_path / 'cluster.yaml'}: {message}\n"


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ([], "groups: must have 1 or more of them, and has 0"),
        (None, "must be a mapping with the keys nodes, gpus_per_node, gpu, memory_gb, or a list"),
        ({"nodes": 1}, "gpus_per_node: Field required"),
        ([CLUSTER, CLUSTER | {"gpu": "H100"}], "the cluster: nodes have several kinds of GPU (H100, NVIDIA L20)"),
    ],
)
def test_what_is_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: Any, message: str) -> None:
    errors = run(tmp_path, capsys, cluster, WORKLOAD)
    assert errors.startswith(f"plan: {tmp_path / 'cluster.yaml'}: {message}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": []}, "shapes: must have 1 or more of them, and has 0"),
        ({"shapes": None}, "shapes: Input should be a valid tuple"),
        ({"shapes": [SHAPE | {"height": -1024}]}, "shapes.0.height: Input should be greater than 0"),
        ({"shapes": [SHAPE | {"weight": 0}]}, "shapes.0.weight: Input should be greater than 0"),
        ({"requests": []}, "requests: unknown key; check its spelling"),
        ({"rate_per_s": -1}, "rate_per_s: Input should be greater than 0"),
        ({"model": None}, "the mix: model is given neither for the mix nor for"),
    ],
)
def test_a_workload_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    errors = run(tmp_path, capsys, CLUSTER, WORKLOAD | changes)
    assert errors.startswith(f"plan: {tmp_path / 'workload.yaml'}: {message}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("cluster", "options", "message"),
    [
        (CLUSTER | {"memory_gb": 1}, [], "flux.1-dev"),
        (CLUSTER | {"gpu": "NVIDIA L40"}, [], "NVIDIA L40"),
        (CLUSTER, ["--profiles", "missing.csv"], "missing.csv"),
        (CLUSTER, ["--handoff-mb", "1000000"], "flux.1-dev"),
    ],
)
def test_what_cannot_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: Any, options: list[str], message: str
) -> None:
    errors = run(tmp_path, capsys, cluster, WORKLOAD, *options)
    assert errors.startswith("plan: ")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("option", ["--rate=0", "--duration-s=-5", "--max-gpus=0", "--attainment=2"])
def test_options_out_of_range(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, capsys, CLUSTER, WORKLOAD, option)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert errors.startswith(f"plan: argument {option.partition('=')[0]}: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("option", ["--duration-s=60", "--max-gpus=8", "--seed=1"])
def test_options_of_a_question_that_is_not_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, capsys, CLUSTER, WORKLOAD, option)
    assert stopped.value.code == 2
    name = option.partition("=")[0]
    assert capsys.readouterr().err == f"plan: {name} has no meaning without --attainment (see --help)\n"
