"""The table of docs/models.md is what the code says."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.pipelines.models import ALL
from tridentserve.models.families import FAMILIES
from tridentserve.models.family import Family

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
START, END = "<!-- table: start -->\n", "<!-- table: end -->\n"
HEADER = (
    "| family | pipeline of diffusers | starts from | makes | sides | steps | guidance | negative prompt | passes "
    "| degrees of D | LoRAs |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)


def row(family: Family) -> str:
    adapter = importlib.import_module(f"tridentserve.pipelines.adapters.{family.name}").ADAPTER
    frames = f"videos of {family.frame_multiple} k + 1 frames" if family.frame_multiple else "images"
    passes = "one, guidance is an embedding"
    if family.negative_prompt:
        passes = "two, in one call" if adapter.passes_share_a_call else "two, a call each"
    cells = (
        f"`{family.name}`",
        f"`{family.pipeline_class}`",
        "an image and text" if family.takes_image else "text",
        frames,
        f"multiples of {family.size_multiple}",
        f"{family.default_steps}",
        f"{family.default_guidance_scale}",
        "yes" if family.negative_prompt else "no effect",
        passes,
        "any" if family.shares_tokens else "1, 2",
        "yes" if family.loras else "no",
    )
    return f"| {' | '.join(cells)} |\n"


def test_the_table_is_what_the_code_says() -> None:
    table = HEADER + "".join(row(family) for family in FAMILIES.values())
    there = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    assert there == table, f"put this into {PAGE}:\n{table}"


def test_every_family_is_tested() -> None:
    assert set(ALL) == set(FAMILIES)
