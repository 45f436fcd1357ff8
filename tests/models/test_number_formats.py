"""The number formats of components: what is asked for, what is the default, and how they are described."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from tridentserve.errors import ConfigError
from tridentserve.models.families import FAMILIES
from tridentserve.models.number_formats import (
    ELEMENT_BYTES,
    NUMBER_FORMATS,
    NumberFormats,
    describe_formats,
    find_formats,
)

MIXED = {"E": "bfloat16", "D": "bfloat16", "C": "float32"}


def test_each_letter_sets_the_components_of_its_stage_and_c_the_vae_in_e_as_well() -> None:
    formats = find_formats(FAMILIES["wan_i2v"], NumberFormats.parse(MIXED), "cpu")
    assert formats == {
        "text_encoder": "bfloat16",
        "image_encoder": "bfloat16",
        "vae": "float32",
        "transformer": "bfloat16",
        "transformer_2": "bfloat16",
    }


def test_one_name_is_for_all_stages() -> None:
    assert NumberFormats.parse("float16") == NumberFormats.parse(dict.fromkeys("EDC", "float16"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_on_a_cpu_is_float32(family: str) -> None:
    assert set(find_formats(FAMILIES[family], NumberFormats(), "cpu").values()) == {"float32"}


@pytest.mark.parametrize(
    ("family", "described"),
    [
        ("sd3", "bfloat16"),
        ("sdxl", "float16"),
        ("wan", "bfloat16 (float32 vae)"),
        ("wan_i2v", "bfloat16 (float32 image_encoder vae)"),
        ("hunyuan_video", "float16 (bfloat16 transformer)"),
    ],
)
def test_the_default_on_a_gpu_is_the_published_recipe(family: str, described: str) -> None:
    assert describe_formats(find_formats(FAMILIES[family], NumberFormats(), "cuda:1")) == described


@pytest.mark.parametrize(
    ("device", "described"), [("cpu", "float32 (int8 transformer)"), ("cuda", "float16 (int8 transformer)")]
)
def test_d_alone_may_be_int8(device: str, described: str) -> None:
    formats = find_formats(FAMILIES["hunyuan_video"], NumberFormats.parse({"D": "int8"}), device)
    assert describe_formats(formats) == described


def test_stages_that_are_left_out_have_the_default() -> None:
    asked = NumberFormats.parse({"E": "float32"})
    assert describe_formats(find_formats(FAMILIES["hunyuan_video"], asked, "cuda")) == (
        "float32 (bfloat16 transformer, float16 vae)"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "half",
            "'half' is no number format; use float32, bfloat16 or float16, for all stages or each of them",
        ),
        ("half", "or int8 for D$"),
        ({"E": None}, "None is no number format; use float32"),
        ({"vae": "float32"}, "'vae' is no stage; use E, D or C"),
        (16, "16 is no number format"),
        (["float32"], r"\['float32'\] is no number format"),
        (
            "int8",
            "E and C cannot be int8, which is for D alone: write {D: int8}, and for the others float32, ",
        ),
        ({"D": "int8", "C": "int8"}, "^C cannot be int8"),
    ],
)
def test_what_is_no_number_format_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NumberFormats.parse(given)


@pytest.mark.parametrize("name", NUMBER_FORMATS)
def test_the_names_are_torchs(name: Any) -> None:
    assert getattr(torch, name).itemsize == ELEMENT_BYTES[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_recipes_name_components_of_their_family(family: str) -> None:
    components = find_formats(FAMILIES[family], NumberFormats(), "cpu")
    assert FAMILIES[family].number_formats.keys() <= components.keys()
    assert FAMILIES[family].upcasts_vae == hasattr(getattr(diffusers, FAMILIES[family].pipeline_class), "upcast_vae")
