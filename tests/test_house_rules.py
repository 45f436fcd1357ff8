"""The rules of the house that a machine can check: imports, sizes of files and directories, names of classes."""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.modules import is_one_of_many
from tests.support.processes import output_of

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
HEAVY = {"torch", "torchao", "diffusers", "transformers", "nixl"}
HEAVY_PLACES = (
    "tridentserve/device/",
    "tridentserve/pipelines/",
    "tridentserve/parallel/",
    "tridentserve/engine/live/",
    "profiler/measure/",
)
RAY_PLACES = ("tridentserve/engine/live/", "deployments/")
# The only places that may ask which kind of device they have. `make gpu-check` measures CUDA without the product.
DEVICE_PLACES = ("tridentserve/device/", "scripts/lib/gpu_check/")
MAX_MODULES = 12
MIN_LINES = 30
# Directories with more modules than that: they have one file per model family, or per script that is started.
WIDE = {"tridentserve/pipelines/adapters", "tridentserve/pipelines/tiny", "scripts"}
# Modules that something outside the code names: Ray Serve's import path.
ENTRY_POINTS = {"deployments.app"}


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


def attributes(text: str) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))


def asks_for_the_device(node: ast.Attribute) -> bool:
    """True for `torch.cuda`, `tensor.is_cuda`, and `device.type` or `torch.device(...).type`."""
    owner = ast.unparse(node.value).lstrip("_")
    of_device = owner.split("(")[0].rpartition(".")[2].lstrip("_") == "device"
    return node.attr == "is_cuda" or (node.attr == "cuda" and owner == "torch") or (node.attr == "type" and of_device)


def test_only_the_device_room_asks_which_device_it_has() -> None:
    wrong = {
        f"{where}:{node.lineno} has {ast.unparse(node)}"
        for path in sources(*ROOMS, "scripts/lib")
        if not (where := path.relative_to(ROOT).as_posix()).startswith(DEVICE_PLACES)
        for node in attributes(path.read_text(encoding="utf-8"))
        if asks_for_the_device(node)
    }
    assert not wrong
    asked = ("torch.cuda.Stream", "slab.is_cuda", "self._device.type", "torch.device(x).type", "tensor.device.type")
    for question in asked:
        assert any(asks_for_the_device(node) for node in attributes(question)), question


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


def test_no_directory_but_the_wide_ones_has_more_than_12_modules() -> None:
    modules = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in sources(*ROOMS, "scripts", "tests")
        if path.name != "__init__.py"
    )
    wide = {where: count for where, count in modules.items() if count > MAX_MODULES}
    assert not {where: count for where, count in wide.items() if where not in WIDE}
    assert set(wide) >= WIDE, "remove what is no exception any more"


def test_no_module_lies_beside_a_directory_of_its_name() -> None:
    assert not [path for path in sources(*ROOMS, "scripts", "tests") if path.with_suffix("").is_dir()]


def type_names(path: Path) -> Iterator[str]:
    """The names of all classes of a file and of the type aliases at its top level, without leading underscores. An
    alias is an assignment to a name in CamelCase, such as `Members = list[str]`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    targets: list[ast.expr] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    names = [target.id.lstrip("_") for target in targets if isinstance(target, ast.Name)]
    yield from (name for name in names if name[:1].isupper() and not name.isupper())
    yield from (node.name.lstrip("_") for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_names_of_classes_and_type_aliases_are_unique() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources(*ROOMS, "scripts"):
        for name in type_names(path):
            places[name].append(path.relative_to(ROOT).as_posix())
    assert not {name: where for name, where in places.items() if len(where) > 1}


def imported_modules(path: Path, known: set[str]) -> Iterator[str]:
    """The full names of the modules among `known` that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "scripts" else parts).removesuffix(".__init__")


def test_no_small_module_has_exactly_one_importer() -> None:
    paths = {module_name(path): path for path in sources(*ROOMS, "scripts")}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for importer, path in paths.items():
        for name in imported_modules(path, set(paths)):
            importers[name].add(importer)
    lonely = {
        name
        for name, path in paths.items()
        if path.name != "__init__.py"
        and not is_one_of_many(path)
        and len(path.read_text(encoding="utf-8").splitlines()) < MIN_LINES
        and len(importers[name]) == 1
    }
    assert not lonely - ENTRY_POINTS
    assert lonely >= ENTRY_POINTS, "remove what is no exception any more"
