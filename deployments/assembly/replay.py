"""An incident again: a decision log replayed through a fresh scheduler of the same configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from deployments.assembly.cell_args import take_cell
from deployments.assembly.planning import assemble_service
from deployments.assembly.profiles import add_profiles
from deployments.assembly.service_times import make_service_times
from deployments.config.app import AppArgs
from profiler import CostModel
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.scheduling.decision_log import LogEntry, replay
from tridentserve.scheduling.events import Effect, ModelAdded, WorkerJoined


def replay_log(args: AppArgs, decisions: Sequence[LogEntry]) -> Iterator[tuple[LogEntry, list[Effect]]]:
    """Each logged decision with the effects that it has now. All are equal while code, configuration and profile are
    those of the log, and no solve ran into its time limit. `args` are those of the service's start: models that came
    later are in the log, their profiles in the same tables.

    Raises `ConfigError` when the log holds other workers than the configuration has."""
    args = find_cell(args, decisions)
    specs, times = list_logged_workers(args, decisions), make_logged_times(args, decisions)
    return replay(decisions, assemble_service(args, times, specs).scheduler)


def find_cell(args: AppArgs, decisions: Sequence[LogEntry]) -> AppArgs:
    """The configuration of the cell that has written a log, which the ids of its workers name; where there is one cell,
    that of the service."""
    joined = (entry.event.worker.worker_id for entry in decisions if isinstance(entry.event, WorkerJoined))
    found = re.match(r"c(\d+)n", next(joined, ""))
    return take_cell(args, int(found[1])) if found else args


def make_logged_times(args: AppArgs, decisions: Sequence[LogEntry]) -> CostModel:
    """A new cost model of a configuration, with the models that were added in the log. Raises `ProfileError`."""
    times = make_service_times(args, list_logged_workers(args, decisions))
    added = (decision.event for decision in decisions if isinstance(decision.event, ModelAdded))
    if profiles := {event.model: event.profile for event in added}:
        add_profiles(times, args, profiles)
    return times


def list_logged_workers(args: AppArgs, decisions: Sequence[LogEntry]) -> list[WorkerSpec]:
    """The workers of a log. Raises `ConfigError` when the configuration has others."""
    specs = _list_workers(decisions)
    if len(specs) != args.cluster.num_workers:
        raise ConfigError(
            f"the log has {len(specs)} workers, the configuration {args.cluster.num_workers}: is it this one's log?"
        )
    return specs


def _list_workers(decisions: Sequence[LogEntry]) -> list[WorkerSpec]:
    """The workers as they first joined, in the order of their ids (`n0w0`, `n0w1`, ...; in cells `c0n0w0`, ...)."""
    first: dict[str, WorkerSpec] = {}
    for decision in decisions:
        if isinstance(decision.event, WorkerJoined):
            first.setdefault(decision.event.worker.worker_id, decision.event.worker)
    return sorted(first.values(), key=lambda spec: [int(part) for part in re.findall(r"\d+", spec.worker_id)])
