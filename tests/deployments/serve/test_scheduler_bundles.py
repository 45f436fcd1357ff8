"""The resources of Ray that a service reserves."""

from __future__ import annotations

from typing import Any

from deployments.config.app import AppArgs
from deployments.serve.scheduler_deployment import make_scheduler_deployment

MODELS = [{"name": "m", "tiny": "sd3"}]


def list_worker_bundles(**cluster: Any) -> list[dict[str, float]]:
    args = AppArgs.model_validate({"models": MODELS, "cluster": {"workers_per_node": 2, "memory_mb": 512, **cluster}})
    bundles = make_scheduler_deployment(args)._replica_config.placement_group_bundles
    assert bundles is not None
    return list(bundles[1:])


def test_a_worker_reserves_what_its_cluster_says() -> None:
    assert list_worker_bundles() == [{"CPU": 0.1}] * 2
    gpu = {"device": "cuda", "device_name": "NVIDIA L20"}
    kind = {"accelerator_type:L20": 0.001}
    assert list_worker_bundles(**gpu, resources=kind) == [{"CPU": 0.1, "GPU": 1.0, **kind}] * 2
