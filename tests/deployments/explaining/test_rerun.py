"""Logs that are too long to be run again from their beginning."""

from __future__ import annotations

import pytest

from deployments.explaining.rerun import Change, LogRerun
from tests.deployments.explaining.bursts import ARGS, record_bursts
from tridentserve.scheduling.explanation import recording
from tridentserve.scheduling.explanation.recording import Recording


def test_a_long_log_is_run_again_from_the_last_moment_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler knows what stages take by then, as it did: the requests end as in the log."""
    monkeypatch.setattr(recording, "_WORTH_LEAVING_OUT", 100)
    whole = Recording(record_bursts(num_bursts=2))
    log = LogRerun(ARGS, whole)
    second = [life for life in log.chronicle.lives.values() if life.request_id.startswith("b1")]
    part, before = whole.begin_before(second[0].arrival_s + 0.2)
    assert before[-1].now_s < second[0].arrival_s
    assert len(part.entries) < len(whole.entries) - 100
    for life in second[4::6]:
        end = log.run(life.request_id, life.arrival_s, Change())
        assert end.end_s == pytest.approx(life.end_s)
        assert life.arrival_s - 1.0 < end.took_over_s
