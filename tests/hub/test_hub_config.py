"""A configuration that names a model of the hub: what is known of it before it is fetched, and afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.config.app import AppArgs
from deployments.models.hub_models import name_folders
from deployments.models.served import build_served_model
from deployments.serve.videos_deployment import needs_videos
from deployments.validation.args import check_args
from tests.hub.conftest import MODEL_ID
from tests.support.hub_server import HubServer
from tridentserve.errors import ModelFolderError
from tridentserve.hub.fetching import fetch_to_cache
from tridentserve.hub.hub_model import HubModel


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


def test_a_folder_takes_the_place_of_an_id(hub: HubServer) -> None:
    snapshot = fetch_to_cache(HubModel(MODEL_ID))
    args = AppArgs.model_validate(make_args())
    named = name_folders(args, {HubModel(MODEL_ID): snapshot.folder})
    assert named.models[0].folder == named.models[0].path == snapshot.folder
    assert named.models[0].hub_model is None
    assert AppArgs.model_validate(named.model_dump(exclude_unset=True)) == named
