"""The latest decisions in memory: as much is known of the latest requests as from the whole log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.simulated.scenario import everything
from tests.support.decision_log import read_log
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.explanation.chronicle import Chronicle
from tridentserve.scheduling.explanation.recording import RecentDecisions
from tridentserve.scheduling.explanation.waits import list_waits
from tridentserve.testing import make_request

NUM_KEPT = 6


@pytest.mark.parametrize("seed", range(3))
def test_the_latest_requests_are_explained_as_from_the_whole_log(seed: int, tmp_path: Path) -> None:
    everything(seed).run(tmp_path / "log.jsonl")
    entries = read_log(tmp_path / "log.jsonl")
    recent = RecentDecisions(NUM_KEPT)
    for entry in entries:
        recent.add(entry.now_s, entry.event, entry.effects)
    kept = recent.copy()
    assert len(kept.entries) < len(entries)
    whole, part = Chronicle(entries), Chronicle(kept.entries, kept.placement)
    latest = list(whole.lives)[-NUM_KEPT:]
    assert set(latest) <= set(part.lives)
    for request_id in latest:
        assert part.lives[request_id] == whole.lives[request_id]
        blockers = {name for wait in list_waits(part, part.lives[request_id]) for name in wait.request_ids}
        assert blockers <= set(part.lives), "whoever had its workers is known too"


def test_what_is_kept_is_bounded() -> None:
    recent = RecentDecisions(2)
    for number in range(100):
        recent.add(float(number), ev.RequestArrived(make_request(f"r{number}")), [])
        recent.add(number + 0.5, ev.Tick(), [ev.Reject(f"r{number}", "cancelled", "enough")])
        assert len(recent.copy().entries) <= 2 * 2 * 2
    (*_, last) = recent.copy().entries
    assert last.now_s == 99.5
    for number in range(1000):
        recent.add(100.0 + number, ev.Tick(), [])
    assert len(recent.copy().entries) <= 2 * 2 * 100


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    recent = RecentDecisions(0)
    recent.add(0.0, ev.Tick(), [])
    assert recent.copy().entries == ()


def test_it_begins_where_no_request_was_under_way() -> None:
    """The arrivals of the requests that are dropped are not needed then."""
    recent = RecentDecisions(2)
    for number in range(5):
        recent.add(float(number), ev.RequestArrived(make_request(f"r{number}")), [])
        recent.add(number + 0.5, ev.Tick(), [ev.Reject(f"r{number}", "cancelled", "enough")])
    events = [entry.event for entry in recent.copy().entries]
    assert [event.spec.request_id for event in events if isinstance(event, ev.RequestArrived)] == ["r3", "r4"]
