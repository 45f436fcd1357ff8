"""The scripts' own parsers, reached without running more of a script than it takes to read its options."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

import pytest
from lib.command_line import Parser

from tests.docs.test_paths import ROOT


class StoppedError(Exception):
    """The script got as far as its options."""


def read_options(words: Sequence[str]) -> None:
    """Have a script read its options, from the root of the repository. Those that are wrong end in `SystemExit`."""
    read = Parser.parse_args

    def accept(self: Parser, args: Sequence[str] | None = None) -> NoReturn:
        read(self, args)
        raise StoppedError

    _run_with(accept, words)


@cache
def options_of(script: str) -> dict[str, bool]:
    """The options of a script, each with whether it takes a value."""
    usages = []

    def note(self: Parser, args: Sequence[str] | None = None) -> NoReturn:
        usages.append(self.format_usage())
        raise StoppedError

    _run_with(note, [script])
    return parse_usage(usages[0])


def parse_usage(usage: str) -> dict[str, bool]:
    """The options in a usage, argparse's or one of ours, each with whether a value follows it."""
    found = re.findall(r"(--[\w-]+)( [^\s\[\]()|-])?", " ".join(usage.split()))
    return {name: bool(value) for name, value in found}


def _run_with(parse_args: object, words: Sequence[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.syspath_prepend(str(ROOT / "scripts"))
        patch.setattr(os, "environ", os.environ.copy())
        patch.setattr(Parser, "parse_args", parse_args)
        patch.setattr(sys, "argv", list(words))
        with pytest.raises(StoppedError):
            runpy.run_path(words[0], run_name="__main__")
