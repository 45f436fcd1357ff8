from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipelines.models import model_folder, scale_input_images_less


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model folder of a variant by name."""
    cache_dir = tmp_path_factory.mktemp("models")
    return lambda variant: model_folder(variant, cache_dir)


@pytest.fixture(autouse=True)
def small_input_images(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_input_images_less(monkeypatch)
