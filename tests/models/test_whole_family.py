"""Pipelines that are no family, described by the source code of diffusers alone."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest

from tridentserve.errors import ModelFolderError
from tridentserve.models.families import FAMILIES
from tridentserve.models.model_folder import detect_family, read_component_classes, read_family
from tridentserve.models.whole.pipeline_source import read_pipeline_call
from tridentserve.requests import Shape
from tridentserve.stages import Stage

COMPONENTS = {"vae": ["diffusers", "AutoencoderKL"], "text_encoder": ["transformers", "CLIPTextModel"]}


def write_index(folder: Path, class_name: str, **more: Any) -> Path:
    (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name, **COMPONENTS, **more}))
    return folder


@pytest.mark.parametrize(
    ("class_name", "denoiser", "multiple", "steps", "guidance_scale", "frame_multiple"),
    [
        ("StableDiffusionPipeline", "unet", 8, 50, 7.5, None),
        ("PixArtAlphaPipeline", "transformer", 16, 20, 4.5, None),
        ("Lumina2Pipeline", "transformer", 16, 30, 4.0, None),
        ("AuraFlowPipeline", "transformer", 16, 50, 3.5, None),
        ("SanaPipeline", "transformer", 32, 20, 4.5, None),
        ("CogView4Pipeline", "transformer", 16, 50, 5.0, None),
        ("KandinskyV22CombinedPipeline", "unet", 8, 100, 4.0, None),
        ("LTXPipeline", "transformer", 32, 50, 3.0, 8),
        ("AnimateDiffPipeline", "unet", 8, 50, 7.5, 1),
        ("LattePipeline", "transformer", 16, 50, 7.5, 1),
        ("SanaVideoPipeline", "transformer", 32, 50, 6.0, 8),
    ],
)
def test_the_call_says_what_requests_may_ask_for(
    tmp_path: Path,
    class_name: str,
    denoiser: str,
    multiple: int,
    steps: int,
    guidance_scale: float,
    frame_multiple: int | None,
) -> None:
    family = read_family(write_index(tmp_path, class_name, **{denoiser: ["diffusers", "SomeModel"]}))
    assert family.whole
    assert (family.size_multiple, family.default_steps) == (multiple, steps)
    assert (family.default_guidance_scale, family.frame_multiple) == (guidance_scale, frame_multiple)
    assert family.components[Stage.DIFFUSE] == tuple(sorted((*COMPONENTS, denoiser)))
    assert not family.components[Stage.ENCODE] + family.components[Stage.DECODE]
    assert [family.shares_tokens, family.caches_steps, family.loras] == [False] * 3


@pytest.mark.parametrize("name", ["flux_kontext", "pixart_sigma", "wan", "hunyuan_video_15"])
def test_what_is_read_is_what_python_says(name: str) -> None:
    class_name = FAMILIES[name].pipeline_class
    call = read_pipeline_call(class_name)
    signature = inspect.signature(getattr(diffusers, class_name).__call__).parameters
    parameters = {name: each for name, each in signature.items() if each.kind is not each.VAR_KEYWORD}
    assert call is not None
    assert call.parameters == parameters.keys() - {"self"}
    empty = inspect.Parameter.empty
    assert set(call.required) == {name for name, each in parameters.items() if each.default is empty} - {"self"}
    assert all(parameters[name].default == value for name, value in call.defaults.items())


@pytest.mark.parametrize(
    ("class_name", "reason"),
    [
        ("StableDiffusionImg2ImgPipeline", "takes no height"),
        ("StableDiffusionInpaintPipeline", r"starts from more than a text \(strength\)"),
        ("StableDiffusionControlNetPipeline", "starts from more than a text"),
        ("ChronoEditPipeline", "needs image"),
        ("StableVideoDiffusionPipeline", "takes no prompt"),
        ("AudioLDM2Pipeline", "takes no height"),
        ("LongCatImagePipeline", "reports no steps"),
        ("StableDiffusion17Pipeline", "the installed diffusers does not have"),
        ("not a name(", "the installed diffusers does not have"),
    ],
)
def test_a_call_that_no_request_fits_is_refused_with_its_reason(tmp_path: Path, class_name: str, reason: str) -> None:
    with pytest.raises(ModelFolderError, match=reason):
        read_family(write_index(tmp_path, class_name))


def test_a_field_that_the_pipeline_does_not_take_is_known(tmp_path: Path) -> None:
    assert read_family(write_index(tmp_path, "LatentConsistencyModelPipeline")).absent_fields == {"negative_prompt"}
    assert read_family(write_index(tmp_path, "WuerstchenCombinedPipeline")).absent_fields == {"guidance_scale"}
    assert read_family(write_index(tmp_path, "TextToVideoSDPipeline")).absent_fields == {"n"}
    assert not read_family(write_index(tmp_path, "StableDiffusionPipeline")).absent_fields


def test_the_usual_size_is_that_of_the_call_or_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(json.dumps({"sample_size": 64}))
    assert detect_family(write_index(tmp_path, "StableDiffusionPipeline")).default_shape == Shape(512, 512)
    assert detect_family(write_index(tmp_path, "AnimateDiffPipeline")).default_shape == Shape(512, 512, 16)
    assert detect_family(write_index(tmp_path, "Kandinsky3Pipeline")).default_shape == Shape(1024, 1024)
    assert read_family(write_index(tmp_path, "Lumina2Pipeline")).default_shape is None


def test_components_may_have_classes_of_the_pipelines_own_package(tmp_path: Path) -> None:
    checker = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    index = write_index(tmp_path, "StableDiffusionPipeline", safety_checker=checker, image_encoder=[None, None])
    assert read_component_classes(index) == {
        **{name: tuple(pair) for name, pair in COMPONENTS.items()},
        "safety_checker": tuple(checker),
    }
    with pytest.raises(ModelFolderError, match="use a folder whose components are"):
        read_component_classes(write_index(tmp_path, "StableDiffusionPipeline", vae=["../evil", "Class"]))


def test_it_is_said_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tridentserve.models.model_folder import read_family; "
        f"read_family(pathlib.Path({str(write_index(tmp_path, 'LTXPipeline'))!r})); "
        "assert not {'torch', 'diffusers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
