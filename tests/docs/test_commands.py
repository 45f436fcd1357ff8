"""The commands of the documents: scripts take the options that a page gives them, targets and files are there. The
curl lines run against a service in `tests/e2e/test_docs_commands.py`."""

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

from tests.docs.commands import ShownCommand, list_commands
from tests.docs.test_paths import ROOT
from tests.policy_page import POLICY, write_policy
from tests.processes import output_of

COMMANDS = list_commands()


def commands_of(program: str) -> list[ShownCommand]:
    """The commands of one program, each once."""
    return list({command.text: command for command in COMMANDS if command.text.split()[0] == program}.values())


def needs_nothing(command: ShownCommand) -> bool:
    """The command needs no GPU, no service and no file that the reader makes, and takes seconds."""
    words = shlex.split(command.text)
    files = [word for word in words if word.endswith((".yaml", ".txt", ".csv"))]
    is_light = words[1] in ("scripts/check_config.py", "scripts/plan.py") or "--simulate" in words
    return is_light and all((ROOT / file).is_file() for file in files)


class AcceptedError(Exception):
    """The options were read without an error."""


def test_the_pages_show_commands() -> None:
    assert {command.text.split()[0] for command in COMMANDS} == {"curl", "make", "python", "serve"}
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


# The commands of docs/write-a-policy.md run in tests/scripts/test_docs_write_a_policy.py.
@pytest.mark.parametrize(
    "command",
    [one for one in commands_of("python") if needs_nothing(one) and POLICY not in one.text],
    ids=str,
)
def test_the_command_runs(command: ShownCommand, tmp_path: Path) -> None:
    words = shlex.split(command.text)[1:]
    output_of([sys.executable, *words, *(["--out", str(tmp_path)] if "--simulate" in words else [])], ROOT)
