"""A configuration that names a model of the hub: what is known of it before it is fetched, and afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.assembly.expected_load import list_expected_load
from deployments.config.app import AppArgs
from deployments.models.hub_models import name_folders
from deployments.models.served import build_served_model
from deployments.serve.videos_deployment import needs_videos
from deployments.validation.args import check_args
from deployments.validation.serve_file import list_unchecked
from tests.hub.conftest import MODEL_ID
from tests.support.hub_server import HubServer
from tridentserve.errors import ModelFolderError
from tridentserve.hub.fetching import fetch_to_cache
from tridentserve.hub.hub_model import HubModel
from tridentserve.requests import Shape

ROOT = Path(__file__).parents[2]


def make_args(**limits: int) -> dict[str, Any]:
    return {
        "models": [{"name": "m", "path": MODEL_ID, "profile_as": "tiny-sd3", "limits": {"max_side": 512, **limits}}],
        "profiles": ["tiny-cpu"],
        "cluster": {"workers_per_node": 1, "memory_mb": 512},
        "placement": ["EDC"],
    }


def test_a_check_fetches_nothing(hub: HubServer) -> None:
    args = AppArgs.model_validate(make_args())
    assert check_args(make_args()) == []
    assert args.models[0].is_unfetched
    assert needs_videos(args)  # it may make some
    with pytest.raises(ModelFolderError, match=r"tiny-sd3@main is not on this machine yet"):
        build_served_model(args.models[0])
    assert not hub.requests


def test_what_is_in_the_cache_is_checked(hub: HubServer) -> None:
    fetch_to_cache(HubModel(MODEL_ID))
    args = AppArgs.model_validate(make_args())
    assert build_served_model(args.models[0]).family.name == "sd3"
    assert not needs_videos(args)
    assert check_args(make_args()) == []
    (found,) = check_args(make_args(min_side=100, max_side=100))
    assert found.startswith("args.models[0].limits: no size is left: sides are multiples of 16")


# No shipped table has rows for this device, whatever the name of the model.
SHORT = {
    "models": [{"path": MODEL_ID}],
    "cluster": {"workers_per_node": 1, "memory_mb": 512, "device_name": "a CPU of its own"},
}


def test_an_id_alone_is_a_model(hub: HubServer) -> None:
    """It is named after its id, and its default size is expected of it as soon as it is known."""
    assert check_args(SHORT) == []
    with pytest.raises(ModelFolderError, match="is not on this machine yet"):
        list_expected_load(AppArgs.model_validate(SHORT))
    snapshot = fetch_to_cache(HubModel(MODEL_ID))
    assert check_args(SHORT) == []
    args = name_folders(AppArgs.model_validate(SHORT), {HubModel(MODEL_ID): snapshot.folder})
    assert args.models[0].name == "tiny-sd3"
    assert AppArgs.model_validate(args.model_dump(exclude_unset=True)) == args
    (load,) = list_expected_load(args)
    assert (load.model, load.shape) == ("tiny-sd3", Shape(1024, 1024))


def test_the_script_says_what_it_could_not_check(hub: HubServer, tmp_path: Path) -> None:
    app = {"name": "a", "route_prefix": "/", "import_path": "deployments.app:build_app", "args": SHORT}
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"applications": [app]}))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_config.py"), str(file)],
        cwd=ROOT,
        env={**os.environ, "HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == f"not checked: applications[0].args: {MODEL_ID}@main is not in the cache of the hub here\n"
    assert list_unchecked(file) == [ended.stdout.removeprefix("not checked: ").removesuffix("\n")]
    fetch_to_cache(HubModel(MODEL_ID))
    (line,) = list_unchecked(file)
    assert "models[0]: tiny-sd3 has no profile for the device" in line


def test_a_folder_takes_the_place_of_an_id(hub: HubServer) -> None:
    snapshot = fetch_to_cache(HubModel(MODEL_ID))
    args = AppArgs.model_validate(make_args())
    named = name_folders(args, {HubModel(MODEL_ID): snapshot.folder})
    assert named.models[0].folder == named.models[0].path == snapshot.folder
    assert named.models[0].hub_model is None
    assert AppArgs.model_validate(named.model_dump(exclude_unset=True)) == named
