"""Late requests of a bursty log: each cause that is named holds when the service is simulated without it."""

from __future__ import annotations

import json
from functools import cache

import pytest

from deployments.explaining.explain import explain, explain_by_log
from deployments.explaining.rerun import Change, LogRerun
from tests.deployments.explaining.bursts import ARGS, record_bursts, simulate_bursts
from tridentserve.errors import ConfigError, RequestNotFoundError
from tridentserve.scheduling.explanation.explanation import Explanation, to_plain
from tridentserve.scheduling.explanation.recording import Recording

PATIENT_S = 1e6


@cache
def log() -> LogRerun:
    return LogRerun(ARGS, Recording(record_bursts()))


@cache
def ten_late() -> tuple[Explanation, ...]:
    late = [life.request_id for life in log().chronicle.list_late()]
    assert len(late) >= 10
    return tuple(explain(log(), request_id, PATIENT_S) for request_id in late[:10])


def truth_of(request_id: str, without: frozenset[str]) -> float:
    """The latency that the request really has without others."""
    (found,) = (r for r in simulate_bursts(without).requests if r.spec.request_id == request_id)
    assert found.latency_s is not None
    return found.latency_s


def test_the_log_run_again_is_the_log() -> None:
    for explanation in ten_late():
        assert explanation.deviation_s == pytest.approx(0.0, abs=1e-6)
        assert explanation.is_close


def test_each_late_request_has_causes_and_each_holds_when_the_service_is_simulated_without_it() -> None:
    """Not by the re-run of the log that has found it, but by the whole simulation from the beginning."""
    checked = 0
    for explanation in ten_late():
        assert any(cause.verified for cause in explanation.causes), explanation.text
        first = next((c for c in explanation.causes if c.kind == "request" and c.verified), None)
        if first is None or first.request_id is None or first.without is None or explanation.latency_s is None:
            continue
        truth_s = truth_of(explanation.request_id, frozenset({first.request_id}))
        assert first.without.latency_s == pytest.approx(truth_s, rel=0.02), explanation.text
        assert truth_s < explanation.latency_s
        checked += 1
    assert checked >= 5


def test_what_is_no_cause_is_not_called_one() -> None:
    """Others had its workers, and it is as late without them: they are told, and not named as causes."""
    others = [(each, cause) for each in ten_late() for cause in each.causes if not cause.verified]
    for explanation, cause in others:
        assert cause.without is not None
        assert cause.without.gain_s is not None
        assert explanation.latency_s is not None
        assert cause.without.gain_s < 0.02 * explanation.latency_s or cause.kind == "own time"
        assert explanation.text.index("Looked at too, and no cause") > 0


def test_the_words_say_what_the_data_say() -> None:
    explanation = ten_late()[0]
    assert explanation.late_s is not None
    lines = explanation.text.splitlines()
    assert lines[0].startswith(f"{explanation.request_id} (tiny-sd3, ")
    assert f"was {explanation.late_s:.2f} s late" in lines[0]
    for rerun in explanation.what_ifs:
        assert f"- {rerun.change}: " in explanation.text
    assert "with one more worker like n0w" in explanation.text
    assert "at degree " in explanation.text
    plain = json.loads(json.dumps(to_plain(explanation)))
    assert (plain["object"], plain["id"], plain["text"]) == (
        "request.explanation",
        lines[0].split()[0],
        explanation.text,
    )
    assert plain["causes"][0]["verified"] is True


def test_a_request_that_was_on_time_is_explained_by_the_log_alone() -> None:
    on_time = next(life for life in log().chronicle.lives.values() if not life.is_late)
    explanation = explain(log(), on_time.request_id, PATIENT_S)
    assert "was on time" in explanation.text
    assert (explanation.baseline, explanation.what_ifs) == (None, ())


def test_without_time_no_change_is_tried() -> None:
    late = log().chronicle.list_late()[0]
    explanation = explain(log(), late.request_id, -1.0)
    assert explanation.baseline is not None
    assert (explanation.what_ifs, {cause.without for cause in explanation.causes}) == ((), {None})
    assert "the time was up" in explanation.text
    assert "not checked" in explanation.text


def test_requests_are_found_by_the_ids_that_clients_know() -> None:
    with pytest.raises(RequestNotFoundError):
        explain(log(), "nobody", PATIENT_S)
    with pytest.raises(RequestNotFoundError):
        explain_by_log(log().chronicle, "r", "")


def test_a_log_of_other_workers_is_refused() -> None:
    args = ARGS.model_copy(update={"cluster": ARGS.cluster.model_copy(update={"workers_per_node": 3})})
    with pytest.raises(ConfigError, match="4 workers"):
        LogRerun(args, Recording(record_bursts()))


def test_a_degree_that_workers_cannot_form_is_not_tried() -> None:
    """Three of the four workers denoise."""
    assert log().list_degrees("tiny-sd3") == [1, 2]


def test_one_more_worker_is_one_more() -> None:
    late = log().chronicle.list_late()[-1]
    end = log().run(late.request_id, 0.0, Change(joins_like="n0w0"))
    assert end.end_s is not None
    assert late.end_s is not None
    assert end.end_s < late.end_s
