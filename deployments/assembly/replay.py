"""An incident again: a decision log replayed through a fresh scheduler of the same configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deployments.assembly.planning import assemble_service
from deployments.assembly.profiles import add_profiles, make_cost_model
from deployments.config.app import AppArgs
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.scheduling.decision_log import LogEntry, replay
from tridentserve.scheduling.events import Effect, ModelAdded, WorkerJoined


def replay_log(args: AppArgs, decisions: Sequence[LogEntry]) -> Iterator[tuple[LogEntry, list[Effect]]]:
    """Each logged decision with the effects that it has now. All are equal while code, configuration and profile are
    those of the log, and no solve ran into its time limit. `args` are those of the service's start: models that came
    later are in the log, their profiles in the same tables.

    Raises `ConfigError` when the log holds other workers than the configuration has."""
    specs = _list_workers(decisions)
    if len(specs) != args.cluster.num_workers:
        raise ConfigError(
            f"the log has {len(specs)} workers, the configuration {args.cluster.num_workers}: is it this one's log?"
        )
    times = make_cost_model(args)
    added = (decision.event for decision in decisions if isinstance(decision.event, ModelAdded))
    add_profiles(times, args, {event.model: event.profile for event in added})
    return replay(decisions, assemble_service(args, times, specs).scheduler)


def _list_workers(decisions: Sequence[LogEntry]) -> list[WorkerSpec]:
    """The workers as they first joined, in the order of their ids (`n0w0`, `n0w1`, ...)."""
    first: dict[str, WorkerSpec] = {}
    for decision in decisions:
        if isinstance(decision.event, WorkerJoined):
            first.setdefault(decision.event.worker.worker_id, decision.event.worker)
    return sorted(first.values(), key=lambda spec: tuple(int(part) for part in spec.worker_id[1:].split("w")))
