"""Overheads of plans, and workers that slow each other down, to the second."""

from __future__ import annotations

import pytest

from tests.engine.simulated.scripted import Script, run, simulate, spans
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import ConfigError
from tridentserve.scheduling import events as ev

TWO = {"a": "EDC", "b": "EDC"}


def test_overheads_come_before_a_plan_and_after_it() -> None:
    script = Script({"r": [run(1, "EDC", "a")]})
    result = simulate(script, TWO, {"r": 0.0}, plan_overhead_s=0.5, report_overhead_s=0.25)
    # E 0.5 s, D 4 x 1 s, C 2 s.
    assert spans(result)[1] == [("E", 0.5, 1.0), ("D", 1.0, 5.0), ("C", 5.0, 7.0)]
    assert result.requests[0].end_s == 7.25


def test_images_are_made_after_their_decode() -> None:
    script = Script({"r": [run(1, "ED", "a")]}, {1: [run(2, "C", "a", after=1)]})
    result = simulate(script, TWO, {"r": 0.0}, image_s_per_pixel=1e-6)
    shape = result.requests[0].spec.shape
    assert spans(result)[2] == [("C", 4.5, 6.5)]  # nothing comes after D
    assert result.requests[0].end_s == pytest.approx(6.5 + 1e-6 * shape.pixels)


def test_a_worker_continues_while_its_report_is_under_way() -> None:
    script = Script({"r": [run(1, "EDC", "a")], "s": [run(2, "EDC", "a", "s")]})
    result = simulate(script, TWO, {"r": 0.0, "s": 0.0}, report_overhead_s=10.0)
    assert spans(result)[2][0] == ("E", 6.5, 7.0)


def test_two_at_once_share_what_they_compute_on() -> None:
    """Alone until 3.5, both at half speed until the first has done the 3 s that it had left, then alone again."""
    script = Script({"r": [run(1, "EDC", "a")], "s": [run(2, "EDC", "b", "s")]})
    result = simulate(script, TWO, {"r": 0.0, "s": 3.5}, slowdown=(1.0, 2.0))
    assert spans(result)[1] == [("E", 0.0, 0.5), ("D", 0.5, 5.5), ("C", 5.5, 9.5)]
    assert spans(result)[2] == [("E", 3.5, 4.5), ("D", 4.5, 11.0), ("C", 11.0, 13.0)]


def test_nodes_do_not_disturb_each_other() -> None:
    script = Script({"r": [run(1, "EDC", "n0/a")], "s": [run(2, "EDC", "n1/b", "s")]})
    result = simulate(script, {"n0/a": "EDC", "n1/b": "EDC"}, {"r": 0.0, "s": 0.0}, slowdown=(1.0, 2.0))
    assert [request.end_s for request in result.requests] == [6.5, 6.5]


def test_a_plan_asked_to_stop_under_contention_ends_and_frees_the_others() -> None:
    script = Script({"r": [run(1, "ED", "a")], "s": [run(2, "EDC", "b", "s")], "now": [ev.Abort("r", 1, "test")]})
    result = simulate(script, TWO, {"r": 0.0, "s": 0.0, "now": 2.0}, slowdown=(1.0, 2.0))
    stopped = next(plan for plan in result.plans if plan.plan_id == 1)
    # E until 1, then steps of 2 s each: the first ends at 3.
    assert (stopped.outcome, stopped.end_s) == ("stopped", 3.0)
    assert spans(result)[2][-1][2] == 3.0 + (6.5 - 1.5)


def test_slowdowns_are_above_zero() -> None:
    with pytest.raises(ConfigError, match="slowdown"):
        SimulationOptions(slowdown=(1.0, 0.0))
