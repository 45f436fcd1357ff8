"""The code blocks of the documents: all are commands, Python or YAML, or are listed below. Usages name the options that
the scripts have."""

from __future__ import annotations

import ast
import re
import textwrap

import pytest
import yaml

from tests.docs.commands import PROGRAMS, ShownCommand, list_blocks, list_mentions, list_usages
from tests.docs.parsers import options_of, parse_usage

# What the lines of a block of commands begin with, beside the programs whose options are checked.
OF_THE_SHELL = (".", "export")
# Blocks of which no line is a command, by their page and first word.
OTHERS = {
    ("README.md", "HTTP"): "a drawing",
    ("docs/architecture.md", "tridentserve/"): "directories",
    ("docs/operations.md", "b0r5"): "an explanation",
    ("docs/policy.md", "value"): "formulas",
    (
        "docs/traces.md",
        "request_id,timestamp,height,width,num_frames,prompt,negative_prompt,num_inference_steps,slo_ms",
    ): ("rows of a trace"),
}


def is_python(text: str) -> bool:
    """True for Python with a call in it, also with `await` outside functions. Otherwise the path `scripts/plan.py`
    would be a division."""
    try:
        tree = ast.parse(f"async def example():\n{textwrap.indent(text, '    ')}")
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call) for node in ast.walk(tree))


def is_yaml(text: str) -> bool:
    """True for a mapping of words, in YAML or JSON. A command with a header would be one from a longer key."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    return isinstance(found, dict) and all(re.fullmatch(r"\w+", str(key)) for key in found)


def test_every_line_of_a_block_of_commands_begins_with_a_known_program() -> None:
    unknown, others = [], set()
    for page, text in list_blocks():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if all(line.split()[0] in (*PROGRAMS, *OF_THE_SHELL) for line in lines) or is_python(text) or is_yaml(text):
            continue
        key = page, lines[0].split()[0]
        others.add(key)
        if key not in OTHERS:
            unknown.append((page, lines[0]))
    assert unknown == []
    assert sorted(OTHERS.keys() - others) == []


@pytest.mark.parametrize(
    "text", ["scripts/plan.py", "scripts/plan.py --rate 2", "docker run x", "wget 'A: b' http://host", "make serve"]
)
def test_a_command_is_no_python_and_no_yaml(text: str) -> None:
    assert not is_python(text)
    assert not is_yaml(text)


@pytest.mark.parametrize(("script", "usage"), list_usages().items())
def test_a_usage_has_all_options_of_the_script(script: str, usage: str) -> None:
    """And each with a value that takes one, and no others."""
    assert parse_usage(usage) == options_of(script)


def test_the_pages_show_usages() -> None:
    assert {"scripts/profile_model.py", "scripts/replay_trace.py"} <= list_usages().keys()


def test_a_usage_is_read_with_its_values() -> None:
    usage = "a.py (TRACE | --url URL) [--quick] [--sizes 1,2] [--profiles P ...]\n [--device {cpu,cuda}] --out DIR"
    values = {"--url": True, "--sizes": True, "--profiles": True, "--device": True, "--out": True}
    assert parse_usage(usage) == {**values, "--quick": False}


@pytest.mark.parametrize("mention", list_mentions(), ids=str)
def test_an_option_that_a_sentence_names_exists(mention: ShownCommand) -> None:
    script = f"scripts/{mention.text.split()[0].removeprefix('scripts/')}"
    assert parse_usage(mention.text).keys() <= options_of(script).keys()
