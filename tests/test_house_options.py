"""The rule of the house about options: no option has a default in two places."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import get_type_hints

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deployments.config.app import AppArgs
from deployments.config.base import OptionOf
from dispatch import DispatchOptions
from placement import ReplanOptions
from tests.test_house_rules import ROOMS, ROOT, sources
from tridentserve.engine.options import EngineOptions, WorkerOptions
from tridentserve.models.kernels import Kernels
from tridentserve.models.step_cache import StepCache
from tridentserve.scheduling.scheduler import SchedulerOptions

# Endings of the names of classes that hold options without being decorated with `options`.
_OPTION_CLASSES = ("Options", "Settings", "Policy", "PolicySpec")
# Defaults that bear the name of an option and mean something else, with the reason. The other places still count.
_HOMONYMS = {
    "end*": (
        {"tridentserve/engine/simulated/workers/devices.py", "traces/workloads/named.py"},
        "ends of runs and of bursts",
    ),
    "failures": ({"tridentserve/scheduling/estimation/hot_groups.py"}, "the number of times that a group has failed"),
    "group*": ({"tridentserve/scheduling/estimation/hot_groups.py"}, "bytes of one group, which the option counts"),
    "group_timeout*": ({"profiler/measure/stages.py"}, "processes of a measurement start at different times"),
    "handoff*": ({"scripts/bench_engine.py"}, "the benchmark sends parcels that the shipped buffer cannot hold twice"),
    "max_batch": (
        {"tridentserve/testing/fixed_times.py"},
        "what a stage's times say is worth it",
    ),
    "slo_scale": (
        {"scripts/compare_policies.py"},
        "deadlines over times on one live worker, not over the optimal ones",
    ),
    "num_cpus": ({"scripts/lib/local_service.py"}, "CPUs of a whole Ray, not of a worker"),
    "seed": (
        {
            "scripts/bench_cells.py",
            "scripts/bench_control_plane.py",
            "scripts/judge_service.py",
            "scripts/picture_console.py",
            "traces/client/bodies.py",
            "traces/formats/alibaba.py",
            "traces/formats/azure.py",
            "traces/formats/external.py",
            "traces/workloads/arrivals.py",
            "traces/workloads/named.py",
            "scripts/bench_dispatch.py",
            "scripts/bench_quotes.py",
            "scripts/compare_policies.py",
            "scripts/compare_simulation.py",
            "scripts/demo_preemption.py",
            "scripts/judge.py",
            "scripts/make_trace.py",
            "scripts/train_cache_predictor.py",
            "scripts/train_default_model.py",
        },
        "seeds of other draws than the jitter of a simulation: traces, snapshots, images",
    ),
    "gpus": (
        {"scripts/bench_cells.py", "scripts/bench_dispatch.py", "scripts/bench_quotes.py"},
        "clusters that need several schedulers, the sizes of a table, and the cluster of predictions",
    ),
    "name": (
        {
            "profiler/l20/model.py",
            "traces/formats/alibaba.py",
            "traces/formats/azure.py",
            "traces/formats/servegen.py",
            "scripts/lib/benchmark.py",
        },
        "names of files, formats and benchmarks, not of a policy",
    ),
    "profiles": ({"deployments/config/app.py"}, "a service starts without GPUs; plans and simulations are of GPUs"),
}


def plain(name: str) -> str:
    """An option's name in which a star stands for its unit. Constants and attributes count like fields."""
    return re.sub(r"_(s|ms|mb|bytes)$", "*", name.replace("-", "_").lower().lstrip("_"))


def is_literal(node: ast.expr | None) -> bool:
    """True when a default is written out, such as `8`, `True` or `64 << 20`. None says that there is no value."""
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return False
    return not any(isinstance(part, ast.Name | ast.Attribute | ast.Call) for part in ast.walk(node))


def option_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and (
            any(ast.unparse(one) == "options" for one in node.decorator_list) or node.name.endswith(_OPTION_CLASSES)
        ):
            yield node


def option_names(tree: ast.Module) -> Iterator[str]:
    for one in option_classes(tree):
        for field in one.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield plain(field.target.id)


def defaults_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that get a value that is written out, with the line: parameters, fields of classes, constants, attributes,
    options of command lines, and what stands behind `name or`."""
    for node in ast.walk(tree):
        for name, value in _given(node):
            if value is not None and is_literal(value):
                yield name, value.lineno


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        named = node.args.posonlyargs + node.args.args
        for one, value in zip(reversed(named), reversed(node.args.defaults), strict=False):
            yield one.arg, value
        for one, given in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            yield one.arg, given
    elif isinstance(node, ast.AnnAssign) and (name := _name(node.target)):
        yield name, _field_default(node.value)
    elif isinstance(node, ast.Assign):
        yield from ((name, node.value) for target in node.targets if (name := _name(target)))
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and (name := _name(node.values[0])):
        yield name, node.values[-1]
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        flag = node.args[0].value
        if isinstance(flag, str) and flag.startswith("--"):
            yield from ((flag[2:], word.value) for word in node.keywords if word.arg == "default")


def _name(target: ast.expr) -> str:
    """The name of a variable, or the last one of an attribute."""
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""


def _field_default(value: ast.expr | None) -> ast.expr | None:
    if isinstance(value, ast.Call) and _name(value.func) in ("Field", "field"):
        given = {word.arg: word.value for word in value.keywords}
        made = given.get("default_factory")
        return made.body if isinstance(made, ast.Lambda) else given.get("default")
    return value


@cache
def written_defaults() -> dict[str, list[str]]:
    """By option: the places in product and scripts where a default of that name is written out."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sources(*ROOMS, "scripts")
    }
    names = {name for tree in trees.values() for name in option_names(tree)}
    found: dict[str, list[str]] = {}
    for where, tree in trees.items():
        for name, line in defaults_of(tree):
            if plain(name) in names:
                found.setdefault(plain(name), []).append(f"{where}:{line}")
    return found


def is_homonym(name: str, place: str) -> bool:
    return place.rpartition(":")[0] in _HOMONYMS.get(name, (set(), ""))[0]


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from sections(part)


def numbers_in_help(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Texts of `help=` that write a number out as the default, with the line. `%(default)s` and a constant in an
    f-string print the one that counts."""
    for node in ast.walk(tree):
        for word in node.keywords if isinstance(node, ast.Call) else ():
            for part in ast.walk(word.value) if word.arg == "help" else ():
                if isinstance(part, ast.Constant) and re.search(r"\bdefault:? +[-.]?\d", str(part.value)):
                    yield str(part.value), part.lineno


def test_no_help_text_writes_a_default_out() -> None:
    assert not {
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sources("scripts")
        for text, line in numbers_in_help(ast.parse(path.read_text(encoding="utf-8")))
    }


def test_no_option_has_a_default_in_two_places() -> None:
    found = written_defaults()
    assert len(found) > 40, "the rule has found no option classes"
    own = {name: [place for place in places if not is_homonym(name, place)] for name, places in found.items()}
    assert not {name: places for name, places in own.items() if len(places) > 1}


@pytest.mark.parametrize("name", _HOMONYMS)
def test_homonyms_are_there(name: str) -> None:
    places = written_defaults().get(name, [])
    assert _HOMONYMS[name][0] <= {place.rpartition(":")[0] for place in places}, "remove what is no exception any more"


def test_keys_of_the_configuration_refer_to_the_options_of_the_rooms() -> None:
    owners = {mark.owner for section in sections(AppArgs) for mark in marks(section)}
    names = {plain(name) for owner in owners for name in get_type_hints(owner)}
    own = {
        (section.__name__, key)
        for section in sections(AppArgs)
        for key, field in section.model_fields.items()
        if plain(key) in names
        and field.default not in (None, PydanticUndefined)
        and not any(isinstance(mark, OptionOf) for mark in field.metadata)
    }
    assert own <= {("ModelArgs", "slo_scale")}, "declare these keys with `make_option`"
    assert owners == {
        DispatchOptions,
        EngineOptions,
        Kernels,
        ReplanOptions,
        SchedulerOptions,
        StepCache,
        WorkerOptions,
    }


def marks(section: type[BaseModel]) -> list[OptionOf]:
    return [mark for field in section.model_fields.values() for mark in field.metadata if isinstance(mark, OptionOf)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(a, max_batch=8, *, block_bytes: int = 64 << 20, every=EVERY): ...", ["max_batch", "block*"]),
        ("class A:\n    time_limit_s: float = Field(default=0.25, gt=0)\n    gap: float = field()", ["time_limit*"]),
        ("class A:\n    window_s: float | None = None\n    slowdown: tuple[int, ...] = ()", ["slowdown"]),
        ("class A:\n    sizes: list[int] = field(default_factory=lambda: [1, 2])", ["sizes"]),
        ("parser.add_argument('--max-degree', type=int, default=4)", ["max_degree"]),
        ("_MAX_BATCH = 8\nself._tick_s = 0.5\nother = MAX_BATCH", ["max_batch", "tick*"]),
        ("limit = options.max_batch or 1", ["max_batch"]),
        ("limit = max_batch or MAX_BATCH", []),
        *((f"def f(jitter={value}): ...", ["jitter"]) for value in ("True", "False", "0", "1", "0.0", "1.0", "''")),
    ],
)
def test_the_rule_sees_all_kinds_of_defaults(text: str, names: list[str]) -> None:
    assert [plain(name) for name, _ in defaults_of(ast.parse(text))] == names


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("add('--n', default=3, help='runs (default 3)')", 1),
        ("parser.add_argument('--n', help='runs, '\n'of each (default: 0.5)')", 1),
        ("add('--n', help=f'{WHAT} (default 1,2)')", 1),
        ("add('--n', default=3, help='runs (default %(default)s)')", 0),
        ("add('--n', help=f'runs (default {RUNS:g}; 8 are the most)')", 0),
        ("add('--n', help='a cluster; default: nodes of 8 GPUs')", 0),
    ],
)
def test_the_rule_sees_numbers_in_help_texts(text: str, count: int) -> None:
    assert len(list(numbers_in_help(ast.parse(text)))) == count


def test_the_rule_knows_classes_that_hold_options() -> None:
    text = "@options\nclass A:\n    a_s: int\nclass BOptions:\n    b: int = 1\nclass Other:\n    c: int = 1"
    assert list(option_names(ast.parse(text))) == ["a*", "b"]
