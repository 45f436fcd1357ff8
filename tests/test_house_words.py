"""The rules of the house about words that a machine can check: descriptions are no fragments, and fields are documented
where they are declared."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.test_house_rules import ROOMS, ROOT, sources

_FRAGMENT = re.compile(r"\s*(What|How|Which|Whether|Of)\b")
_HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def text_of(node: ast.AST) -> str | None:
    """The text of a string, or of the part of an f-string ahead of its first value; None for anything else."""
    if isinstance(node, ast.JoinedStr):
        return text_of(node.values[0]) if node.values else ""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def list_descriptions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings of a file, those of fields and constants among them, and its `description=` texts, with their
    lines. The last argument of `make_option` is a description too."""
    for node in ast.walk(tree):
        texts: list[ast.expr] = []
        if isinstance(node, _HAS_DOCSTRING):
            texts += [statement.value for statement in node.body if isinstance(statement, ast.Expr)]
        elif isinstance(node, ast.Call):
            texts += [keyword.value for keyword in node.keywords if keyword.arg == "description"]
            if isinstance(node.func, ast.Name) and node.func.id == "make_option":
                texts += node.args[3:]
        for described in texts:
            if (text := text_of(described)) is not None:
                yield described.lineno, text


def list_undocumented(owner: ast.ClassDef) -> Iterator[str]:
    """The fields of a class that have neither a docstring below them nor a description."""
    for field, below in zip(owner.body, [*owner.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        has_docstring = isinstance(below, ast.Expr) and text_of(below.value) is not None
        given = [] if field.value is None else [node for node in ast.walk(field.value) if isinstance(node, ast.keyword)]
        if not has_docstring and not any(keyword.arg == "description" for keyword in given):
            yield field.target.id


def test_descriptions_are_no_fragments() -> None:
    found = [
        f'{path.relative_to(ROOT)}:{line} begins with "{start.group(1)}": begin with the noun that is described'
        for path in sources(*ROOMS, "scripts")
        for line, text in list_descriptions(ast.parse(path.read_text(encoding="utf-8")))
        if (start := _FRAGMENT.match(text))
    ]
    assert not found, "\n".join(found)


def test_fields_are_documented_where_they_are_declared() -> None:
    found = []
    for path in sources(*ROOMS, "scripts"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                docstring = ast.get_docstring(node) or ""
                named = [name for name in list_undocumented(node) if re.search(rf"`{name}\b", docstring)]
                if len(named) > 1:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: document {named} at the fields")
    assert not found, "\n".join(found)
