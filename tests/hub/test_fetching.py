"""Models of the hub come to this machine: the needed files only, whole, verified, once, and from where a cut was."""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub.conftest import CLUTTER, MODEL_ID
from tests.support.hub_server import COMMIT, HubServer
from tridentserve.errors import ModelFolderError
from tridentserve.hub import fetch_progress
from tridentserve.hub.cached import find_cached
from tridentserve.hub.download import HubFile
from tridentserve.hub.fetch_progress import FetchProgress
from tridentserve.hub.fetching import fetch_to_cache, fetch_to_folder
from tridentserve.hub.hub_model import HubModel
from tridentserve.models.model_folder import stage_weights_bytes
from tridentserve.pipelines.tiny.build import ensure_tiny

MODEL = HubModel(MODEL_ID)
LARGE = "transformer/diffusion_pytorch_model.safetensors"


def test_a_model_lies_in_the_cache_as_its_folder_does(hub: HubServer, tiny_cache: Path) -> None:
    assert find_cached(MODEL) is None
    snapshot = fetch_to_cache(MODEL)
    assert snapshot.model == HubModel(MODEL_ID, COMMIT)
    assert find_cached(MODEL) == find_cached(snapshot.model) == snapshot.folder
    assert stage_weights_bytes(snapshot.folder) == stage_weights_bytes(ensure_tiny("sd3", tiny_cache))
    assert set(snapshot.list_files()) == hub.files.keys() - set(CLUTTER)
    assert all((snapshot.folder / name).read_bytes() == hub.files[name] for name in snapshot.list_files())


def test_the_second_fetch_asks_for_the_commit_only(hub: HubServer) -> None:
    fetch_to_cache(MODEL)
    hub.requests.clear()
    fetch_to_cache(MODEL)
    assert hub.requests == [f"GET /api/models/{MODEL_ID}/revision/main "]
    hub.requests.clear()
    fetch_to_cache(HubModel(MODEL_ID, COMMIT))
    assert not hub.requests


def test_processes_of_a_node_fetch_once(hub: HubServer) -> None:
    with ThreadPoolExecutor(3) as pool:  # the lock is one of files, whoever holds it
        folders = {snapshot.folder for snapshot in pool.map(fetch_to_cache, [MODEL] * 3)}
    assert len(folders) == 1
    assert hub.downloads_of(LARGE) == [""]


def test_the_log_says_how_far_a_fetch_has_come(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_progress, "_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO):
        progress = FetchProgress("lab/model@main", [HubFile("a", 2_000_000_000, ""), HubFile("b", 500_000_000, "")])
        progress.note(1_000_000_000)
        progress.end_file()
        progress.end_file()
    told = [record.getMessage().partition(" after ")[0] for record in caplog.records]
    assert told == [
        "fetching lab/model@main: 2.50 GB, number of files: 2",
        "lab/model@main: 0 of 2 files, 1.00 of 2.50 GB",
        "lab/model@main: 2 of 2 files, 1.00 of 2.50 GB",
    ]


def test_a_fetch_that_is_stopped_ends_its_downloads() -> None:
    progress = FetchProgress("lab/model@main", [HubFile("a", 1, "")])
    progress.stop()
    with pytest.raises(CancelledError):
        progress.note(1)


def test_offline_nothing_is_asked(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch_to_cache(MODEL)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_to_cache(MODEL) == first
    assert not hub.requests


def test_without_a_connection_the_cache_serves(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch_to_cache(MODEL)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch_to_cache(MODEL) == first


def test_offline_says_what_is_missing_and_how_to_bring_it(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFolderError, match=r"is not in the hub's cache .*fetch_model.py some-lab/tiny-sd3 --to"):
        fetch_to_cache(MODEL)
    with pytest.raises(ModelFolderError, match=r"lacks model_index.json, and the hub .*--revision 0123456789abcdef"):
        fetch_to_cache(HubModel(MODEL_ID, COMMIT))
    assert not hub.requests


def test_offline_a_file_that_was_removed_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fetch_to_cache(MODEL)
    (snapshot.folder / "tokenizer" / "tokenizer_config.json").unlink()
    assert find_cached(MODEL) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFolderError, match=r"lacks tokenizer/tokenizer_config.json, and the hub cannot be reached"):
        fetch_to_cache(MODEL)


def test_a_download_goes_on_after_a_cut(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    hub.cuts[LARGE] = 5000
    with caplog.at_level(logging.WARNING):
        snapshot = fetch_to_cache(MODEL)
    assert (snapshot.folder / LARGE).read_bytes() == hub.files[LARGE]
    assert hub.downloads_of(LARGE) == ["", "bytes=5000-"]
    assert f"{LARGE}: cut after 5000 of {len(hub.files[LARGE])} bytes" in caplog.text


def test_another_start_goes_on_where_the_first_was_cut(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "to"
    begun = folder / f"{LARGE}.{hashlib.sha256(hub.files[LARGE]).hexdigest()[:12]}.partial"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(hub.files[LARGE][:7000])
    assert fetch_to_folder(MODEL, folder) == HubModel(MODEL_ID, COMMIT)
    assert hub.downloads_of(LARGE) == ["bytes=7000-"]
    assert (folder / LARGE).read_bytes() == hub.files[LARGE]
    assert not list(folder.rglob("*.partial"))
    hub.requests.clear()
    fetch_to_folder(MODEL, folder)
    assert not hub.downloads_of(LARGE)


def test_a_folder_that_is_wanted_offline(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_to_cache(MODEL)  # so that the commit of the branch is known
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFolderError, match="cannot be fetched while HF_HUB_OFFLINE is set; run `python scripts"):
        fetch_to_folder(MODEL, tmp_path / "to")


def test_what_came_of_another_revision_is_not_the_beginning_of_this_one(hub: HubServer, tmp_path: Path) -> None:
    folder, latest = tmp_path / "to", hub.files[LARGE]
    older = bytes(len(latest))
    begun = folder / f"{LARGE}.{hashlib.sha256(older).hexdigest()[:12]}.partial"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(older[:7000])
    fetch_to_folder(MODEL, folder)
    assert hub.downloads_of(LARGE) == [""]
    assert (folder / LARGE).read_bytes() == latest
    assert not list(folder.rglob("*.partial"))


@pytest.mark.parametrize("name", [LARGE, "scheduler/scheduler_config.json"])
def test_a_wrong_hash_is_refused(hub: HubServer, name: str) -> None:
    hub.wrong.add(name)
    with pytest.raises(ModelFolderError, match=rf"{name} from .* has the hash [0-9a-f]+, but the hub announces"):
        fetch_to_cache(MODEL)
    assert find_cached(MODEL) is None
    hub.wrong.clear()
    assert (fetch_to_cache(MODEL).folder / name).read_bytes() == hub.files[name]


def test_what_was_damaged_in_the_cache_is_fetched_again(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fetch_to_cache(MODEL)
    blob = (snapshot.folder / LARGE).resolve()
    blob.write_bytes(b"x" + hub.files[LARGE][1:])
    assert not snapshot.is_marked()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFolderError, match=rf"{LARGE} has the hash [0-9a-f]+ instead of {blob.name}; remove"):
        fetch_to_cache(MODEL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetch_to_cache(MODEL)
    assert blob.read_bytes() == hub.files[LARGE]


def test_a_token_is_taken_from_the_environment(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(ModelFolderError, match=r"needs a consent: agree to its terms at .*tiny-sd3, and set HF_TOKEN"):
        fetch_to_cache(MODEL)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetch_to_cache(MODEL).is_marked()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (HubModel("some-lab/other"), r"some-lab/other is no folder here, and .* has no model of this name"),
        (HubModel(MODEL_ID, "v9"), r"has no revision 'v9'"),
    ],
)
def test_a_wrong_name_is_told(hub: HubServer, model: HubModel, message: str) -> None:
    with pytest.raises(ModelFolderError, match=message):
        fetch_to_cache(model)


def test_what_cannot_be_served_costs_no_weights(hub: HubServer) -> None:
    hub.files["model_index.json"] = hub.files["model_index.json"].replace(b"StableDiffusion3", b"Unknown")
    with pytest.raises(ModelFolderError, match="the pipeline class 'UnknownPipeline', which the installed diffusers"):
        fetch_to_cache(MODEL)
    assert not any(name.endswith(".safetensors") for name in "".join(hub.requests).split())
