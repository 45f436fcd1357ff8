"""Memory that torch frees on a CPU stays in the process until it is given back."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

import pytest

from tests.support.processes import output_of
from tridentserve.process.heap import list_heap_variables

ROOT = Path(__file__).parents[2]
# Makes and frees a tensor of 64 MiB, and one of 48 MiB: the distance of their beginnings, and the pages that giving
# back frees. (Page faults would depend on the size of the system's pages.)
SCRIPT = """\
import json, threading
from pathlib import Path
import torch
from tridentserve.device import find_device
from tridentserve.process.heap import keep_freed_memory

def find_place(mebibytes):
    return torch.zeros(mebibytes * 2**18).data_ptr()

def count_resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

{prepare}
places = []
run = lambda: places.extend(map(find_place, (64, 48)))
{start}
held = count_resident()
find_device("cpu").free_cached_memory()
print(json.dumps([places[1] - places[0], held - count_resident()]))
"""
IN_A_THREAD = "thread = threading.Thread(target=run); thread.start(); thread.join()"
# Half of the first tensor's pages.
HALF = 2**25 // os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="options of glibc")


@pytest.fixture(autouse=True)
def _usual_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)


def run_script(variables: dict[str, str], prepare: str, start: str) -> list[int]:
    """What `SCRIPT` finds in a process with these variables."""
    script = SCRIPT.format(prepare=prepare, start=start)
    found: list[int] = json.loads(output_of([sys.executable, "-c", script], ROOT, os.environ | variables))
    return found


@pytest.mark.parametrize("is_worker", [True, False])
def test_freed_memory_is_used_again(is_worker: bool) -> None:
    if is_worker:  # its device has a thread of its own
        distance, given_back = run_script(list_heap_variables(), "", IN_A_THREAD)
    else:
        distance, given_back = run_script({}, "keep_freed_memory()", "run()")
    assert 0 <= distance < 2**24, "the second lies within the first"
    assert given_back > HALF


def test_without_the_variables_the_system_gets_it() -> None:
    _, given_back = run_script({}, "", IN_A_THREAD)
    assert given_back < HALF
