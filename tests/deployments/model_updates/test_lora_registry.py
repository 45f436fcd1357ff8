"""LoRAs that come and go while the service runs: checked, published, and kept where the configuration says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.model_updates.lora_registry import LoraRegistry, find_file
from tests.deployments.fake_backend import MODELS
from tests.deployments.model_updates.test_reconciler import FLUX, SD3, Bench, run
from tridentserve.engine.live import model_changes
from tridentserve.engine.live.messages import ModelSource
from tridentserve.errors import (
    ConfigError,
    InvalidRequestError,
    LoraExistsError,
    LoraFileError,
    LoraNotFoundError,
    ModelFolderError,
    ModelUnavailableError,
    UnknownModelError,
)
from tridentserve.models.lora_files import LoraFile

SERVED = MODELS["tiny-flux"]
CHALK = LoraFile("tiny-flux", "chalk", Path("/loras/chalk.safetensors"), "1" * 64)


def list_names(registry: LoraRegistry) -> list[str]:
    return [lora.name for lora in registry.apply(SERVED).loras]


def test_a_name_that_was_removed_may_stand_for_another_file() -> None:
    registry = LoraRegistry(None)
    registry.add(CHALK)
    assert list_names(registry) == ["chalk", "ink", "pastel"]
    registry.remove(SERVED.loras[0])
    assert list_names(registry) == ["chalk", "pastel"]
    other = LoraFile("tiny-flux", "ink", Path("/loras/other.safetensors"), "2" * 64)
    registry.add(other)
    assert registry.apply(SERVED).find_lora("ink") == other
    assert other.key != SERVED.loras[0].key
    registry.remove(other)
    assert list_names(registry) == ["chalk", "pastel"]
    assert registry.apply(MODELS["tiny-sd3"]) == MODELS["tiny-sd3"]
    registry.forget("tiny-flux")
    assert list_names(registry) == ["ink", "pastel"]


def test_a_file_keeps_them(tmp_path: Path) -> None:
    file = tmp_path / "new" / "loras.json"
    first = LoraRegistry(file)
    first.add(CHALK)
    first.remove(SERVED.loras[1])
    assert list_names(LoraRegistry(file)) == ["chalk", "ink"]
    assert LoraRegistry(file).apply(SERVED).find_lora("chalk") == CHALK
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"loras\.json"):
        LoraRegistry(file)


def test_a_path_names_one_safetensors_file(tmp_path: Path) -> None:
    file = tmp_path / "ink.safetensors"
    file.touch()
    assert find_file(str(file)) == find_file(str(tmp_path)) == file
    (tmp_path / "other.safetensors").touch()
    (tmp_path / "ink.bin").touch()
    for odd in ("ink.safetensors", str(tmp_path), str(tmp_path / "ink.bin"), str(tmp_path / "none.safetensors")):
        with pytest.raises(ConfigError):
            find_file(odd)


def test_it_is_checked_and_published(tmp_path: Path) -> None:
    file = tmp_path / "chalk.safetensors"
    file.touch()

    async def scenario(bench: Bench) -> None:
        async def check_lora(source: ModelSource, path: Path) -> str:
            bench.changes.told.append(f"check {path.name} for {source.name}")
            if "odd" in path.name:
                raise ModelFolderError(f"{path} is not for this model")
            return "1" * 64

        changes: Any = bench.changes
        changes.check_lora = check_lora
        add, catalogue = bench.reconciler.loras.add, bench.reconciler.catalogue
        before = catalogue.latest.version
        added = await add("tiny-sd3", "chalk", str(file))
        assert bench.changes.told == ["check chalk.safetensors for tiny-sd3"]
        assert catalogue.latest.version != before
        assert catalogue.latest.models[0].loras == (added,)
        with pytest.raises(LoraExistsError):
            await add("tiny-sd3", "chalk", str(file))
        odd = file.rename(tmp_path / "odd.safetensors")
        for path in (str(odd), str(file)):
            with pytest.raises(InvalidRequestError, match="path: "):
                await add("tiny-sd3", "odd", path)
        with pytest.raises(UnknownModelError):
            await add("none", "chalk", str(odd))
        with pytest.raises(LoraNotFoundError):
            bench.reconciler.loras.remove("tiny-sd3", "odd")
        bench.reconciler.loras.remove("tiny-sd3", "chalk")
        assert list(catalogue.latest.models[0].loras) == []
        bench.want({**SD3, "drain": True}, FLUX)
        await bench.wait_for_models(tiny_sd3="draining", tiny_flux="serving")
        with pytest.raises(ModelUnavailableError):
            await add("tiny-sd3", "chalk", str(odd))

    run(scenario, tmp_path)


def test_a_file_that_is_not_on_a_node_is_refused_there(tmp_path: Path) -> None:
    """With an error of the service, so that whoever adds it is told."""
    source = ModelSource("tiny-sd3", tmp_path)
    with pytest.raises(LoraFileError, match=r"ink\.safetensors cannot be read on all nodes: No such file or directory"):
        model_changes._check_lora(tmp_path, source, "cpu", tmp_path / "ink.safetensors")
