"""FLUX.2: the processor of dev in the place of a tokenizer, and input images, each in a size of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.pipelines.models import (
    families,
    final_latents,
    load_stage,
    make_image,
    make_inputs,
    start,
    stock_result,
)
from tests.pipelines.variants import edit_json
from tridentserve.errors import InvalidRequestError, ModelFolderError
from tridentserve.models.families import FAMILIES
from tridentserve.models.input_image import encode_png, read_image, shrink_image
from tridentserve.pipelines import DenoisingState, load_adapter
from tridentserve.stages import Stage

Model = Callable[[str], Path]
ENCODE = frozenset({Stage.ENCODE})
pytestmark = pytest.mark.families


@pytest.fixture
def published(model: Model, tmp_path: Path) -> Path:
    """A model folder as it is published: a processor, whose tokenizer states no maximum of tokens."""
    folder = Path(shutil.copytree(model("flux2"), tmp_path / "flux2"))
    edit_json(folder / "model_index.json", tokenizer=["transformers", "PixtralProcessor"])
    edit_json(folder / "tokenizer" / "tokenizer_config.json", model_max_length=int(1e30))
    return folder


def test_only_the_tokenizer_of_a_processor_is_loaded(model: Model, published: Path) -> None:
    inputs = make_inputs(variant="flux2")
    condition = load_adapter(published, ENCODE).encode(inputs)
    for name, tensor in load_stage(model("flux2"), Stage.ENCODE).encode(inputs).items():
        assert torch.equal(condition[name], tensor), name


def test_a_tokenizer_that_cannot_write_chats_is_named(published: Path) -> None:
    (published / "tokenizer" / "chat_template.jinja").unlink()
    # Without a template nothing else says how many tokens to pad to.
    with pytest.raises(ModelFolderError, match=r"tokenizer_config\.json gives no model_max_length"):
        load_adapter(published, ENCODE)
    edit_json(published / "tokenizer" / "tokenizer_config.json", model_max_length=512)
    with pytest.raises(ModelFolderError, match=r"no chat template; copy the folder again, chat_template\.jinja too"):
        load_adapter(published, ENCODE)


@pytest.mark.parametrize("variant", families("flux2", "flux2_klein"))
def test_an_image_has_an_effect_and_its_place_too(model: Model, variant: str) -> None:
    plain = make_inputs(64, 64, steps=2, variant=variant)
    images = [make_image(seed, 80, 80) for seed in (0, 1)]
    results = [
        final_latents(model(variant), inputs)
        for inputs in (
            plain,
            replace(plain, image=images[0]),
            replace(plain, image=images[1]),
            replace(plain, image=images[0], more_images=(images[1],)),
            replace(plain, image=images[1], more_images=(images[0],)),
        )
    ]
    for index, one in enumerate(results):
        for other in results[index + 1 :]:
            assert (one - other).abs().max() > 1e-3


def test_large_images_may_come_in_the_size_that_the_model_sees(model: Model) -> None:
    """A megapixel, in the image's own proportions, whose edges the stock pipeline cuts off to whole tokens."""
    folder, family = model("flux2_klein"), FAMILIES["flux2_klein"]
    inputs = make_inputs(64, 64, steps=1, variant="flux2_klein", image=make_image(0, 1000, 1210))
    small = shrink_image(read_image(inputs.image or b"", 10**7), inputs.shape, family)
    assert small.width * small.height <= 1024 * 1024
    sent = replace(inputs, image=encode_png(small))
    expected, found = (load_stage(folder, Stage.ENCODE).encode(each) for each in (inputs, sent))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    ratio = family.compute_token_ratio(inputs.shape, [small.size])
    assert ratio == 1 + expected["image_latents"].shape[1] / inputs.shape.tokens
    assert torch.equal(final_latents(folder, inputs), stock_result(folder, inputs, "latent"))


def test_only_images_of_the_same_sizes_share_a_pass(model: Model) -> None:
    folder = model("flux2_klein")
    diffuse = load_stage(folder, Stage.DIFFUSE)

    def ask(height: int, width: int, seed: int = 0) -> DenoisingState:
        image = make_image(seed, height, width)
        return start(folder, make_inputs(64, 64, steps=2, seed=seed, variant="flux2_klein", image=image))

    one, other = ask(96, 64), ask(96, 64, seed=1)
    for apart in (ask(64, 96), ask(96, 96), start(folder, make_inputs(64, 64, steps=2, variant="flux2_klein"))):
        assert diffuse.batch_key(apart) != diffuse.batch_key(one)
    for together, alone in zip(diffuse.advance([one, other], 2), (one, other), strict=True):
        expected = diffuse.step(alone, 2).tensors["latents"]
        assert torch.allclose(together.tensors["latents"], expected, rtol=0, atol=1e-4)


def test_images_that_the_stock_pipeline_refuses_are_refused(model: Model) -> None:
    inputs = make_inputs(64, 64, variant="flux2", image=make_image(0, 63, 100))
    with pytest.raises(InvalidRequestError, match="at least 64 pixels"):
        load_stage(model("flux2"), Stage.ENCODE).encode(inputs)
