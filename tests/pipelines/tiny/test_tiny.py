"""The tiny models: the same bytes each time, safe to make at once in several processes, any prompt welcome."""

from __future__ import annotations

import functools
import hashlib
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelines.models import ALL, families, final_latents, load_stage, make_inputs
from tridentserve.errors import ConfigError
from tridentserve.models.families import FAMILIES
from tridentserve.models.model_folder import detect_family
from tridentserve.pipelines.tiny import build as tiny
from tridentserve.pipelines.tiny import parts as tiny_parts
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.stages import Stage

Model = Callable[[str], Path]


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("family", families(*ALL))
def test_two_builds_are_the_same_bytes(model: Model, family: str, tmp_path: Path) -> None:
    first, second = model(family), ensure_tiny(family, tmp_path)
    assert first != second
    assert digests(first) == digests(second)
    assert any(name.endswith(".safetensors") for name in digests(first))


def test_a_model_folder_that_exists_is_left_alone(model: Model) -> None:
    folder = model("sd3")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert ensure_tiny("sd3", folder.parent) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_makers_that_race_leave_one_whole_model_folder(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tiny._build

    def build_as_the_slower_one(recipe: Callable[[], Any]) -> Any:
        # While this maker builds, another one starts and finishes.
        monkeypatch.setattr(tiny, "_build", build)
        ensure_tiny("flux", tmp_path)
        return build(recipe)

    monkeypatch.setattr(tiny, "_build", build_as_the_slower_one)
    assert digests(ensure_tiny("flux", tmp_path)) == digests(model("flux"))
    assert [path.name for path in tmp_path.iterdir()] == [model("flux").name]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(recipe: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tiny, "_build", fail)
    with pytest.raises(OSError, match="disk full"):
        ensure_tiny("sd3", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'sd9'; use one of sd3, flux"):
        ensure_tiny("sd9", tmp_path)


@pytest.mark.parametrize("family", families(*ALL))
def test_they_are_small(model: Model, family: str) -> None:
    # The class of HunyuanVideo 1.5 has a layer of 2048 x 2048 whatever its config says.
    fixed = 2048**2 if family.startswith("hunyuan_video_15") else 0
    # Files: two stages may hold the same component.
    assert sum(path.stat().st_size for path in model(family).rglob("*.safetensors")) < 4 * (4e6 + fixed)


@pytest.mark.parametrize("family", families(*ALL))
def test_images_have_contrast(model: Model, family: str) -> None:
    inputs = make_inputs(128, 128, steps=4, variant=family, num_frames=1)
    pixels = load_stage(model(family), Stage.DECODE).decode({"latents": final_latents(model(family), inputs)}, inputs)
    assert pixels.std() > 20


@functools.cache
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@given(text=st.text(max_size=200))
def test_any_text_has_tokens_the_encoders_know(text: str) -> None:
    for kind, encoder_config in (
        (tiny_parts.build_clip_tokenizer, tiny_parts.build_clip_config),
        (tiny_parts.build_t5_tokenizer, None),
    ):
        made = _made(kind)
        ids = made([text], padding="max_length", max_length=77, truncation=True).input_ids[0]
        vocab_size = encoder_config(made).vocab_size if encoder_config else len(made)
        assert len(ids) == 77
        assert all(0 <= token < vocab_size for token in ids)


@functools.cache
def _made(kind: Callable[[], Any]) -> Any:
    return kind()


@pytest.mark.parametrize("prompt", ["", "<extra_id_7>", "<|endoftext|> after", "\x00\ufffd\U0001f408", "word " * 500])
@pytest.mark.parametrize("family", families(*ALL))
def test_odd_prompts_can_be_encoded(model: Model, family: str, prompt: str) -> None:
    condition = load_stage(model(family), Stage.ENCODE).encode(make_inputs(prompt=prompt, variant=family))
    assert all(tensor.isfinite().all() for tensor in condition.values())


def test_saved_tokenizers_are_those_that_were_made(model: Model) -> None:
    with ThreadPoolExecutor(2) as pool:
        saved = list(pool.map(tokenizer, (model("flux") / "tokenizer", model("flux") / "tokenizer_2")))
    for made, loaded in zip(
        (_made(tiny_parts.build_clip_tokenizer), _made(tiny_parts.build_t5_tokenizer)), saved, strict=True
    ):
        assert made("A fox, 3 hens & Ω").input_ids == loaded("A fox, 3 hens & Ω").input_ids


def test_the_script_makes_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[3] / "scripts" / "make_tiny_models.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--cache-dir", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    folders = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {folder.parent for folder in folders} == {tmp_path}
    assert [detect_family(folder).name for folder in folders] == list(FAMILIES)
