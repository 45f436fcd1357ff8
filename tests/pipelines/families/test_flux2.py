"""FLUX.2 dev alone has a processor of text and images in the place of its tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.pipelines.models import edit_json, load_stage, make_inputs
from tridentserve.errors import ModelFolderError
from tridentserve.pipelines import load_adapter
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
