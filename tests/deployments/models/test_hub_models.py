"""Models of the hub are fetched to the nodes that the workers have at the time, and to one that a worker comes to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.config.app import AppArgs
from deployments.models import hub_models
from deployments.models.hub_models import HubModels
from tridentserve.hub.cached import HubSnapshot
from tridentserve.hub.hub_model import HubModel

COMMIT = "c" * 40
HEAD, LOST, NEW = ("a" * 56, "b" * 56, "d" * 56)  # of nodes


def make_args(*model_ids: str) -> AppArgs:
    models = [{"name": model_id.rpartition("/")[2], "path": model_id} for model_id in model_ids]
    return AppArgs.model_validate({"models": models, "cluster": {"workers_per_node": 1}})


async def test_nodes_that_come_later_have_the_models_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[Any, str, str]] = []

    async def run_fetch(place: Any, where: str, model: HubModel, cache: Path | None) -> HubSnapshot:
        at = getattr(place, "node_id", None) or f"bundle {place.placement_group_bundle_index}"
        fetched.append((at, model.model_id, model.revision))
        return HubSnapshot(HubModel(model.model_id, COMMIT), tmp_path)

    nodes = {0: HEAD, 1: LOST}
    monkeypatch.setattr(hub_models, "_run_fetch", run_fetch)
    monkeypatch.setattr(hub_models, "placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    monkeypatch.setattr(hub_models, "check_parsed_args", lambda args: [])
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: HEAD))
    group: Any = SimpleNamespace(id=None)
    hub = HubModels(group)
    args = await hub.fetch(make_args("lab/one"))
    assert args.models[0].path == tmp_path / "models--lab--one" / "snapshots" / COMMIT
    assert fetched == [(HEAD, "lab/one", "main"), (LOST, "lab/one", COMMIT)]
    fetched.clear()
    nodes[1] = NEW
    await hub.bring(1)
    assert fetched == [("bundle 1", "lab/one", COMMIT)]
    fetched.clear()
    await hub.fetch(make_args("lab/one", "lab/two"))
    assert fetched == [(HEAD, "lab/two", "main"), (NEW, "lab/two", COMMIT)]
