#!/usr/bin/env python3
"""Checks this version on a machine with one GPU, where neither Ray nor a network is needed: torch, diffusers and this
folder are enough.

The stages: `tests` (all that are marked gpu), `rates` (bytes between host and GPU, pinned and not, and through NIXL;
memory beside torch's), `steps` (full-size models with random weights: the stock diffusers pipeline, each attention
kernel, compiled; their memory beside what the shipped tables expect), `tables` (profile tables of this GPU). Each check
runs in a process of its own, and its result is in OUT at once; the same command goes on with what is left, and then
tries again what has failed. Models that need more memory than the GPU has are skipped. Without a GPU nothing is
checked. The last line is one JSON object.

Exit status: 0 when all that was asked for is done or skipped (or there is no GPU), 1 when a check failed, 2 for bad
usage, 3 when time was up before the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive
from lib.gpu_check.estimates import add_estimates, estimate_need_bytes
from lib.gpu_check.jobs import Check, CheckRunner, read_last_line
from lib.measure.models import parse_shapes

from tridentserve.cluster import BUDGET_SHARE
from tridentserve.stages import Stage

_ROOT = Path(__file__).parent.parent
_RATE_BYTES = 1 << 30
STAGES = ("tests", "rates", "steps", "tables")
_MEASUREMENTS = ("host", "nixl", "memory")
# Each model at a size that many ask for, the longest videos shortened so that all fit in two runs.
_STEPS = (
    ("sd3-medium", "1024", 10),
    ("flux.1-dev", "1024", 5),
    ("qwen-image", "1024", 4),
    ("wan2.1-1.3b", "832x480x33", 4),
    ("wan2.1-14b", "832x480x33", 2),
    ("hunyuanvideo", "960x544x33", 2),
)
_TABLES = (
    ("sd3-medium", "512,1024,1536", "1,2,4"),
    ("flux.1-dev", "512,1024,1536", "1,2"),
    ("qwen-image", "1024", "1"),
    ("wan2.1-1.3b", "832x480x33,832x480x81", "1"),
    ("hunyuanvideo", "960x544x33", "1"),
    ("wan2.1-14b", "832x480x33", "1"),
)
_FULL_SIZE = ("--random-weights", "--device", "cuda")


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(_ROOT / "scripts" / name), *arguments)


def list_jobs(folder: Path, device: str) -> Iterator[Check]:
    """All checks, in their order. `device` is the GPU's name."""
    report = folder / "tests.xml"
    options = ("-q", "-m", "gpu", "--confcutdir", "tests/gpu", "--junitxml", str(report), "-p", "no:cacheprovider")
    tests = (sys.executable, "-m", "pytest", *options, "--rootdir", str(_ROOT), str(_ROOT / "tests" / "gpu"))
    yield Check("tests", "tests", tests, lambda _: read_report(report))
    for kind in _MEASUREMENTS:
        yield Check("rates", f"rates {kind}", _script("gpu_check.py", "--measure", kind), read_last_line)
    for model, size, rounds in _STEPS:
        need_bytes = _estimate_need(model, size, (Stage.DIFFUSE,), device)
        shared = (model, *_FULL_SIZE, "--sizes", size, "--rounds", str(rounds))
        eager = _script("compare_kernels.py", *shared, "--without-compile", "--stock")
        yield Check("steps", f"steps {model} eager", eager, _read_steps, need_bytes=need_bytes)
        compiled = _script("compare_kernels.py", *shared, "--attention", "sdpa")
        yield Check("steps", f"steps {model} compiled", compiled, _read_steps, need_bytes=need_bytes)
    kept = ("--resume", "--out", str(folder / "profile.csv"))
    for model, sizes, batches in _TABLES:
        points = ("--degrees", "1", "--sizes", sizes, "--batches", batches, "--steps-per-point", "4")
        table = _script("profile_model.py", model, *_FULL_SIZE, *points, *kept)
        yield Check("tables", f"tables {model}", table, _read_said, (0, 3), _estimate_need(model, sizes, Stage, device))


def _estimate_need(model: str, sizes: str, stages: Iterable[Stage], device: str) -> int:
    """That of the smallest size: of a table, larger ones may be left out."""
    return min(estimate_need_bytes(model, shape, stages, device) for shape in parse_shapes(sizes))


def _read_steps(output: str) -> dict[str, Any]:
    return add_estimates(read_last_line(output), torch.cuda.get_device_name(0))


def _read_said(output: str) -> dict[str, Any]:
    return {"said": output.strip().splitlines()[-1]}


def read_report(path: Path) -> dict[str, Any]:
    """The numbers of a report of pytest's, and the names of the tests that did not pass."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    broken = [
        {"test": f"{case.get('classname')}.{case.get('name')}", "said": str(part.get("message"))[:300]}
        for case in suite.iter("testcase")
        for part in case
        if part.tag in ("failure", "error")
    ]
    return {**counts, "broken": broken}


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/gpu-check"), help="directory (default %(default)s)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="stages (default: all)")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="models of steps and tables (default: all)")
    parser.add_argument(
        "--minutes",
        type=make_positive(float),
        default=9.0,
        help="time after which no check goes on (default %(default)s)",
    )
    parser.add_argument("--measure", choices=_MEASUREMENTS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _measure(kind: str) -> dict[str, Any]:
    from lib.gpu_check.overhead import measure_overhead_bytes
    from lib.gpu_check.rates import measure_host_rates, measure_nixl_rate

    if kind == "memory":
        with tempfile.TemporaryDirectory() as scratch:
            return {"bytes": measure_overhead_bytes(Path(scratch))}
    if kind == "nixl" and importlib.util.find_spec("nixl") is None:
        return {"skipped": "nixl is not installed"}
    measured = measure_host_rates(_RATE_BYTES, Path.cwd()) if kind == "host" else measure_nixl_rate(_RATE_BYTES // 4)
    return {"gb_per_s": measured}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    if not torch.cuda.is_available():
        reason = "torch finds no GPU here (torch.cuda.is_available() is False)"
        print(f"gpu_check: nothing was checked: {reason}")
        print(json.dumps({"skipped": reason, "stages": arguments.stages}))
        return 0
    if arguments.measure:
        print(json.dumps(_measure(arguments.measure)))
        return 0
    device = torch.cuda.get_device_name(0)
    run = describe_run(device, f"CUDA {torch.version.cuda}", libraries=("torch", "diffusers", "transformers"))
    memory_bytes = int(BUDGET_SHARE * torch.cuda.get_device_properties(0).total_memory)
    runner = CheckRunner(arguments.out, 60 * arguments.minutes, memory_bytes)
    jobs = [
        job
        for job in list_jobs(arguments.out, device)
        if job.stage in arguments.stages
        and (not arguments.models or job.stage in STAGES[:2] or job.name.split()[1] in arguments.models)
    ]
    left = runner.run(jobs)
    failed, skipped = (runner.list_names(jobs, status) for status in ("failed", "skipped"))
    print_result(run, {"results": runner.results, "failed": failed, "skipped": skipped, "left": left})
    return 1 if failed else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
