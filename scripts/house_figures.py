"""Figures of a code base: files, lines per file and function, share of typed functions, widest directory.

Prints one line per root directory as a Markdown table, and last a JSON object. Tests are not counted. Run it on other
code bases to compare:

    python scripts/house_figures.py . ../httpx ../starlette
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from lib.command_line import Parser

from tridentserve.errors import ConfigError

_SKIPPED = frozenset({"tests", "test", "build", "node_modules", "__pycache__"})
# Only at the top: a package below may have such a name.
_SKIPPED_AT_TOP = frozenset({"docs", "examples"})
# The row of docs/architecture.md that has the figures of the repository itself.
_THIS_TREE = "this tree"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class CodeFigures:
    """The figures of one code base. Lines of a file or function include comments and docstrings."""

    name: str
    files: int
    file_median: float
    file_p90: int
    file_max: int
    function_median: float
    function_p95: int
    function_max: int
    typed_percent: float
    """Share of functions whose arguments (`self` and `cls` aside) and result are all annotated."""
    widest_directory: str
    widest: int
    """Modules in `widest_directory`, `__init__.py` not counted."""


def _list_sources(root: Path) -> list[Path]:
    def is_counted(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return parts[0] not in _SKIPPED_AT_TOP and not any(part in _SKIPPED or part.startswith(".") for part in parts)

    return [path for path in sorted(root.rglob("*.py")) if is_counted(path)]


def _is_typed(function: _Function) -> bool:
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    given += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return function.returns is not None and all(one.annotation or one.arg in ("self", "cls") for one in given)


def _find_percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def measure_code(root: Path) -> CodeFigures:
    """The figures of all Python files below `root`. Raises `ValueError` if there is no file with a function."""
    paths = _list_sources(root)
    texts = [path.read_text(encoding="utf-8") for path in paths]
    functions = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, _Function)]
    if not functions:
        raise ValueError(f"{root} has no Python file with a function; give the root directory of a code base")
    file_lines = [len(text.splitlines()) for text in texts]
    function_lines = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    modules = Counter(path.parent for path in paths if path.name != "__init__.py")
    widest, count = modules.most_common(1)[0]
    return CodeFigures(
        name=root.resolve().name,
        files=len(paths),
        file_median=median(file_lines),
        file_p90=_find_percentile(file_lines, 0.9),
        file_max=max(file_lines),
        function_median=median(function_lines),
        function_p95=_find_percentile(function_lines, 0.95),
        function_max=max(function_lines),
        typed_percent=round(100 * sum(map(_is_typed, functions)) / len(functions), 1),
        widest_directory=widest.relative_to(root).as_posix(),
        widest=count,
    )


def format_row(one: CodeFigures, name: str) -> str:
    """The figures as a row of a Markdown table."""
    file_lines = f"{one.file_median:g} / {one.file_p90} / {one.file_max}"
    function_lines = f"{one.function_median:g} / {one.function_p95} / {one.function_max}"
    widest = f"{one.widest} ({one.widest_directory})"
    return f"| {name} | {one.files} | {file_lines} | {function_lines} | {one.typed_percent:g} | {widest} |"


def fill_house_figures(page: str, root: Path) -> str:
    """The page with the row of the code base below `root`. Raises `ConfigError` if the page has no such row."""
    start = f"| {_THIS_TREE} |"
    if not any(line.startswith(start) for line in page.splitlines()):
        raise ConfigError(f"docs/architecture.md has no row that begins with {start!r}; add one to its house figures")
    row = format_row(measure_code(root), _THIS_TREE)
    return "".join(f"{row}\n" if line.startswith(start) else line for line in page.splitlines(keepends=True))


def main() -> int:
    parser = Parser(prog="house_figures", description=__doc__)
    parser.add_argument("roots", nargs="*", type=Path, default=[Path()], help="root directories (default: this one)")
    roots = parser.parse_args().roots
    for root in roots:
        if not root.is_dir():
            parser.error(f"{root} is not a directory")
    try:
        found = [measure_code(root) for root in roots]
    except (ValueError, SyntaxError) as error:
        parser.error(str(error))
    print("| code base | files | file median / p90 / max | function median / p95 / max | typed % | widest directory |")
    print("|---|---|---|---|---|---|")
    for one in found:
        print(format_row(one, one.name))
    print(json.dumps({one.name: asdict(one) for one in found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
