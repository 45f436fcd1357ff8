"""The code blocks, shell commands, configurations and Python code that the documents show."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from tests.docs.test_paths import PAGES, ROOT

PROGRAMS = ("curl", "make", "pytest", "python", "ray", "serve")
# What opens and closes with three backticks, or stands four or more spaces to the right.
BLOCK = re.compile(r"^ *```\w*\n(?P<fenced>.*?)^ *```$|(?P<indented>(?:^ {4,}\S[^\n]*\n|^\n(?= {4}))+)", re.M | re.S)


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """One command of a code block or of a sentence."""

    page: str
    """The page, relative to the root of the repository."""
    text: str
    """The command as one line, with what it is piped into, without the comment behind it."""

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:60]}"


def list_blocks() -> list[tuple[str, str]]:
    """All code blocks with their pages. Lines that a backslash continues, and the lines of a usage, are joined."""
    found = []
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            text = textwrap.dedent(block["fenced"] or block["indented"])
            found.append((page.relative_to(ROOT).as_posix(), re.sub(r" *\\\n *|\n +(?=\[-)", " ", text)))
    return found


def list_commands() -> list[ShownCommand]:
    """All commands of code blocks, and all within sentences that are more than a name, whose program is one of
    `PROGRAMS`."""
    lines = [ShownCommand(page, _without_comment(line)) for page, line in _list_lines() if not _is_usage(line)]
    return [one for one in [*lines, *_list_inline()] if one.text.split()[0] in PROGRAMS]


def list_usages() -> dict[str, str]:
    """Scripts whose usage a page shows, with their usages in one text."""
    found: dict[str, str] = {}
    for _, line in _list_lines():
        if _is_usage(line):
            script = line.split()[1]
            found[script] = f"{found.get(script, '')} {line}"
    return found


def list_mentions() -> list[ShownCommand]:
    """Scripts that a sentence names with a few of their options, without `python`: no whole commands."""
    return [one for one in _list_inline() if re.match(r"[\w/]+\.py .*--", one.text)]


def indented_blocks(page: str, first_words: str) -> list[str]:
    """The code blocks of a page that stand by indentation and have a line that begins with these words."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = (textwrap.dedent(block) for block in re.findall(r"(?:^ {4,}.*\n|^\n(?= {4}))+", text, re.MULTILINE))
    return [block for block in blocks if re.search(rf"^{re.escape(first_words)}", block, re.MULTILINE)]


def _list_lines() -> list[tuple[str, str]]:
    """The lines of code blocks that are not empty, with their pages."""
    return [(page, line.strip()) for page, text in list_blocks() for line in text.splitlines() if line.strip()]


def _list_inline() -> list[ShownCommand]:
    """What stands between backticks within sentences and is more than one word."""
    found = []
    for page in PAGES:
        for paragraph in BLOCK.sub("\n", page.read_text(encoding="utf-8")).split("\n\n"):
            texts = (" ".join(text.split()) for text in re.findall(r"`([^`]+)`", paragraph))
            found += [ShownCommand(page.relative_to(ROOT).as_posix(), text) for text in texts if " " in text]
    return found


def _is_usage(line: str) -> bool:
    """True for a line that shows which options a script has, in brackets where it can do without them."""
    return re.match(r"python \S+ .*\[-", line) is not None


def _without_comment(line: str) -> str:
    return re.sub(r"\s+# .*$", "", line).removesuffix(" &")
