"""Explanations beside a running service, in a process of their own."""

from __future__ import annotations

import asyncio

import pytest

from deployments.explaining.explainer import Explainer
from tests.deployments.explaining.bursts import ARGS, record_bursts
from tests.support.waiting import PATIENCE_S
from tridentserve.errors import OverloadedError, RequestNotFoundError
from tridentserve.scheduling.explanation.chronicle import Chronicle
from tridentserve.scheduling.explanation.recording import Recording


async def record() -> Recording:
    return Recording(record_bursts())


async def test_a_late_request_is_explained_with_runs_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_MAX_WAITING", 1), ("_LIMIT_S", PATIENCE_S), ("_KILL_AFTER_S", 2 * PATIENCE_S)):
        monkeypatch.setattr(f"deployments.explaining.explainer.{name}", value)
    late = Chronicle(record_bursts()).list_late()[0]
    explainer = Explainer(ARGS, record)
    answers = await asyncio.gather(
        *(explainer.explain(late.request_id) for _ in range(3)), explainer.explain("nobody"), return_exceptions=True
    )
    first, unknown = answers[0], answers[-1]
    assert isinstance(first, dict)
    assert first["id"] == late.request_id
    assert first["baseline"]["latency_s"] == pytest.approx(late.latency_s)
    assert [cause for cause in first["causes"] if cause["verified"]]
    assert isinstance(unknown, RequestNotFoundError)
    assert sum(isinstance(answer, OverloadedError) for answer in answers) == 2


async def test_what_cannot_be_run_again_is_explained_by_the_log() -> None:
    """A configuration that is another one's."""
    late = Chronicle(record_bursts()).list_late()[0]
    args = ARGS.model_copy(update={"cluster": ARGS.cluster.model_copy(update={"workers_per_node": 3})})
    answer = await Explainer(args, record).explain(late.request_id)
    assert answer["baseline"] is None
    assert "the log has 4 workers" in answer["not_run"]
