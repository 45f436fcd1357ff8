"""The components that are loaded from a model folder, and the errors for folders that cannot be loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.pipelines.models import ALL, families, formats_of
from tests.pipelines.variants import edit_json
from tridentserve.errors import ModelFolderError
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.stages import Stage

Model = Callable[[str], Path]
DIFFUSE = frozenset({Stage.DIFFUSE})


@pytest.fixture
def copy(model: Model, tmp_path: Path) -> Path:
    """A copy of the model folder that a test may damage."""
    return Path(shutil.copytree(model("sd3"), tmp_path / "model"))


def loaded_modules(folder: Path, stages: frozenset[Stage], dtype: Any = None) -> dict[str, torch.dtype]:
    adapter = load_adapter(folder, stages, formats=formats_of(folder, dtype))
    assert isinstance(adapter, DiffusersAdapter)
    modules = {name: part for name, part in adapter.pipe.components.items() if isinstance(part, torch.nn.Module)}
    assert not any(module.training for module in modules.values())
    assert all(parameter.device.type == "cpu" for module in modules.values() for parameter in module.parameters())
    return {name: next(module.parameters()).dtype for name, module in modules.items()}


@pytest.mark.parametrize(
    ("variant", "stage", "components"),
    [
        ("sd3", Stage.ENCODE, {"text_encoder", "text_encoder_2", "text_encoder_3"}),
        ("sd3-without-t5", Stage.ENCODE, {"text_encoder", "text_encoder_2"}),
        ("sd3", Stage.DIFFUSE, {"transformer"}),
        ("sd3", Stage.DECODE, {"vae"}),
        ("flux", Stage.ENCODE, {"text_encoder", "text_encoder_2"}),
        ("flux", Stage.DIFFUSE, {"transformer"}),
    ],
)
def test_a_stage_holds_its_own_weights_only(model: Model, variant: str, stage: Stage, components: set[str]) -> None:
    assert loaded_modules(model(variant), frozenset({stage})) == dict.fromkeys(components, torch.float32)


@pytest.mark.parametrize("variant", ["sd3", "flux"])
def test_several_stages_share_one_adapter_and_number_formats_can_be_chosen(model: Model, variant: str) -> None:
    stages = frozenset({Stage.DIFFUSE, Stage.DECODE})
    expected = dict.fromkeys(("transformer", "vae"), torch.bfloat16)
    assert loaded_modules(model(variant), stages, "bfloat16") == expected
    mixed = {"transformer": torch.float16, "vae": torch.float32}
    assert loaded_modules(model(variant), stages, {"D": "float16", "C": "float32"}) == mixed


@pytest.mark.parametrize("variant", families(*ALL))
def test_no_checkpoint_is_read_in_another_number_format_first(
    model: Model, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for a moment would be memory that a machine must have."""
    folder, read = model(variant), {}
    formats = formats_of(folder, {"E": "bfloat16", "D": "float16", "C": "bfloat16"})
    for library in (diffusers.ModelMixin, transformers.PreTrainedModel):

        def note(cls: Any, /, path: str, *arguments: Any, stock: Any = library.from_pretrained, **options: Any) -> Any:
            read[Path(path).name] = options["dtype"]
            return stock.__func__(cls, path, *arguments, **options)

        monkeypatch.setattr(library, "from_pretrained", classmethod(note))
    load_adapter(folder, frozenset(Stage), formats=formats)
    assert read == {name: getattr(torch, formats[name]) for name in read}
    assert {"text_encoder", "vae"} <= read.keys()


@pytest.mark.parametrize("variant", families("wan", "wan-2.2", "wan_i2v"))
def test_a_model_that_keeps_modules_in_float32_is_never_in_float32_as_a_whole(
    model: Model, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its number formats before its tensors are copied into it."""
    before: dict[str, torch.dtype] = {}
    stock: Any = diffusers.ModelMixin._load_pretrained_model

    def note(cls: Any, model: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        before.update({name: tensor.dtype for name, tensor in model.state_dict().items()})
        return stock.__func__(cls, model, *arguments, **options)

    monkeypatch.setattr(diffusers.ModelMixin, "_load_pretrained_model", classmethod(note))
    adapter: Any = load_adapter(model(variant), DIFFUSE, formats=formats_of(model(variant), "bfloat16"))
    after = {name: tensor.dtype for name, tensor in adapter.pipe.transformer.state_dict().items()}
    assert before == after
    assert {dtype for name, dtype in after.items() if "time_embedder" in name} == {torch.float32}
    assert {dtype for name, dtype in after.items() if ".to_q." in name} == {torch.bfloat16}


def test_no_stage_at_all_is_refused(model: Model) -> None:
    with pytest.raises(ModelFolderError, match="name at least one of encode, diffuse, decode"):
        load_adapter(model("sd3"), frozenset())


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"nowhere/model_index\.json is missing"):
        load_adapter(tmp_path / "nowhere", DIFFUSE)


def test_an_unsupported_pipeline_is_named(copy: Path) -> None:
    edit_json(copy / "model_index.json", _class_name="KandinskyPipeline")
    with pytest.raises(
        ModelFolderError, match=r"'KandinskyPipeline', .* cannot be served whole, as its call needs image_embeds"
    ):
        load_adapter(copy, DIFFUSE)


def test_a_missing_component_is_named(copy: Path) -> None:
    shutil.rmtree(copy / "transformer")
    with pytest.raises(ModelFolderError, match=r"transformer is missing although .*model_index\.json lists it"):
        load_adapter(copy, DIFFUSE)


def test_weights_that_are_no_safetensors_are_not_loaded(copy: Path) -> None:
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ModelFolderError, match=r"only safetensors are loaded: save .* safe_serialization=True"):
        load_adapter(copy, DIFFUSE)


def test_weights_of_other_stages_may_be_absent(copy: Path) -> None:
    """A worker that holds one stage can do with the files of that stage and the configs of the models."""
    for component in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        shutil.rmtree(copy / component)
    (copy / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert load_adapter(copy, DIFFUSE).family == "sd3"


def test_a_damaged_weight_file_is_named(copy: Path) -> None:
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelFolderError, match="transformer cannot be loaded as SD3Transformer2DModel"):
        load_adapter(copy, DIFFUSE)


def rewrite(weights: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})


WEIGHTS = [
    (Stage.ENCODE, "text_encoder/model.safetensors", "text_projection.weight"),
    (Stage.ENCODE, "text_encoder_3/model.safetensors", "encoder.block.0.layer.0.SelfAttention.k.weight"),
    (Stage.ENCODE, "text_encoder_3/model.safetensors", "shared.weight"),
    (Stage.DIFFUSE, "transformer/diffusion_pytorch_model.safetensors", "context_embedder.weight"),
    (Stage.DECODE, "vae/diffusion_pytorch_model.safetensors", "decoder.conv_in.bias"),
]


@pytest.mark.parametrize(("stage", "file", "tensor"), WEIGHTS)
def test_a_missing_tensor_is_named_and_not_made_up(copy: Path, stage: Stage, file: str, tensor: str) -> None:
    rewrite(copy / file, lambda tensors: tensors.pop(tensor))
    with pytest.raises(ModelFolderError, match=rf"{Path(file).parent} lack tensors of \w+: .*{tensor}.*; copy"):
        load_adapter(copy, frozenset({stage}))


@pytest.mark.parametrize(("stage", "file", "tensor"), WEIGHTS)
def test_a_tensor_of_another_shape_is_named(copy: Path, stage: Stage, file: str, tensor: str) -> None:
    rewrite(copy / file, lambda tensors: tensors.update({tensor: torch.zeros(3, 3)}))
    with pytest.raises(ModelFolderError, match=rf"{Path(file).parent} [^/]*{tensor}"):
        load_adapter(copy, frozenset({stage}))


@pytest.mark.parametrize("names", [["shared.weight"], ["encoder.embed_tokens.weight"], []])
def test_tied_embeddings_may_be_stored_under_either_name_or_both(copy: Path, names: list[str]) -> None:
    """Published T5 encoders hold the tied embeddings once or twice."""

    def store(tensors: dict[str, torch.Tensor]) -> None:
        shared = tensors.pop("shared.weight")
        for name in names or ["shared.weight", "encoder.embed_tokens.weight"]:
            tensors[name] = shared.clone()

    expected = load_file(copy / "text_encoder_3" / "model.safetensors")["shared.weight"]
    rewrite(copy / "text_encoder_3" / "model.safetensors", store)
    adapter = load_adapter(copy, frozenset({Stage.ENCODE}))
    assert isinstance(adapter, DiffusersAdapter)
    assert torch.equal(adapter.pipe.text_encoder_3.get_input_embeddings().weight, expected)


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.DIFFUSE])
def test_a_model_of_another_class_is_refused_before_it_is_made(copy: Path, stage: Stage) -> None:
    edit_json(copy / "model_index.json", vae=["diffusers", "FluxTransformer2DModel"])
    message = r"wants FluxTransformer2DModel for 'vae' but .*vae/config\.json is of 'AutoencoderKL'"
    with pytest.raises(ModelFolderError, match=message):
        load_adapter(copy, frozenset({stage}))


@pytest.mark.parametrize(
    ("component", "entry"),
    [
        ("vae", ["diffusers", "__name__"]),
        ("transformer", ["diffusers", "StableDiffusion3Pipeline"]),
        ("scheduler", ["diffusers", "AutoencoderKL"]),
        ("text_encoder", ["transformers", "CLIPTokenizer"]),
        ("tokenizer", ["transformers", "nothing_of_this_name"]),
    ],
)
def test_a_class_that_cannot_be_this_component_is_named(copy: Path, component: str, entry: list[str]) -> None:
    edit_json(copy / "model_index.json", **{component: entry})
    with pytest.raises(ModelFolderError, match=rf"{'.'.join(entry)} for '{component}', which is not known here as a "):
        load_adapter(copy, frozenset(Stage))


@pytest.mark.parametrize("component", ["tokenizer", "tokenizer_3"])
def test_an_empty_tokenizer_directory_is_named(copy: Path, component: str) -> None:
    shutil.rmtree(copy / component)
    (copy / component).mkdir()
    with pytest.raises(ModelFolderError, match=rf"{component} has neither tokenizer\.json nor .*; copy this folder"):
        load_adapter(copy, frozenset({Stage.ENCODE}))


def test_a_tokenizer_without_a_length_is_named(copy: Path) -> None:
    (copy / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"tokenizer_config\.json gives no model_max_length"):
        load_adapter(copy, frozenset({Stage.ENCODE}))


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    edit_json(copy / "transformer" / "config.json", attention_head_dim=32)
    with pytest.raises(ModelFolderError, match="transformer cannot be loaded"):
        load_adapter(copy, DIFFUSE)


def test_a_missing_config_of_a_stub_is_named(copy: Path) -> None:
    (copy / "vae" / "config.json").unlink()
    with pytest.raises(ModelFolderError, match="vae cannot be loaded as AutoencoderKL"):
        load_adapter(copy, DIFFUSE)


def test_an_unknown_component_class_is_named(copy: Path) -> None:
    edit_json(copy / "model_index.json", transformer=["my_models", "BigTransformer"])
    with pytest.raises(ModelFolderError, match=r"wants my_models\.BigTransformer for 'transformer'; use a"):
        load_adapter(copy, DIFFUSE)
