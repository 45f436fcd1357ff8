"""The shell commands, configurations and Python code that the documents show."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from tests.docs.test_paths import PAGES, ROOT

PROGRAMS = ("curl", "make", "python", "ray", "serve")


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """One command of a code block."""

    page: str
    """The page, relative to the root of the repository."""
    text: str
    """The command as one line, with what it is piped into, without the comment behind it."""

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:60]}"


def list_commands() -> list[ShownCommand]:
    """All commands in code blocks, and all within sentences that call a script, whose program is one of `PROGRAMS`."""
    found = []
    for page in PAGES:
        text = re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8"))
        is_fenced = False
        for line in text.splitlines():
            if line.lstrip().startswith("```"):
                is_fenced = not is_fenced
            elif (is_fenced or line.startswith("    ")) and line.split(maxsplit=1)[:1] and line.split()[0] in PROGRAMS:
                found.append(ShownCommand(page.relative_to(ROOT).as_posix(), _without_comment(line.strip())))
        found += [
            ShownCommand(page.relative_to(ROOT).as_posix(), " ".join(command.split()))
            for command in re.findall(r"`(python scripts/[^`]+)`", text)
        ]
    return found


def indented_blocks(page: str, first_words: str) -> list[str]:
    """The code blocks of a page that stand by indentation and have a line that begins with these words."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = (textwrap.dedent(block) for block in re.findall(r"(?:^ {4,}.*\n|^\n(?= {4}))+", text, re.MULTILINE))
    return [block for block in blocks if re.search(rf"^{re.escape(first_words)}", block, re.MULTILINE)]


def _without_comment(line: str) -> str:
    return re.sub(r"\s+# .*$", "", line).removesuffix(" &")
