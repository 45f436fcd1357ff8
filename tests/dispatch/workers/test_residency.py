"""Adjust-on-Dispatch: loads count, and workers that need none come first. So does the one that keeps a state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch import DispatchOptions, IlpDispatcher
from profiler import CostModel
from profiler.tables.links import LinkSpeeds
from profiler.tables.rows import LinksRow
from tests.dispatch.cluster import decide, request, worker, workers
from tests.profiler.synthetic import MIB, SHAPES, step_seconds, table
from tridentserve.plans import Replica
from tridentserve.protocols import WorkerView
from tridentserve.stages import Stage

SMALL, LARGE = SHAPES[0], SHAPES[2]
LINKS = LinkSpeeds(1e9, 1e8, host_bytes_per_s=100 * MIB, disk_bytes_per_s=50 * MIB)
TIMES = CostModel([replace(table(), links=(LinksRow("gpu", LINKS, "modelled: a test"),))], "gpu")
DISPATCHER = IlpDispatcher(TIMES)
# E has 400 MiB, D 800 and C 100.
LOAD_S = 13.0


def empty(view: WorkerView, *missing: Stage) -> WorkerView:
    """The worker with all of its placement in memory but these stages (none named: nothing at all)."""
    lacks = {Replica("one", stage) for stage in missing or tuple(Stage)}
    return replace(view, resident=view.replicas - lacks)


def test_a_load_counts_in_the_expected_finish() -> None:
    views = workers(1, "EDC")
    (warm,) = decide(DISPATCHER, [request("r", SMALL)], views, 0.0)
    (cold,) = decide(DISPATCHER, [request("r", SMALL)], [empty(view) for view in views], 0.0)
    assert cold.expected_finish_s - warm.expected_finish_s == pytest.approx(LOAD_S)
    (partly,) = decide(DISPATCHER, [request("r", SMALL)], [empty(view, Stage.DECODE) for view in views], 0.0)
    assert partly.expected_finish_s - warm.expected_finish_s == pytest.approx(1.0)


def test_a_load_that_makes_it_late_is_waited_out_where_that_is_in_time() -> None:
    views = [empty(worker("cold", "EDC")), worker("warm", "EDC", free_at_s=2.0)]
    assert decide(DISPATCHER, [request("r", SMALL, 8.0)], views, 0.0) != []  # idle and loaded workers are one pool
    apart = [empty(worker("cold", "ED")), worker("c", "C"), worker("warm", "EDC", free_at_s=2.0)]
    assert decide(DISPATCHER, [request("r", SMALL, 8.0)], apart, 0.0) == []


def test_workers_that_have_the_weights_come_first() -> None:
    views = [empty(view) for view in workers(3, "EDC")] + [worker("n0-w9", "EDC"), worker("other", "EDC", node="n1")]
    pending = [request(f"r{i}", SMALL) for i in range(2)]
    chosen = [entry.diffuse for entry in decide(DISPATCHER, pending, views, 0.0)]
    assert sorted(chosen) == [("n0-w9",), ("other",)]
    first, second = (replace(view, resident=view.replicas) for view in views[:2])
    (wide,) = decide(DISPATCHER, [request("r", LARGE)], [first, second, empty(views[2])], 0.0)
    assert wide.diffuse == ("n0-w0", "n0-w1")


def test_auxiliaries_that_have_the_weights_come_first() -> None:
    views = [worker("d", "DC"), empty(worker("a", "E")), worker("b", "E", free_at_s=3.0)]
    (assignment,) = decide(DISPATCHER, [request("r", SMALL)], views, 0.0)
    assert assignment.encode == ("b",)  # free in 3 s, a has to load for 4 s
    (assignment,) = decide(DISPATCHER, [request("r", SMALL)], [*views[:2], worker("b", "E", free_at_s=9.0)], 0.0)
    assert assignment.encode == ("a",)


def test_a_stopped_request_resumes_where_its_state_is_or_fetches_it() -> None:
    times = CostModel(
        [replace(table(), links=(LinksRow("gpu", replace(LINKS, transfer_latency_s=0.5), "modelled"),))], "gpu"
    )
    stopped = replace(request("r", SMALL, steps_done=15), held_by="n0-w2")
    dispatcher = IlpDispatcher(times, DispatchOptions(max_degree=1))
    (kept,) = decide(dispatcher, [stopped], workers(4, "EDC"), 0.0)
    assert kept.diffuse == ("n0-w2",)
    decode_s = times.seconds("one", Stage.DECODE, SMALL)
    assert kept.expected_finish_s == pytest.approx(5 * step_seconds(SMALL, 1) + decode_s)
    (moved,) = decide(dispatcher, [stopped], workers(2, "EDC"), 0.0)
    fetch_s = times.transfer_seconds("one", Stage.DIFFUSE, SMALL, same_node=False)  # its worker is not there
    assert moved.expected_finish_s == pytest.approx(kept.expected_finish_s + fetch_s)
