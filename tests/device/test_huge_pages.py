"""Large tensors on a CPU lie in huge pages, unless whoever starts the process wants otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path("/sys/kernel/mm/transparent_hugepage")
PROGRAM = """
import torch
import tridentserve.pipelines
from pathlib import Path

def count_kib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

before = count_kib()
tensor = torch.ones(256 << 20, dtype=torch.uint8)
print(count_kib() - before)
"""


def run(**variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(
    not FOLDER.is_dir() or "[madvise]" not in (FOLDER / "enabled").read_text(encoding="utf-8"),
    reason="this machine gives no huge pages to those who ask",
)
def test_large_tensors_lie_in_huge_pages() -> None:
    assert run() > 0
    assert run(THP_MEM_ALLOC_ENABLE="0") == 0
