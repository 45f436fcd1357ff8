"""The rules of the house that a machine can check: which room may import which, and how long a file may be."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import output_of

ROOT = Path(__file__).parent.parent
ROOMS = ("tridentserve", "profiler", "placement", "dispatch", "deployments", "traces")
MAY_IMPORT = {
    "tridentserve": set(),
    "profiler": {"tridentserve"},
    "placement": {"tridentserve", "profiler"},
    "dispatch": {"tridentserve", "profiler"},
    "traces": {"tridentserve"},
    "deployments": {"tridentserve", "profiler", "placement", "dispatch"},
}
HEAVY = {"torch", "diffusers", "transformers", "nixl"}
HEAVY_PLACES = (
    "tridentserve/pipelines/",
    "tridentserve/parallel/",
    "tridentserve/engine/live/",
    "profiler/measure/",
)
RAY_PLACES = ("tridentserve/engine/live/", "deployments/")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    """The top-level names of all modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    allowed = MAY_IMPORT[room] | {room}
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(room)
        for name in imported(path)
        if name in (*ROOMS, "scripts", "tests") and name not in allowed
    }
    assert not wrong


def test_ray_and_torch_stay_in_their_places() -> None:
    wrong = set()
    for path in sources(*ROOMS):
        where = path.relative_to(ROOT).as_posix()
        for name in imported(path):
            misplaced_ray = name == "ray" and not where.startswith(RAY_PLACES)
            misplaced_torch = name in HEAVY and not where.startswith(HEAVY_PLACES)
            if misplaced_ray or misplaced_torch:
                wrong.add(f"{where} imports {name}")
    assert not wrong


@pytest.mark.parametrize(
    "module",
    [
        "tridentserve.scheduling.scheduler",
        "dispatch",
        "placement",
        "profiler",
        "traces",
        "deployments.assembly.planning",
    ],
)
def test_planning_and_replaying_start_without_torch_and_ray(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'ray', *{sorted(HEAVY)!r}}} & set(sys.modules)))"
    assert output_of([sys.executable, "-c", code], ROOT).strip() == "[]"


def test_files_are_one_idea_each() -> None:
    paths = sources(*ROOMS, "scripts", "tests")
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in paths}
    assert not {where: length for where, length in lengths.items() if length > 500}
    assert sorted(lengths.values())[len(lengths) // 2] <= 150


def test_rooms_introduce_themselves() -> None:
    for path in sources(*ROOMS):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"
