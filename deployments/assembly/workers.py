"""Builds the configuration that each live worker of a service starts with. Imports neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.messages import ModelSource, WorkerConfig
from tridentserve.engine.options import WorkerOptions
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.weights_share import WeightsShare


def make_worker_configs(
    specs: Sequence[WorkerSpec],
    placement: PlacementPlan,
    sources: Mapping[str, ModelSource],
    shares: Mapping[Replica, WeightsShare],
    store: tuple[str, int],
    options: WorkerOptions,
    hot_width: int = 1,
) -> list[WorkerConfig]:
    """The first incarnation of each worker. `shares`: the stages of which workers do not keep all weights; `store`:
    host and port of the store in which process groups are formed; `hot_width`: see `WorkerConfig`."""
    host, port = store
    return [
        WorkerConfig(
            spec=spec,
            incarnation=0,
            label=placement.describe(spec.worker_id),
            replicas=placement.replicas[spec.worker_id],
            sources=dict(sources),
            shares=dict(shares),
            store_host=host,
            store_port=port,
            options=options,
            hot_width=hot_width,
        )
        for spec in specs
    ]
