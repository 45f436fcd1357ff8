"""Model folders that are read without torch."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import schedulers
from safetensors.torch import save_file

from tests.pipelines.models import ALL, families, formats_of
from tests.pipelines.variants import edit_json
from tridentserve.errors import ModelFolderError
from tridentserve.models import model_folder
from tridentserve.models.families import FAMILIES
from tridentserve.models.model_folder import count_safetensors_bytes, detect_family, stage_weights_bytes
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.stages import Stage

Model = Callable[[str], Path]


@pytest.mark.parametrize("variant", families(*ALL, "sd3-without-t5", quick=("sd3", "sd3-without-t5", "flux")))
def test_stage_bytes_are_those_of_the_loaded_weights(model: Model, variant: str) -> None:
    for stage, expected in stage_weights_bytes(model(variant)).items():
        adapter = load_adapter(model(variant), frozenset({stage}))
        assert isinstance(adapter, DiffusersAdapter)
        tensors = {
            tensor.data_ptr(): tensor.nbytes
            for module in adapter.pipe.components.values()
            if isinstance(module, torch.nn.Module)
            for tensor in module.state_dict().values()
        }
        assert sum(tensors.values()) == expected


def test_bytes_follow_the_number_format_of_each_component(model: Model) -> None:
    folder = model("flux_kontext")
    stored, half = stage_weights_bytes(folder), stage_weights_bytes(folder, formats_of(folder, "float16"))
    assert {stage: 2 * size for stage, size in half.items()} == stored
    formats = formats_of(folder, {"E": "bfloat16", "D": "bfloat16", "C": "float32"})
    mixed = stage_weights_bytes(folder, formats)
    assert (mixed[Stage.DIFFUSE], mixed[Stage.DECODE]) == (half[Stage.DIFFUSE], stored[Stage.DECODE])
    # E has the VAE too.
    assert mixed[Stage.ENCODE] == half[Stage.ENCODE] + stored[Stage.DECODE] // 2


def test_a_vae_that_overflows_in_float16_takes_what_it_is_served_in(model: Model) -> None:
    folder = model("sdxl")
    stored, half = stage_weights_bytes(folder), stage_weights_bytes(folder, formats_of(folder, "float16"))
    assert 2 * half[Stage.DIFFUSE] == stored[Stage.DIFFUSE]
    assert half[Stage.DECODE] == stored[Stage.DECODE]


def test_family_comes_from_the_pipeline_class(model: Model) -> None:
    assert detect_family(model("sd3")).name == "sd3"
    assert detect_family(model("flux-schnell")).name == "flux"


def test_shards_are_added_up(model: Model, tmp_path: Path) -> None:
    for component, library in (("transformer", "diffusers"), ("vae", "diffusers"), ("text_encoder", "transformers")):
        (tmp_path / component).mkdir()
        stem = "model" if library == "transformers" else "diffusion_pytorch_model"
        for shard in (1, 2):
            save_file({f"w{shard}": torch.zeros(shard, 5)}, tmp_path / component / f"{stem}-{shard}.safetensors")
        shards = {"weight_map": {"w1": f"{stem}-1.safetensors", "w2": f"{stem}-2.safetensors"}}
        (tmp_path / component / f"{stem}.safetensors.index.json").write_text(json.dumps(shards))
    (tmp_path / "text_encoder_2").mkdir()
    save_file({"w": torch.zeros(5)}, tmp_path / "text_encoder_2" / "model.safetensors")
    for component in ("tokenizer", "tokenizer_2", "scheduler"):
        (tmp_path / component).mkdir()
    libraries = {"transformer": "diffusers", "vae": "diffusers", "scheduler": "diffusers"}
    components = [name for names in FAMILIES["flux"].components.values() for name in names]
    index = {name: [libraries.get(name, "transformers"), "C"] for name in components}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **index}))
    assert stage_weights_bytes(tmp_path) == {Stage.ENCODE: 80, Stage.DIFFUSE: 60, Stage.DECODE: 60}
    (tmp_path / "vae" / "diffusion_pytorch_model-2.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"lists shards that are missing: \['diffusion_pytorch_model-2"):
        stage_weights_bytes(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", struct.pack("<Q", 2**60), struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"],
    ids=["empty", "short", "huge-header", "no-json", "no-object"],
)
def test_files_that_are_no_safetensors_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is no readable safetensors file"):
        count_safetensors_bytes(path)


def test_a_truncated_file_is_noticed_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(100)}, path)
    assert count_safetensors_bytes(path) == 400
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFolderError, match="is cut short"):
        count_safetensors_bytes(path)


@pytest.mark.parametrize("content", ["[]", "{", "\x00"])
def test_an_index_that_is_no_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(ModelFolderError, match=r"model_index\.json (holds no JSON object|cannot be read)"):
        detect_family(tmp_path)


def test_an_index_without_a_class_is_refused(model: Model, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    edit_json(tmp_path / "model_index.json", vae=["diffusers", "AutoencoderKL"])
    with pytest.raises(ModelFolderError, match="names the pipeline class 'None'"):
        detect_family(tmp_path)


@pytest.mark.parametrize("value", [[None, None], None, ["diffusers"], "AutoencoderKL", ["diffusers", 3], ["", "A"]])
@pytest.mark.parametrize("component", ["transformer", "vae", "scheduler", "text_encoder", "tokenizer"])
def test_only_optional_components_may_be_left_out(model: Model, tmp_path: Path, component: str, value: object) -> None:
    folder = Path(shutil.copytree(model("sd3"), tmp_path / "model"))
    edit_json(folder / "model_index.json", **{component: value})
    for look in (stage_weights_bytes, lambda folder: load_adapter(folder, frozenset(Stage))):
        with pytest.raises(ModelFolderError, match=rf"model_index\.json names no library and class for '{component}'"):
            look(folder)


def test_a_text_encoder_needs_its_tokenizer(model: Model, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model("sd3"), tmp_path / "model"))
    edit_json(folder / "model_index.json", tokenizer_3=[None, None])
    with pytest.raises(ModelFolderError, match="names 'text_encoder_3' without 'tokenizer_3'; leave out both"):
        stage_weights_bytes(folder)


@pytest.mark.parametrize("scheduler", ["HeunDiscreteScheduler", "PNDMScheduler", "FlowMatchHeunDiscreteScheduler"])
def test_a_scheduler_that_runs_the_model_more_than_once_per_step_is_refused(
    model: Model, tmp_path: Path, scheduler: str
) -> None:
    folder = Path(shutil.copytree(model("sd3"), tmp_path / "model"))
    edit_json(folder / "model_index.json", scheduler=["diffusers", scheduler])
    for look in (stage_weights_bytes, lambda folder: load_adapter(folder, frozenset({Stage.DIFFUSE}))):
        with pytest.raises(
            ModelFolderError, match=rf"model_index\.json names the scheduler {scheduler}, .* not supported"
        ):
            look(folder)


def steps_made(scheduler_class: Any) -> int | None:
    """The model's steps for 20 inference steps; None where the class cannot be made, or started, without more."""
    try:
        scheduler = scheduler_class()
        scheduler.set_timesteps(20)
    except (ImportError, KeyError, TypeError, ValueError):
        return None
    return len(scheduler.timesteps)


# Raised inside diffusers' own schedulers with numpy 2.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_those_that_are_refused_are_all_of_diffusers() -> None:
    made = {}
    for name in dir(schedulers):
        kind = getattr(schedulers, name)
        if (
            isinstance(kind, type)
            and issubclass(kind, diffusers.SchedulerMixin)
            and kind is not diffusers.SchedulerMixin
        ):
            made[name] = steps_made(kind)
    others = {name for name, steps in made.items() if steps not in (None, 20)}
    assert others <= model_folder._NOT_STEP_BY_STEP
    assert {"HeunDiscreteScheduler", "PNDMScheduler"} <= others
    assert model_folder._NOT_STEP_BY_STEP.isdisjoint(name for name, steps in made.items() if steps == 20)


def test_a_boundary_needs_a_second_transformer(model: Model, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model("wan"), tmp_path / "model"))
    edit_json(folder / "model_index.json", boundary_ratio=0.9)
    for look in (stage_weights_bytes, lambda folder: load_adapter(folder, frozenset({Stage.DIFFUSE}))):
        with pytest.raises(ModelFolderError, match=r"model_index\.json has a boundary_ratio, but no 'transformer_2'"):
            look(folder)


def test_the_size_multiple_is_the_model_folders(model: Model, tmp_path: Path) -> None:
    assert detect_family(model("wan-2.2-ti2v")).size_multiple == 32
    assert detect_family(model("wan")) == FAMILIES["wan"]
    folder = Path(shutil.copytree(model("wan"), tmp_path / "model"))
    edit_json(folder / "vae" / "config.json", scale_factor_spatial="8")
    with pytest.raises(ModelFolderError, match=r"vae/config\.json says scale_factor_spatial is '8'"):
        detect_family(folder)


@pytest.mark.parametrize("weight_map", [[1], None, {}, {"w": 1}, {"w": "../other.safetensors"}])
def test_an_index_of_shards_that_is_none_is_named(model: Model, tmp_path: Path, weight_map: object) -> None:
    folder = Path(shutil.copytree(model("sd3"), tmp_path / "model"))
    index = folder / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        ModelFolderError, match=r"index\.json holds no weight_map from tensors to the files in its directory"
    ):
        stage_weights_bytes(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
        {"dtype": "F32", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        [],
    ],
)
def test_a_damaged_entry_of_a_header_is_named(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is no readable safetensors file"):
        count_safetensors_bytes(path, "bfloat16")
