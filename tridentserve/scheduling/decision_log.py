"""The decision log: every event with the effects it had, as JSON lines, and its replay through a fresh scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from tridentserve.scheduling.events import Effect, Event
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.scheduling.tick_pacer import process_event


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event and the effects that it had. It holds no prompt and no key: requests are logged as `RequestSpec`."""

    now_s: float
    event: Annotated[Event, Field(discriminator="kind")]
    effects: list[Annotated[Effect, Field(discriminator="kind")]]


_ENTRY: TypeAdapter[LogEntry] = TypeAdapter(LogEntry)


def encode_entry(decision: LogEntry) -> str:
    """One JSON line, without the line's end."""
    return _ENTRY.dump_json(decision).decode()


def decode_entry(line: str) -> LogEntry:
    """The inverse of `encode_entry`. Raises `pydantic.ValidationError` on anything else."""
    return _ENTRY.validate_json(line)


def replay(decisions: Iterable[LogEntry], scheduler: Scheduler) -> Iterator[tuple[LogEntry, list[Effect]]]:
    """Feed the logged events to a fresh scheduler; yields each logged decision with the effects it has now.

    With the same workers, placement, profile and options, both are equal: that is how an incident is debugged.
    """
    for decision in decisions:
        effects, _ = process_event(scheduler, decision.event, decision.now_s)  # a policy that failed then fails again
        yield decision, effects
