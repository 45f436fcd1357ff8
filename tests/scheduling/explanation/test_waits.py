"""The waits of requests, one scene for each kind: what it waited for, how long, and which causes that makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.simulated.scripted import run
from tests.scheduling.explanation.logs import write_chronicle
from tridentserve.scheduling.explanation.causes import find_causes
from tridentserve.scheduling.explanation.chronicle import Chronicle
from tridentserve.scheduling.explanation.explanation import Cause, describe_life
from tridentserve.scheduling.explanation.waits import WaitStretch, list_waits, sum_blockers

# A request of four steps takes so long alone on one worker.
ALONE_S = 0.5 + 4.0 + 2.0


def near(seconds: float | None) -> Any:
    return pytest.approx(seconds)


def waits_of(chronicle: Chronicle, request_id: str) -> list[WaitStretch]:
    """Those of a request that are worth telling; together with its stages they fill its time."""
    life = chronicle.lives[request_id]
    waits = list_waits(chronicle, life)
    computed_s = sum(span.seconds for logged in life.plans for span in logged.spans)
    assert sum(wait.seconds for wait in waits) + computed_s == near(life.latency_s)
    assert sum(wait.end_s - wait.start_s for wait in describe_life(life, waits).waits) == near(
        sum(wait.seconds for wait in waits)
    )
    return waits


def causes_of(chronicle: Chronicle, request_id: str) -> list[tuple[Any, ...]]:
    life = chronicle.lives[request_id]
    found = find_causes(chronicle, life, list_waits(chronicle, life))
    return [(cause.kind, cause.request_id, near(cause.seconds)) for cause in found]


def test_a_queue_behind_two_requests(tmp_path: Path) -> None:
    """The second one came later, and was preferred."""
    chronicle = write_chronicle(
        tmp_path,
        {"a": "EDC", "b": "E"},
        {"x": 0.0, "r": 1.0, "y": 2.0},
        {"x": [run(1, "EDC", "a", "x")], "y": [run(2, "EDC", "a", "y"), run(3, "EDC", "a", "r")]},
    )
    assert waits_of(chronicle, "x") == []
    # r's plan is sent at once, and waits in the queue of the worker.
    busy = [("busy", wait.request_ids, wait.seconds) for wait in waits_of(chronicle, "r")]
    assert busy == [
        ("busy", ("x",), near(ALONE_S - 1.0)),
        ("busy", ("y",), near(ALONE_S)),
    ]
    waits = list_waits(chronicle, chronicle.lives["r"])
    assert sum_blockers(waits) == {"y": near(ALONE_S), "x": near(ALONE_S - 1.0)}
    assert causes_of(chronicle, "r") == [
        ("load", None, 2 * ALONE_S - 1.0),
        ("request", "y", ALONE_S),
        ("order", None, ALONE_S),
        ("own time", None, ALONE_S),
        ("request", "x", ALONE_S - 1.0),
    ]


def test_a_worker_that_loads_weights(tmp_path: Path) -> None:
    chronicle = write_chronicle(tmp_path, {"a": "D"}, {"r": 1.0}, {"r": [run(1, "EDC", "a")]})
    (wait,) = waits_of(chronicle, "r")
    assert (wait.kind, wait.workers, wait.seconds) == ("loading", ("a",), near(6.0))
    assert ("loading", None, 6.0) in causes_of(chronicle, "r")


def test_too_slow_even_alone(tmp_path: Path) -> None:
    """It has 2 seconds, which its stages alone exceed."""
    chronicle = write_chronicle(tmp_path, {"a": "EDC"}, {"r": 1.0}, {"r": [run(1, "EDC", "a")]})
    assert waits_of(chronicle, "r") == []
    assert causes_of(chronicle, "r") == [("own time", None, ALONE_S)]
    assert chronicle.list_late() == [chronicle.lives["r"]]


def test_held_back_while_a_worker_is_free(tmp_path: Path) -> None:
    chronicle = write_chronicle(
        tmp_path,
        {"a": "EDC", "b": "EDC"},
        {"x": 0.0, "r": 1.0, "now": 4.0},
        {"x": [run(1, "EDC", "a", "x")], "now": [run(2, "EDC", "b", "r")]},
    )
    (wait,) = waits_of(chronicle, "r")
    assert (wait.kind, wait.workers, wait.seconds, wait.request_ids) == ("held back", ("b",), near(3.0), ())
    assert ("order", None, 3.0) in causes_of(chronicle, "r")


def test_a_free_worker_is_too_few_for_a_wide_group(tmp_path: Path) -> None:
    chronicle = write_chronicle(
        tmp_path,
        {"a": "EDC", "b": "EDC"},
        {"x": 0.0, "r": 1.0},
        {"x": [run(1, "ED", "a", "x")]},
        {1: [run(2, "EDC", "a b", "r", group="ab")]},
    )
    first, *_ = waits_of(chronicle, "r")
    assert (first.kind, first.request_ids) == ("wider", ("x",))
    assert first.seconds == near(3.5)


def test_free_workers_without_free_cores(tmp_path: Path) -> None:
    """One of the two may denoise at a time."""
    chronicle = write_chronicle(
        tmp_path,
        {"a": "EDC", "b": "EDC"},
        {"x": 0.0, "r": 1.0, "now": 7.5},
        {"x": [run(1, "EDC", "a", "x")], "now": [run(2, "EDC", "b", "r")]},
        max_denoising=1,
    )
    assert [(wait.kind, wait.request_ids, wait.seconds) for wait in waits_of(chronicle, "r")] == [
        ("cores", ("x",), near(ALONE_S - 1.0)),
        ("held back", (), near(1.0)),
    ]
    assert ("request", "x", ALONE_S - 1.0) in causes_of(chronicle, "r")


def test_a_worker_that_is_reserved(tmp_path: Path) -> None:
    """b has nothing to do while x encodes elsewhere, and is kept for it."""
    chronicle = write_chronicle(
        tmp_path,
        {"a": "E", "b": "EDC"},
        {"x": 0.0, "r": 0.125},
        {"x": [run(1, "E", "a", "x", push_to="b")]},
        {1: [run(2, "D", "b", "x", after=1, source="a"), run(3, "EDC", "b", "r")]},
    )
    waits = waits_of(chronicle, "r")
    assert {wait.kind for wait in waits} == {"busy"}
    assert {name for wait in waits for name in wait.request_ids} == {"x"}
    assert waits[0].start_s == 0.125


def test_a_request_that_never_runs(tmp_path: Path) -> None:
    """It waits until the log ends: for a worker, and then for nothing that could be seen."""
    chronicle = write_chronicle(
        tmp_path, {"a": "EDC"}, {"x": 0.0, "r": 1.0, "now": 10.0}, {"x": [run(1, "EDC", "a", "x")]}
    )
    life = chronicle.lives["r"]
    waits = list_waits(chronicle, life)
    assert [(wait.kind, wait.request_ids, wait.seconds) for wait in waits[:2]] == [
        ("busy", ("x",), near(ALONE_S - 1.0)),
        ("held back", (), near(10.0 - ALONE_S)),
    ]
    assert (life.outcome, life.latency_s, life.is_late) == ("unfinished", None, False)
    assert describe_life(life, waits).plans == ()


def test_a_cause_that_is_hardly_worth_naming_is_none(tmp_path: Path) -> None:
    chronicle = write_chronicle(
        tmp_path, {"a": "EDC"}, {"r": 1.0}, {"r": [run(1, "EDC", "a")]}, plan_overhead_s=0.01, report_overhead_s=0.01
    )
    life = chronicle.lives["r"]
    assert [wait.kind for wait in waits_of(chronicle, "r")] == ["starting", "reporting"]
    assert find_causes(chronicle, replace(life, slo_s=100.0), list_waits(chronicle, life)) == []
    assert Cause("load", 1.0).verified is False
