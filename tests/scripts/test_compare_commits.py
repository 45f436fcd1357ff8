"""compare_commits.py on a repository of two commits with a trivial benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from compare_commits import main

from tests.support.processes import output_of, run

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_commits.py"
# Prints the figure of the package beside it, and notes in a file which side it was.
BENCH = """
import json, sys
from pathlib import Path
import package
with open(sys.argv[1], "a") as log:
    log.write(f"{package.SECONDS}\\n")
print("machine: this one")
print(json.dumps({"rows": [{"took_s": package.SECONDS, "idle_s": 0.0}], "name": "x", "good": True}))
sys.exit(package.STATUS)
"""


def git(folder: Path, *words: str) -> str:
    author = ["-c", "user.name=Somebody", "-c", "user.email=somebody@localhost", "-c", "commit.gpgsign=false"]
    return output_of(["git", "-C", str(folder), *author, *words]).strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Its commit took 2 s, its working tree takes 3 s."""
    folder = tmp_path / "repository"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts" / "bench.py").write_text(BENCH)
    (folder / "package.py").write_text("SECONDS, STATUS = 2.0, 0\n")
    git(tmp_path, "init", "--quiet", str(folder))
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "base")
    (folder / "package.py").write_text("SECONDS, STATUS = 3.0, 0\n")
    return folder


def command(repository: Path, *arguments: str) -> list[str]:
    start = [sys.executable, str(SCRIPT), "scripts/bench.py", "--base", "HEAD", "--repository", str(repository)]
    return [*start, *arguments]


def test_both_sides_run_by_turns_with_their_own_packages(repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = output_of(command(repository, "--rounds", "3", "--", str(log))).splitlines()
    result = json.loads(lines[-1])
    assert log.read_text().split() == ["2.0", "3.0", "3.0", "2.0", "2.0", "3.0"]
    assert result["figures"] == {"rows.0.took_s": {"base": 2.0, "here": 3.0, "ratio": 1.5, "ratio_range": [1.5, 1.5]}}
    assert result["base"] == git(repository, "rev-parse", "HEAD")
    assert result["here"] == f"{result['base']}-dirty"
    assert lines[0] == f"machine: {result['machine']}"
    assert [line.split() for line in lines if line.startswith("rows.0.took_s")] == [
        ["rows.0.took_s", "2", "3", "1.500", "1.500", "1.500"]
    ]


def test_the_worktree_is_gone_afterwards(repository: Path, tmp_path: Path) -> None:
    output_of(command(repository, "--rounds", "1", "--", str(tmp_path / "log")))
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_benchmark_that_fails_is_status_1(repository: Path, tmp_path: Path) -> None:
    (repository / "package.py").write_text("SECONDS, STATUS = 3.0, 4\n")
    ended = run(command(repository, "--", str(tmp_path / "log")))
    assert ended.returncode == 1
    assert (
        ended.stderr == "compare_commits: scripts/bench.py of here ended with status 4: it printed nothing to stderr\n"
    )
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_last_line_that_is_no_object_is_status_1(repository: Path) -> None:
    (repository / "scripts" / "bench.py").write_text("print('3 s')")
    git(repository, "commit", "--quiet", "--all", "--message", "another")
    ended = run(command(repository))
    assert ended.returncode == 1
    assert ended.stderr == "compare_commits: the last line of scripts/bench.py of base is no JSON object\n"


def test_an_unknown_commit_is_status_2(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scripts/bench.py", "--base", "nothing", "--repository", str(repository)]) == 2
    assert "nothing" in capsys.readouterr().err
