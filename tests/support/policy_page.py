"""The steps of docs/write-a-policy.md: the file to write, the commands to run, the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-policy.md").read_text(encoding="utf-8")
POLICY = "shortest_first:make_shortest_first"


def blocks(language: str) -> list[str]:
    """The code blocks of the page in one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def write_policy(folder: Path) -> None:
    """Save the page's policy under the name that the page gives it."""
    (name,) = re.findall(r"Save this as `~/my-policies/((?!test_)\w+\.py)`", PAGE)
    code, _ = blocks("python")
    (folder / name).write_text(code, encoding="utf-8")


def write_test(folder: Path) -> Path:
    """Save the page's test of the policy under the name that the page gives it."""
    (name,) = re.findall(r"Save this as `~/my-policies/(test_\w+\.py)`", PAGE)
    _, code = blocks("python")
    path = folder / str(name)
    path.write_text(code, encoding="utf-8")
    return path


def settings() -> dict[str, Any]:
    """The keys that the page adds to the `args` of a configuration."""
    (text,) = blocks("yaml")
    found: dict[str, Any] = yaml.safe_load(text)
    assert found["dispatch"]["policy"] == POLICY
    return found
