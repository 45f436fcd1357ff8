"""A request with a LoRA is denoised as by the stock model with its weights changed; other requests see none of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from tests.pipelines.loras import RANK, denoiser, random_lora, save_lora, uses
from tests.pipelines.models import ALL, families, final_latents, load_stage, make_inputs, start, stock_result
from tridentserve.errors import LoraFileError, ModelFolderError
from tridentserve.models.families import FAMILIES
from tridentserve.models.lora_files import LoraFile, LoraUse
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.stages import Stage

Model = Callable[[str], Path]
TOLERANCE = 1e-4
WITH_LORAS = tuple(name for name in ALL if FAMILIES[name].loras)
QUICK = ("sd3", "flux", "sdxl")


@pytest.fixture
def copied(model: Model, tmp_path: Path) -> Model:
    """A copy of a model folder, to which a test may add LoRAs."""

    def copy(variant: str) -> Path:
        folder = tmp_path / variant
        return folder if folder.is_dir() else Path(shutil.copytree(model(variant), folder))

    return copy


def merged(folder: Path, tensors: dict[str, torch.Tensor], scale: float = 1.0) -> Path:
    """The same model with the LoRA's changes in its weights."""
    component, stock = denoiser(folder)
    changed = type(stock).from_config(stock.config)
    changed.load_state_dict(stock.state_dict())
    with torch.no_grad():
        for key in [key for key in tensors if "lora_A" in key]:
            down, up = tensors[key].double(), tensors[key.replace("lora_A", "lora_B")].double()
            weight = changed.get_parameter(key.replace("lora_A.", ""))
            weight += scale * (up.flatten(1) @ down.flatten(1)).reshape(weight.shape).float()
    target = folder.with_name(f"{folder.name}-merged")
    shutil.copytree(folder, target)
    changed.save_pretrained(target / component)
    return target


@pytest.mark.parametrize("variant", families(*WITH_LORAS, quick=QUICK))
def test_it_is_the_stock_model_with_other_weights(copied: Model, variant: str) -> None:
    folder, tensors = copied(variant), random_lora(copied(variant))
    save_lora(folder, "style", tensors)
    plain, styled = make_inputs(variant=variant), make_inputs(variant=variant, loras=uses(folder, "style"))
    before = final_latents(folder, plain)
    expected = torch.as_tensor(stock_result(merged(folder, tensors), plain, "latent"))
    assert (final_latents(folder, styled) - expected).abs().max() < TOLERANCE
    assert (before - expected).abs().max() > 100 * TOLERANCE
    assert torch.equal(final_latents(folder, plain), before)


@pytest.mark.parametrize("variant", families(*WITH_LORAS, quick=QUICK))
def test_it_is_what_diffusers_makes_of_the_file(copied: Model, variant: str) -> None:
    pytest.importorskip(
        "peft", reason="diffusers itself loads LoRAs where PEFT is installed only; the service needs none"
    )
    folder = copied(variant)
    file = save_lora(folder, "style", random_lora(folder))
    pipe = getattr(diffusers, FAMILIES[variant].pipeline_class).from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(file.parent, weight_name=file.name)
    component, _ = denoiser(folder)
    adapter = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    state = start(folder, make_inputs(variant=variant, loras=uses(folder, "style")))
    ours = adapter.step(state, 1).tensors["latents"]
    setattr(adapter.pipe, component, getattr(pipe, component).eval())  # type: ignore[attr-defined]
    state.values["loras"] = []
    assert torch.equal(adapter.step(state, 1).tensors["latents"], ours)


def test_families_are_those_that_diffusers_knows_loras_of() -> None:
    for family in FAMILIES.values():
        assert family.loras == hasattr(getattr(diffusers, family.pipeline_class), "load_lora_weights")


@pytest.mark.parametrize("variant", families(*WITH_LORAS, quick=("flux",)))
def test_requests_of_one_batch_may_have_different_ones(copied: Model, variant: str) -> None:
    """On layers of blocks and of what is around them, with texts of different lengths, and two outputs of one."""
    folder = copied(variant)
    for seed, name in enumerate(("one", "other")):
        save_lora(folder, name, random_lora(folder, seed, everywhere=True))
    adapter = load_stage(folder, Stage.DIFFUSE)
    choices = [uses(folder, "one"), uses(folder, "other", one=-0.5), (), uses(folder, "one")]
    prompts = ("a fox", "a fox in the snow by a frozen lake at night", "a", "")
    batch = [
        make_inputs(variant=variant, loras=loras, prompt=prompt, num_outputs=2 if index == 1 else 1)
        for index, (loras, prompt) in enumerate(zip(choices, prompts, strict=True))
    ]
    states = [start(folder, inputs) for inputs in batch]
    keys = [adapter.batch_key(state) for state in states]
    if not adapter.mixes_loras:  # type: ignore[attr-defined]
        assert len(set(keys)) == 3
        with pytest.raises(ValueError, match="LoRAs"):
            adapter.advance(states[:2])
        return
    assert len(set(keys)) == 1
    for state, inputs in zip(adapter.advance(states, 3), batch, strict=True):
        assert (state.tensors["latents"] - final_latents(folder, inputs)).abs().max() < TOLERANCE
    one, other = (final_latents(folder, make_inputs(variant=variant, loras=each)) for each in choices[:2])
    assert (one - other).abs().max() > 100 * TOLERANCE


def test_a_stopped_request_resumes_with_it_in_a_new_adapter(copied: Model) -> None:
    folder = copied("flux")
    save_lora(folder, "style", random_lora(folder))
    inputs = make_inputs(variant="flux", loras=uses(folder, "style"))
    stopped = load_stage(folder, Stage.DIFFUSE).step(start(folder, inputs), 1)
    fresh = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    assert torch.equal(fresh.step(stopped, 2).tensors["latents"], final_latents(folder, inputs))


def test_it_leaves_memory_and_comes_back(copied: Model) -> None:
    folder = copied("sd3")
    save_lora(folder, "style", random_lora(folder))
    adapter = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    state = adapter.step(start(folder, make_inputs(loras=uses(folder, "style"))))
    assert adapter.loras.cache.num_bytes > 0
    assert adapter.loras.cache.free(1) > 0
    assert adapter.loras.cache.files == ()
    latents = adapter.step(state, 2).tensors["latents"]
    assert torch.equal(latents, final_latents(folder, make_inputs(loras=uses(folder, "style"))))


def kohya(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A file in the form of most LoRAs of SDXL, for a linear layer and a convolution, and its changes at scale 1."""
    _, unet = denoiser(folder)
    generator = torch.Generator().manual_seed(0)
    file: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    layers = [
        (path, layer) for path, layer in unet.named_modules() if path.endswith(("attn1.to_q", "downsamplers.0.conv"))
    ]
    assert {type(layer) for _, layer in layers} == {torch.nn.Linear, torch.nn.Conv2d}
    for path, layer in layers:
        weight = layer.weight
        down = 0.1 * torch.randn(RANK, *weight.shape[1:], generator=generator)
        up = 0.1 * torch.randn(weight.shape[0], RANK, *[1] * (weight.ndim - 2), generator=generator)
        name = "lora_unet_" + path.replace(".", "_")
        file |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(2.0)}
        meaning |= {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}
    return file, meaning


def test_files_of_kohya_with_alphas_and_convolutions(copied: Model) -> None:
    folder = copied("sdxl")
    file, meaning = kohya(folder)
    save_lora(folder, "style", file)
    inputs = make_inputs(variant="sdxl", loras=uses(folder, "style"))
    expected = stock_result(merged(folder, meaning, scale=2.0 / RANK), inputs, "latent")
    assert (final_latents(folder, inputs) - expected).abs().max() < TOLERANCE
    assert (final_latents(folder, make_inputs(variant="sdxl")) - expected).abs().max() > 10 * TOLERANCE


def header(config: dict[str, Any]) -> dict[str, str]:
    """The metadata of a file with a configuration of PEFT's, as diffusers writes it."""
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in config.items()})}


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 2}, 0.5),
        ({"lora_alpha": 2, "use_rslora": True}, 1.0),
        ({"lora_alpha": 2, "alpha_pattern": {"^": 8, "": 8}}, 2.0),
    ],
)
def test_what_peft_says_of_the_scale_holds(copied: Model, config: dict[str, Any], scale: float) -> None:
    folder, tensors = copied("flux"), random_lora(copied("flux"))
    if anchors := config.get("alpha_pattern"):
        # Whole names, with the anchor of diffusers and without.
        paths = sorted({key.split(".lora_")[0] for key in tensors})
        named = {f"{anchor}{path}": 8 for at, anchor in enumerate(anchors) for path in paths[at::2]}
        config = config | {"alpha_pattern": named}
    save_lora(folder, "style", tensors, header(config))
    inputs = make_inputs(variant="flux", loras=uses(folder, "style"))
    expected = stock_result(merged(folder, tensors, scale), inputs, "latent")
    assert (final_latents(folder, inputs) - expected).abs().max() < TOLERANCE


def test_what_cannot_be_used_is_refused_with_its_name(copied: Model) -> None:
    folder, tensors = copied("sd3"), random_lora(copied("sd3"))
    first = next(iter(tensors))
    wide = tensors | {first: torch.zeros(RANK, 7)}
    save_lora(folder, "wide", wide)
    save_lora(folder, "text", tensors | {"text_encoder.layers.0.q_proj.lora_A.weight": torch.zeros(1)})
    save_lora(folder, "elsewhere", {key.replace("block", "blob"): tensor for key, tensor in tensors.items()})
    save_lora(folder, "half", {first: tensors[first]})
    save_lora(folder, "empty", {key: tensor[:, :0] if "_B" in key else tensor[:0] for key, tensor in tensors.items()})
    (folder / "loras" / "damaged.safetensors").write_bytes(b"no")
    adapter = load_stage(folder, Stage.DIFFUSE)
    for name in ("wide", "text", "elsewhere", "half", "empty", "damaged", "absent"):
        with pytest.raises(ModelFolderError, match=f"{name}.safetensors"):
            adapter.step(start(folder, make_inputs(loras=uses(folder, name))))
    assert torch.equal(final_latents(folder, make_inputs()), final_latents(folder, make_inputs()))


ODD_HEADERS: dict[str, dict[str, str]] = {
    "a regular expression that is none": header({"alpha_pattern": {"(": 1}}),
    "one that may take years": header({"alpha_pattern": {"(([a-z_.0-9])*)*": 1}}),
    "patterns without alphas": header({"alpha_pattern": ["x_embedder"]}),
    "an alpha of a pattern": header({"alpha_pattern": {"x_embedder": "1"}}),
    "an alpha": header({"lora_alpha": "x"}),
    "an alpha without bounds": header({"lora_alpha": float("inf")}),
    "a rank": header({"r": 0}),
    "rslora": header({"use_rslora": "no"}),
    "no object": {"lora_adapter_metadata": "[1]"},
    "no JSON": {"lora_adapter_metadata": "{"},
}


@pytest.mark.parametrize("metadata", ODD_HEADERS.values(), ids=ODD_HEADERS)
def test_metadata_is_not_trusted(copied: Model, metadata: dict[str, str]) -> None:
    folder = copied("sd3")
    save_lora(folder, "odd", random_lora(folder), metadata)
    with pytest.raises(ModelFolderError, match=r"odd\.safetensors cannot be read as a LoRA"):
        load_stage(folder, Stage.DIFFUSE).step(start(folder, make_inputs(loras=uses(folder, "odd"))))


def test_alphas_in_tensors_are_not_trusted(copied: Model) -> None:
    folder = copied("sdxl")
    file, _ = kohya(folder)
    for alpha in (torch.tensor(torch.nan), torch.ones(2)):
        save_lora(folder, "odd", {key: alpha.clone() if "alpha" in key else tensor for key, tensor in file.items()})
        adapter = load_adapter(folder, frozenset({Stage.DIFFUSE}))
        with pytest.raises(ModelFolderError, match=r"odd\.safetensors cannot be read as a LoRA"):
            adapter.step(start(folder, make_inputs(variant="sdxl", loras=uses(folder, "odd"))))


def test_a_file_that_cannot_be_read_says_so(tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry elsewhere would not help, and no worker is at fault."""

    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tridentserve.pipelines.lora.lora_layers.compute_digest", refuse)
    file = LoraFile("tiny-sd3", "ink", tmp_path / "ink.safetensors", "a digest")
    file.path.touch()
    adapter = load_adapter(ensure_tiny("sd3", tiny_cache), frozenset({Stage.DIFFUSE}))
    with pytest.raises(LoraFileError, match="the LoRA ink, cannot be read: Permission denied"):
        adapter.loras.hold(((LoraUse(file, 1.0),),))
