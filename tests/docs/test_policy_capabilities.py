"""The pages name the policies that can do a thing as `PolicySpec` does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dispatch.policies import POLICIES

DOCS = Path(__file__).parents[2] / "docs"
WITHOUT_PLACEMENT = {name for name, spec in POLICIES.items() if not spec.needs_load}
SENTENCES = [
    (
        "planning.md",
        r"under the policies (.+?); under the others",
        {n for n, s in POLICIES.items() if s.supports_units},
    ),
    ("configuration.md", r"All but (.+?) come with a placement of their own", WITHOUT_PLACEMENT),
    ("configuration.md", r"The policies (.+?) are made for the models", {n for n, s in POLICIES.items() if s.one_load}),
    (
        "configuration.md",
        r"the policy's own number: 8 for (.+?), 1 \(no batches\) for all others",
        {name for name, spec in POLICIES.items() if spec.default_max_batch == 8},
    ),
]


def named(text: str) -> set[str]:
    """The policies of a list such as "`default`, `wo-*` and `edf`"."""
    names = re.findall(r"`([^`]+)`", text)
    stars = {known for name in names if name.endswith("*") for known in POLICIES if known.startswith(name[:-1])}
    return stars | {name for name in names if not name.endswith("*")}


@pytest.mark.parametrize(("page", "pattern", "policies"), SENTENCES)
def test_lists_of_policies_are_up_to_date(page: str, pattern: str, policies: set[str]) -> None:
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    (found,) = re.findall(pattern, text)
    assert named(found) == policies


def test_all_policies_make_batches_of_8_or_none() -> None:
    assert {spec.default_max_batch for spec in POLICIES.values()} == {1, 8}
