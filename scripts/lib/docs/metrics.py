"""The table of docs/metrics.md, from the code that makes the metrics; all prose is the page's own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tridentserve.errors import ConfigError

# The packages that export metrics.
_PACKAGES = ("tridentserve/engine/live", "deployments")
_KINDS = frozenset({"Counter", "Gauge", "Histogram"})
_START, _END = "<!-- table: start -->\n", "<!-- table: end -->\n"
_HEADER = "| metric | kind | tags | meaning |\n| --- | --- | --- | --- |\n"


@dataclass(frozen=True, slots=True, order=True)
class DeclaredMetric:
    """One metric, as the code declares it."""

    name: str
    """Its name, without the prefix `ray_` that Ray gives it."""
    kind: str
    """`counter`, `gauge` or `histogram`."""
    tags: tuple[str, ...]
    """The names of its tags."""
    meaning: str
    """Its description, a sentence."""


def fill_metrics(page: str, root: Path) -> str:
    """The page with the table of all metrics that the code below `root` exports. Raises `ConfigError` if the page
    has no marks around its table."""
    before, start, rest = page.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise ConfigError(f"docs/metrics.md has no table between {_START!r} and {_END!r}; add these marks")
    table = _HEADER
    for one in list_metrics(root):
        table += f"| `ray_{one.name}` | {one.kind} | {', '.join(one.tags)} | {one.meaning} |\n"
    return before + start + table + end + after


def list_metrics(root: Path) -> list[DeclaredMetric]:
    """All metrics that the live engine and the deployments below `root` make, in the order of their names."""
    files = (path for package in _PACKAGES for path in sorted((root / package).rglob("*.py")))
    texts = (path.read_text(encoding="utf-8") for path in files)
    return sorted(
        one for text in texts if "from ray.util.metrics import" in text for one in _find_declared(ast.parse(text))
    )


def _find_declared(tree: ast.Module) -> Iterator[DeclaredMetric]:
    # Tags that several metrics share stand in a variable.
    shared = {
        target.id: ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name) and all(isinstance(one, ast.Constant) for one in node.value.elts)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _KINDS:
            name, meaning = (ast.literal_eval(argument) for argument in node.args)
            tags = next((one.value for one in node.keywords if one.arg == "tag_keys"), ast.Tuple(elts=[]))
            values = shared[tags.id] if isinstance(tags, ast.Name) else ast.literal_eval(tags)
            yield DeclaredMetric(name, node.func.id.lower(), tuple(values), meaning)
