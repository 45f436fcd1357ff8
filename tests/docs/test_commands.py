"""The commands of the documents. Those that take seconds on a CPU run here; the lists below say of all others why they
do not, and their options are read by the scripts' own parsers. What needs a service runs in
`tests/e2e/docs/test_docs_commands.py`, the line for edits in `tests/e2e/test_edits.py`."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from deployments.validation.serve_file import check_config
from tests.docs.commands import ShownCommand, indented_blocks, list_commands
from tests.docs.test_paths import ROOT
from tests.support.policy_page import POLICY, write_policy
from tests.support.processes import output_of
from tridentserve.models.cache import CACHE_ENV

COMMANDS = list_commands()


def commands_of(program: str) -> list[ShownCommand]:
    """The commands of one program, each once."""
    return list({command.text: command for command in COMMANDS if command.text.split()[0] == program}.values())


# Why the command of a page is not run as it stands. Its options are read by the script's own parser.
NEEDS_LONG = "takes minutes to hours; the script's `--quick` runs, or a test with a smaller grid"
NEEDS_SERVICE = "needs a running service; runs in tests/e2e"
NEEDS_GPU = "needs a GPU and the published configuration of a large model"
NEEDS_FILES = "needs files of the reader: a model folder, a trace, a log or a configuration"
HAS_TEST = "runs in a test of its own in tests/scripts or tests/e2e"
NOT_RUN = {
    "scripts/bench_engine.py": NEEDS_LONG,
    "scripts/compare_commits.py": HAS_TEST,
    "scripts/compare_kernels.py": NEEDS_GPU,
    "scripts/compare_policies.py": NEEDS_LONG,
    "scripts/compare_simulation.py": NEEDS_SERVICE,
    "scripts/evaluate.py": NEEDS_LONG,
    "scripts/make_tiny_models.py": "makes models of all families in the cache; tests of the families make them too",
    "scripts/make_trace.py": HAS_TEST,
    "scripts/profile_model.py": NEEDS_GPU,
    "scripts/replay_decisions.py": NEEDS_FILES,
    "scripts/serve.py": HAS_TEST,
    "my-service.yaml": NEEDS_FILES,
    "my_service.yaml": HAS_TEST,
    "24gb.yaml": NEEDS_FILES,
    "CLUSTER.yaml": NEEDS_FILES,
    "TRACE": NEEDS_FILES,
    "FILE": NEEDS_FILES,
    "CONFIG": NEEDS_FILES,
    "--url": NEEDS_SERVICE,
    POLICY: HAS_TEST,
    "-m": "runs tests",
}
TARGETS_NOT_RUN = {
    "serve": "ends with Ctrl-C; scripts/serve.py, which it runs, has tests",
    "test": "runs these tests",
    "evaluate-quick": "takes minutes; scripts/evaluate.py has tests",
    "demo": "takes a minute; the script runs in tests/e2e/test_quick_runs.py",
}


def reason_not_to_run(command: ShownCommand) -> str | None:
    """None when the command runs on a CPU in seconds, without files of the reader."""
    return next((NOT_RUN[word] for word in shlex.split(command.text) if word in NOT_RUN), None)


class AcceptedError(Exception):
    """The options were read without an error."""


def test_the_pages_show_commands() -> None:
    assert {command.text.split()[0] for command in COMMANDS} == {"curl", "make", "python", "ray", "serve"}
    assert len(commands_of("python")) > 20


@pytest.mark.parametrize("command", commands_of("python"), ids=str)
def test_the_script_takes_the_options(command: ShownCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = shlex.split(command.text)
    if words[1] == "-m":
        assert words[2] == "pytest"
        return
    if words[1] == "-c":
        compile(words[2], command.page, "exec")
        return
    write_policy(tmp_path)
    for folder in (tmp_path, ROOT / "scripts"):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "environ", os.environ.copy())

    from lib.command_line import Parser  # the scripts' own

    read = Parser.parse_args

    def accept(self: Any, args: Sequence[str] | None = None) -> NoReturn:
        read(self, args)
        raise AcceptedError

    monkeypatch.setattr(Parser, "parse_args", accept)
    monkeypatch.setattr(sys, "argv", words[1:])
    with pytest.raises(AcceptedError):
        runpy.run_path(words[1], run_name="__main__")


@pytest.mark.parametrize("command", commands_of("make"), ids=str)
def test_the_target_exists(command: ShownCommand) -> None:
    target = command.text.split()[1]
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert target in TARGETS_NOT_RUN


@pytest.mark.parametrize("command", [*commands_of("serve"), *commands_of("ray")], ids=str)
def test_the_program_of_ray_takes_the_options(command: ShownCommand) -> None:
    """They need a cluster; `tests/e2e/test_models_live.py` deploys by the same command."""
    from ray.scripts.scripts import cli as ray_cli
    from ray.serve.scripts import cli as serve_cli

    program, name, *words = shlex.split(command.text)
    cli = ray_cli if program == "ray" else serve_cli
    assert cli.commands[name].make_context(name, words).params


@pytest.mark.parametrize("command", [one for one in commands_of("python") if not reason_not_to_run(one)], ids=str)
def test_the_command_runs(command: ShownCommand, tmp_path: Path) -> None:
    words = ["." if word == "BASE" else word for word in shlex.split(command.text)[1:]]
    if words == ["scripts/write_docs.py"]:  # it writes into the repository
        words.append("--check")
    if "--simulate" in words:
        words += ["--out", str(tmp_path)]
    folder = tmp_path if words[0] == "-c" else ROOT  # which writes a table where it runs
    output_of([sys.executable, *words], folder, {**os.environ, "PYTHONPATH": str(ROOT)})


def test_enough_commands_run_and_no_reason_is_left_over() -> None:
    assert sum(reason_not_to_run(command) is None for command in commands_of("python")) >= 5
    words = {word for command in commands_of("python") for word in shlex.split(command.text)}
    assert sorted(NOT_RUN.keys() - words) == []


@pytest.mark.parametrize("page", ["docs/configuration.md", "docs/tutorial.md"])
def test_the_configuration_of_a_page_is_good(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reports nothing, but for the missing files of the reader that the tutorial's configuration names."""
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    blocks = indented_blocks(page, "applications:")
    assert blocks
    for block in blocks:
        file = tmp_path / "service.yaml"
        file.write_text(block, encoding="utf-8")
        problems = check_config(file)
        readers = ("/models/", "profiles/")
        assert not [problem for problem in problems if not any(name in problem for name in readers)]
        assert bool(problems) == (page == "docs/tutorial.md")
