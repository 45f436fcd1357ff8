"""docs/write-a-policy.md: its policy, in a file outside the repository, decides in the simulator as the page says."""

from __future__ import annotations

import csv
import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.policy_page import POLICY, ROOT, blocks, settings, write_policy
from tests.support.processes import output_of, run


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the page's policy on PYTHONPATH."""
    folder = tmp_path / "my-policies"
    folder.mkdir()
    write_policy(folder)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def test_the_policy_of_the_page_is_short() -> None:
    assert len(blocks("python")[0].splitlines()) <= 30


def test_the_commands_of_the_page_run(tmp_path: Path, environment: dict[str, str]) -> None:
    out = tmp_path / "out"
    export, *commands = blocks("sh")[0].splitlines()
    assert export == "export PYTHONPATH=~/my-policies"
    assert [command.split()[1] for command in commands] == [
        f"scripts/{name}.py" for name in ("make_trace", "replay_trace", "evaluate", "plan")
    ]
    for command in commands:
        python, *words = shlex.split(command.replace("out/", f"{out}/").replace("light.csv", f"{out}.csv"))
        assert python == "python"
        extra = ["--out", str(out / "replay")] if "--simulate" in words else []
        output_of([sys.executable, *words, *extra], ROOT, environment)
    with (out / "compared" / "results.csv").open(newline="") as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {"default", POLICY}
    assert rows[POLICY]["completed"] == rows[POLICY]["requests"]


def test_the_file_may_lie_in_the_current_directory(tmp_path: Path) -> None:
    write_policy(tmp_path)
    code = (
        f"from dispatch.policies import find_policy; spec = find_policy({POLICY!r}); print(spec.name, spec.needs_load)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert output_of([sys.executable, "-P", "-c", code], tmp_path, environment).split() == [POLICY, "True"]


def test_a_path_that_is_wrong_is_refused_by_every_script(environment: dict[str, str]) -> None:
    wrong = POLICY.replace("make_", "made_")
    for command in blocks("sh")[0].splitlines()[2:]:
        words = [word.replace(POLICY, wrong) for word in shlex.split(command)[1:]]
        if "--simulate" in words:
            words[words.index("--simulate") - 1] = "traces/data/samples/quickstart.txt"
        ended = run([sys.executable, *words], ROOT, environment)
        assert ended.returncode == 2
        assert "has no 'made_shortest_first'" in ended.stderr


def test_a_configuration_may_name_it(tmp_path: Path, environment: dict[str, str]) -> None:
    config = yaml.safe_load((ROOT / "deployments" / "tiny.yaml").read_text())
    config["applications"][0]["args"] |= settings()
    path = tmp_path / "my_service.yaml"
    path.write_text(yaml.safe_dump(config))
    check = [sys.executable, "scripts/check_config.py", str(path)]
    output_of(check, ROOT, environment)
    path.write_text(path.read_text().replace(POLICY, "nowhere:make_shortest_first"))
    ended = run(check, ROOT, environment)
    assert ended.returncode == 1
    assert "dispatch.policy: policy 'nowhere:make_shortest_first': there is no module 'nowhere'" in ended.stdout
