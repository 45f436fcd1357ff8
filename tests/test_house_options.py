"""The rule of the house about options: no option has a default in two places."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deployments.config.app import AppArgs
from deployments.config.base import OptionOf
from dispatch import DispatchOptions
from placement import ReplanOptions
from tests.test_house_rules import ROOMS, ROOT, sources
from tridentserve.engine.options import EngineOptions, WorkerOptions
from tridentserve.models.kernels import Kernels
from tridentserve.scheduling.scheduler import SchedulerOptions

# Values that say that there is none, or that something is off; many things may begin with them.
_NEUTRAL = (None, False, 0, 1, "", ())


def plain(name: str) -> str:
    """An option's name in which a star stands for its unit."""
    return re.sub(r"_(s|ms|mb|bytes)$", "*", name.replace("-", "_"))


def is_literal(node: ast.expr | None) -> bool:
    """True when a default is written out, such as `8` or `64 << 20`, and says something."""
    if node is None or any(isinstance(part, ast.Name | ast.Attribute | ast.Call) for part in ast.walk(node)):
        return False
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return not all(isinstance(part, ast.Constant) and part.value in _NEUTRAL for part in parts)


def option_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(one) == "options" for one in node.decorator_list):
            yield node


def defaults_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that get a written default, with the line: parameters, fields of classes, options of command lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = node.args.posonlyargs + node.args.args
            pairs = [*zip(reversed(named), reversed(node.args.defaults), strict=False)]
            by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            pairs += [(one, value) for one, value in by_name if value]
            yield from ((one.arg, value.lineno) for one, value in pairs if is_literal(value))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = node.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
                value = next((word.value for word in value.keywords if word.arg == "default"), None)
            if is_literal(value):
                yield node.target.id, node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            flag = node.args[0].value
            if isinstance(flag, str) and flag.startswith("--"):
                yield from (
                    (flag[2:], word.value.lineno)
                    for word in node.keywords
                    if word.arg == "default" and is_literal(word.value)
                )


def written_defaults() -> dict[str, list[str]]:
    """By option: the places in product and scripts where a default of that name is written out."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources(*ROOMS, "scripts")}
    names = {
        plain(field.target.id)
        for tree in trees.values()
        for one in option_classes(tree)
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    found: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for name, line in defaults_of(tree):
            if plain(name) in names:
                found.setdefault(plain(name), []).append(f"{path.relative_to(ROOT)}:{line}")
    return found


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from sections(part)


def test_no_option_has_a_default_in_two_places() -> None:
    found = written_defaults()
    assert len(found) > 20, "the rule has found no option dataclasses"
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_keys_of_the_configuration_refer_to_the_options_of_the_rooms() -> None:
    owners = {mark.owner for section in sections(AppArgs) for mark in marks(section)}
    names = {plain(name) for owner in owners for name in owner.__annotations__}
    own = {
        (section.__name__, key)
        for section in sections(AppArgs)
        for key, field in section.model_fields.items()
        if plain(key) in names
        and field.default not in (None, PydanticUndefined)
        and not any(isinstance(mark, OptionOf) for mark in field.metadata)
    }
    assert own <= {("ModelArgs", "slo_scale")}, "declare these keys with `option`"
    assert owners == {DispatchOptions, EngineOptions, Kernels, ReplanOptions, SchedulerOptions, WorkerOptions}


def marks(section: type[BaseModel]) -> list[OptionOf]:
    return [mark for field in section.model_fields.values() for mark in field.metadata if isinstance(mark, OptionOf)]


def test_the_rule_sees_all_kinds_of_defaults() -> None:
    text = (
        "def f(a, max_batch=8, *, block_bytes: int = 64 << 20, every=EVERY): ...\n"
        "class Some:\n    time_limit_s: float = Field(default=0.25, gt=0)\n    window_s: float | None = None\n"
        "parser.add_argument('--max-degree', type=int, default=4)\n"
    )
    found = [plain(name) for name, _ in defaults_of(ast.parse(text))]
    assert sorted(found) == ["block*", "max_batch", "max_degree", "time_limit*"]
