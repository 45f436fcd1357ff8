"""The number formats of components: what is asked for, what is the default, and how they are described."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from tridentserve.errors import ConfigError, ModelFolderError
from tridentserve.models.families import FAMILIES
from tridentserve.models.family import Family
from tridentserve.models.number_formats import (
    ELEMENT_BYTES,
    NUMBER_FORMATS,
    NumberFormats,
    describe_formats,
    find_formats,
)
from tridentserve.stages import Stage

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
    ("asked", "device", "described"),
    [
        ("D", "cpu", "float32 (int8 transformer)"),
        ("D", "cuda", "float16 (int8 transformer)"),
        ("E", "cpu", "int8 (float32 transformer vae)"),
        ("ED", "cuda", "int8 (float16 vae)"),
    ],
)
def test_e_and_d_may_be_int8(asked: str, device: str, described: str) -> None:
    formats = find_formats(FAMILIES["hunyuan_video"], NumberFormats.parse(dict.fromkeys(asked, "int8")), device)
    assert describe_formats(formats) == described


@pytest.mark.parametrize(("family", "component"), [("wan_i2v", "image_encoder"), ("ltx2", "connectors")])
def test_what_e_has_beside_int8_text_encoders_computes_in_the_same_format(family: str, component: str) -> None:
    formats = find_formats(FAMILIES[family], NumberFormats.parse({"E": "int8"}), "cpu")
    assert (formats["text_encoder"], formats[component]) == ("int8", "bfloat16")


def test_a_model_that_is_served_whole_has_no_e_to_be_int8() -> None:
    family = Family("whole", "LTXPipeline", 32, 50, 3.0, {Stage.DIFFUSE: ("text_encoder", "transformer")}, whole=True)
    with pytest.raises(ModelFolderError, match=r"^a LTXPipeline is served whole, .* {D: int8} makes both int8"):
        find_formats(family, NumberFormats.parse({"E": "int8"}), "cpu")
    formats = find_formats(family, NumberFormats.parse({"D": "int8"}), "cpu")
    assert formats == {"text_encoder": "int8", "transformer": "int8"}


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
        ("half", "or int8 for E and D$"),
        ({"E": None}, "None is no number format; use float32"),
        ({"vae": "float32"}, "'vae' is no stage; use E, D or C"),
        (16, "16 is no number format"),
        (["float32"], r"\['float32'\] is no number format"),
        (
            "int8",
            "^C cannot be int8, which is for E and D: write {E: int8, D: int8}, or one of them, and for the others fl",
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
