"""Wrong options are one line on stderr and exit status 2, whichever script gets them."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import pytest
from lib.command_line import Parser, make_positive, parse_mix, parse_whole_number

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_reads_its_options_with_our_parser(path: Path) -> None:
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    assert not {"argparse.ArgumentParser", "ArgumentParser"} & called
    assert "Parser" in called or "main" not in called, "a script that is started has options, if only --help"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "0"], "argument --count: '0' is not a whole number above 0"),
        (["--count", "1.5"], "argument --count: '1.5' is not a whole number above 0"),
        (["--rate", "0"], "argument --rate: invalid positive number value: '0'"),
        (["--rate", "nan"], "argument --rate: invalid positive number value: 'nan'"),
        (["--rate", "1e999"], "argument --rate: invalid positive number value: '1e999'"),
        (["--kind", "c"], "argument --kind: invalid choice: 'c' (choose from "),
        (["--unknown"], "unrecognized arguments: --unknown"),
        ([], "the following arguments are required: --kind"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    parser = Parser(prog="some_script.py")
    parser.add_argument("--count", type=parse_whole_number)
    parser.add_argument("--rate", type=make_positive(float))
    parser.add_argument("--kind", choices=["a", "b"], required=True)
    required = [] if not arguments or "--kind" in arguments else ["--kind", "a"]
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args([*arguments, *required])
    written = capsys.readouterr()
    assert stopped.value.code == 2
    assert written.err.startswith(f"some_script: {message}")
    assert written.err.endswith(" (see --help)\n")
    assert written.err.count("\n") == 1
    assert not written.out


def test_a_message_of_several_lines_is_reported_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Parser(prog="p").error("first\nsecond")
    assert capsys.readouterr().err == "p: first second (see --help)\n"


def test_a_mix_has_two_sides_or_more_in_any_order() -> None:
    assert parse_mix("256,64,64") == [256, 64, 64]
    for wrong in ("64", "64,8", "64,x"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_mix(wrong)
