"""Processes that are forked: as their interpreter would have started them, but with torch imported already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S, wait_until
from tridentserve.engine.live.spawning import forked_start

SCRIPT = """\
import json, os, sys
found = {
    "arguments": sys.argv[1:], "parent": os.getppid(), "name": __name__, "path": sys.path[0],
    "job": os.environ.get("RAY_JOB_ID"), "torch": "torch" in sys.modules, "ray": "ray" in sys.modules,
    "alone": os.getpgrp() == os.getpid(),
}
print(json.dumps(found), flush=True)
if "fail" in sys.argv:
    raise ValueError("said by the script")
"""
# Starts the script several times, as Ray's process on a node does, and ends.
NODE = """\
import json, os, subprocess, sys
def start(job, *arguments):
    command = [sys.executable, "-I", "-S", sys.argv[1], sys.argv[2], *arguments]
    ended = subprocess.run(command, env=os.environ | {"RAY_JOB_ID": job}, capture_output=True, text=True)
    return [ended.stdout, ended.stderr]
print(json.dumps([start("a", "one two"), start("b", "fail")]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="fork") as path:
        yield Path(path)


def start_node(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """What the script says of each of its processes, and what these write to their standard error."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-c", NODE, forked_start.__file__, str(script)]
    environment = os.environ | {"TMPDIR": str(folder)}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE_S, cwd=folder
    )
    started: Sequence[tuple[str, str]] = json.loads(ended.stdout)
    return [(json.loads(out), err) for out, err in started]


def test_a_process_is_forked_with_its_arguments_streams_and_variables(folder: Path) -> None:
    (first, nothing), (second, failure) = start_node(folder)
    assert first["arguments"] == ["one two"]
    assert nothing == ""
    assert failure.rstrip().endswith("ValueError: said by the script")
    for found in (first, second):
        assert found["torch"]
        assert not found["ray"], "it reads the job when it is imported"
        assert found["name"] == "__main__"
        assert found["path"] == str(folder)
        assert found["alone"], "Ray may end the group of a process without ending others"
    assert [found["job"] for found in (first, second)] == ["a", "b"]
    assert first["parent"] == second["parent"], "one server forks both"
    sockets = folder / f"tridentserve-fork-{os.getuid()}"
    wait_until(lambda: not list(sockets.glob("*.sock")), "the server has ended with the process of the node")


def test_without_a_server_a_process_imports_by_itself(folder: Path) -> None:
    sockets = folder / f"tridentserve-fork-{os.getuid()}"
    sockets.mkdir()
    sockets.chmod(0o755)
    (first, warning), *_ = start_node(folder)
    assert first["arguments"] == ["one two"]
    assert not first["torch"]
    assert "not this user's own" in warning


@pytest.mark.parametrize("name", ["OTHER", "RAY_JOB_ID"])
def test_only_the_job_may_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    before = forked_start._hash_environment()
    monkeypatch.setenv(name, "1")
    assert (forked_start._hash_environment() == before) == (name == "RAY_JOB_ID")


def test_changed_code_has_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is deployed again, on a cluster of Ray that goes on, does not run what it ran before."""
    monkeypatch.setattr(forked_start, "_ROOT", str(tmp_path))
    module = tmp_path / "tridentserve" / "plans.py"
    module.parent.mkdir()
    module.write_text("VERSION = 1")
    before = forked_start._hash_environment()
    assert forked_start._hash_environment() == before
    os.utime(module, ns=(1, 1))
    assert forked_start._hash_environment() != before
