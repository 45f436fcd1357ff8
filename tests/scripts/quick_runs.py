"""Quick runs of the benchmarks: what they print is what docs/benchmarks.md says, and their figures can be true."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from lib.benchmark import list_figures

from tests.support.processes import run
from tests.support.waiting import PATIENCE_S, RAY_TOO_SLOW

ROOT = Path(__file__).parents[2]
# Those that `tests/e2e/test_quick_runs.py` runs, since they need Ray or a service, and those without.
WITH_RAY = (
    "bench_batching",
    "bench_console",
    "bench_control_plane",
    "bench_engine",
    "bench_memory",
    "bench_overhead",
    "bench_quotes",
    "bench_requests",
    "compare_policies",
    "compare_simulation",
    "demo_preemption",
    "judge_service",
)
WITHOUT_RAY = ("bench_cells", "bench_dispatch", "bench_step", "compare_kernels", "evaluate", "train_cache_predictor")
# Some start half a dozen processes one after another that import torch.
_PATIENCE_S = 3 * PATIENCE_S
_ALWAYS = ("machine", "command")
# Differences of medians, which noise may turn around, and weights of a regression.
_SIGNED = re.compile(
    r"weights\.\w+|(streamed|divided)\.beside_whole_bytes|rows\.\d+\.(behind|net_cpu_ms\..*|scheduler_bytes_per_request)|pause_resume\.(small\.)?(here|elsewhere)_(ms|steps)"
)
# Nothing may end in the half second that a quick run looks at.
_MAY_BE_ZERO = re.compile(r"shift\..*_per_s|(events|bytes)_per_s")
_POSITIVE = re.compile(r".*(_s|_ms|ratio|speedup.*|kept.*|per_s)(\.\*)?")


def run_quick(
    script: str,
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    parts: Sequence[str] = (),
    left_out: str = "$",
) -> dict[str, Any]:
    """The JSON object of a script's quick run in `folder`, checked against its documentation. `parts`: the objects of
    it that this run measures, without any all of them. `left_out`: a pattern of how the names of figures begin that it
    leaves out."""
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), "--quick", *arguments]
    ended = run(command, folder, environment, _PATIENCE_S)
    for _ in range(3):
        if RAY_TOO_SLOW in ended.stderr:
            ended = run(command, folder, environment, _PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    result: dict[str, Any] = json.loads(lines[-1], parse_constant=_refuse)
    assert [f"{name}: {result[name]}" for name in _ALWAYS] == [line for line in lines if line.startswith(_ALWAYS)][:2]
    found = {_generalize(name): figure for name, figure in list_figures(result)}
    documented = {
        name
        for name in read_documented_figures(script)
        if (not parts or name.partition(".")[0] in parts) and not re.match(left_out, name)
    }
    assert set(found) == documented | set(_ALWAYS)
    for name, figure in list_figures(result):
        if isinstance(figure, int | float):
            assert math.isfinite(figure), f"{name} is {figure}"
            assert figure >= 0 or _SIGNED.fullmatch(name), f"{name} is {figure}"
            may_be_zero = _SIGNED.fullmatch(name) or _MAY_BE_ZERO.fullmatch(name)
            assert figure > 0 or may_be_zero or not _POSITIVE.fullmatch(_generalize(name)), f"{name} is 0"
    return result


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def _generalize(name: str) -> str:
    """The name as the page has it: `*` stands for a number, or a key that begins with one."""
    return ".".join("*" if part[0].isdigit() else part for part in name.split("."))


def read_documented_figures(script: str) -> set[str]:
    """The names in the first column of the table below a script's heading; `{a,b}` stands for two of them."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = text.partition(f"\n### `{script}.py`\n")[2].partition("\n#")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for text in re.findall(r"`([^`]+)`", cell) for name in _expand(text)}


def _expand(text: str) -> list[str]:
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]
