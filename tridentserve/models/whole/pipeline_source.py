"""The call of a pipeline class, read in the source code of diffusers: to import it would take seconds, and torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The factors that stand for an attribute in a check of sizes, by a word in the name of the attribute: what most VAEs
# and transformers have.
_USUAL_FACTORS = {"scale": 8, "compression": 8, "patch": 2}


@dataclass(frozen=True, slots=True)
class PipelineCall:
    """The `__call__` of a pipeline class."""

    parameters: frozenset[str]
    """The names of its parameters."""
    required: tuple[str, ...]
    """The names of those without a default."""
    defaults: Mapping[str, Any]
    """The defaults that are plain values."""
    size_multiple: int
    """The largest number of pixels of which the class checks that sides are multiples; 1 where it checks none."""


@functools.lru_cache(maxsize=64)
def read_pipeline_call(class_name: str) -> PipelineCall | None:
    """The call of a pipeline class of the installed diffusers; None where it has no class of this name, or one without
    a call."""
    found = _find_class(class_name)
    if found is None:
        return None
    node, bases = found, [found]
    # Of classes that inherit their call, the first base that has one counts.
    while (call := _find_method(node, "__call__")) is None:
        names = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id.endswith("Pipeline")]
        above = next((each for name in names if (each := _find_class(name)) is not None), None)
        if above is None:
            return None
        node = above
        bases.append(node)
    arguments = [*call.args.posonlyargs, *call.args.args][1:] + call.args.kwonlyargs
    given = _list_defaults(call.args)
    return PipelineCall(
        frozenset(argument.arg for argument in arguments),
        tuple(argument.arg for argument in arguments if argument.arg not in given),
        {name: value for name, default in given.items() if (value := _read_literal(default)) is not None},
        max((multiple for each in bases for multiple in _list_size_multiples(each)), default=1),
    )


@functools.cache
def _list_sources() -> tuple[Path, ...]:
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None:
        return ()
    return tuple(sorted((Path(spec.origin).parent / "pipelines").rglob("*.py")))


def _find_class(class_name: str) -> ast.ClassDef | None:
    if not class_name.isidentifier():
        return None
    for path in _list_sources():
        text = path.read_text(encoding="utf-8")
        if f"\nclass {class_name}(" in text:
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and node.name == class_name:
                    return node
    return None


def _find_method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def _list_defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    positional = [*arguments.posonlyargs, *arguments.args]
    last = positional[len(positional) - len(arguments.defaults) :]
    given = {argument.arg: default for argument, default in zip(last, arguments.defaults, strict=True)}
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return given | {argument.arg: default for argument, default in by_name if default is not None}


def _read_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _list_size_multiples(node: ast.ClassDef) -> Iterator[int]:
    """The numbers of which the class asks whether a height is a multiple."""
    for each in ast.walk(node):
        match each:
            case ast.BinOp(left=ast.Name(id="height"), op=ast.Mod(), right=divisor):
                multiple = _estimate_value(divisor)
                if multiple is not None and multiple > 1:
                    yield multiple


def _estimate_value(node: ast.expr) -> int | None:
    """The value of a product of whole numbers and attributes, with the usual values of these; None for others."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            factors = _estimate_value(left), _estimate_value(right)
            return None if factors[0] is None or factors[1] is None else factors[0] * factors[1]
        case ast.Attribute(attr=name):
            return next((factor for word, factor in _USUAL_FACTORS.items() if word in name), None)
        case _:
            return None
