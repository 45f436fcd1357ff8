"""The table of docs/models.md is what the code says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipelines.models import ALL
from tridentserve.models.families import FAMILIES
from tridentserve.models.family import Family
from tridentserve.models.number_formats import NumberFormats, describe_formats, find_formats
from tridentserve.stages import Stage

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADER = (
    "| family | pipeline of diffusers | starts from | makes | sides | steps | guidance | negative prompt | passes "
    "| degrees of D | LoRAs |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
# Those of guidance in other ways.
MORE_PASSES = {"ltx2": ", and two more"}
FORMATS_HEADER = "| family | E | D | C |\n| --- | --- | --- | --- |\n"


def describe_inputs(family: Family) -> str:
    images = "an image" if family.max_images == 1 else f"up to {family.max_images} images"
    if family.takes_mask:
        return f"{images}, its mask and text"
    if family.needs_image:
        return f"{images} and text"
    if family.image_start is not None:
        return "text; an image if [allowed](#image-to-image-and-inpainting)"
    return f"text, and {images}" if family.takes_image else "text"


def row(family: Family) -> str:
    adapter = importlib.import_module(f"tridentserve.pipelines.adapters.{family.name}").ADAPTER
    videos = "videos with sound" if "vocoder" in family.components[Stage.DECODE] else "videos"
    frames = f"{videos} of {family.frame_multiple} k + 1 frames" if family.frame_multiple else "images"
    passes = "one, guidance is an embedding"
    if family.negative_prompt:
        passes = "two, in one call" if adapter.passes_share_a_call else "two, a call each"
        passes += MORE_PASSES.get(family.name, "")
    cells = (
        f"`{family.name}`",
        f"`{family.pipeline_class}`",
        describe_inputs(family),
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


def formats_row(family: Family) -> str:
    formats = find_formats(family, NumberFormats(), "cuda")
    cells = [
        describe_formats({component: formats[component] for component in components if component in formats})
        for components in family.components.values()
    ]
    return f"| {' | '.join([f'`{family.name}`', *cells])} |\n"


@pytest.mark.parametrize(
    ("name", "header", "make_row"), [("table", HEADER, row), ("formats", FORMATS_HEADER, formats_row)]
)
def test_the_table_is_what_the_code_says(name: str, header: str, make_row: Callable[[Family], str]) -> None:
    table = header + "".join(make_row(family) for family in FAMILIES.values())
    page = PAGE.read_text(encoding="utf-8")
    there = page.partition(f"<!-- {name}: start -->\n")[2].partition(f"<!-- {name}: end -->\n")[0]
    assert there == table, f"put this into {PAGE}:\n{table}"


def test_every_family_is_tested() -> None:
    assert set(ALL) == set(FAMILIES)
