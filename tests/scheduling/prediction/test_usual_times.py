"""Predictions mixed with the usual times of requests of their kind."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridentserve.scheduling.prediction.usual_times import UsualTimes
from tridentserve.testing import make_request

KIND = ("m", make_request("x").shape, 4, 1, 1.0)
OTHER = ("m", make_request("x").shape, 8, 1, 1.0)
seconds = st.floats(0.01, 100.0)


def test_what_always_takes_the_same_is_not_predicted_by_the_crowd() -> None:
    rng, usual = random.Random(1), UsualTimes()
    for _ in range(30):
        usual.note(KIND, 3.3 * rng.uniform(0.7, 2.0), 3.0, 3.3)
    assert usual.mix(KIND, 7.0, 3.0) == pytest.approx(3.3, rel=0.1)
    assert usual.mix(KIND, 7.0, 6.0) == pytest.approx(6.6, rel=0.1)  # each step takes twice as long now
    assert usual.mix(OTHER, 7.0, 3.0) == 7.0


def test_what_depends_on_the_crowd_is_predicted_by_it() -> None:
    rng, usual = random.Random(2), UsualTimes()
    for _ in range(60):
        actual_s = rng.uniform(3.0, 12.0)
        usual.note(KIND, actual_s * rng.uniform(0.97, 1.03), 3.0, actual_s)
    assert usual.mix(KIND, 11.0, 3.0) == pytest.approx(11.0, rel=0.03)
    assert usual.mix(KIND, 3.5, 3.0) == pytest.approx(3.5, rel=0.03)


def test_a_wait_such_as_has_not_been_yet_is_believed() -> None:
    rng, usual = random.Random(3), UsualTimes()
    for _ in range(30):
        usual.note(KIND, 3.0 * rng.uniform(0.97, 1.03), 3.0, 3.0)
    assert usual.mix(KIND, 9.0, 3.0) == pytest.approx(9.0, rel=0.04)


def test_one_request_that_was_overtaken_for_long_changes_nothing() -> None:
    usual = UsualTimes()
    for number in range(40):
        usual.note(KIND, 2.0, 2.0, 40.0 if number % 10 == 9 else 2.0)
    assert usual.mix(KIND, 2.0, 2.0) == pytest.approx(2.0)


@given(st.lists(st.tuples(seconds, seconds, seconds), max_size=40), seconds, seconds)
def test_a_mixture_lies_between_what_was_predicted_and_what_has_been(
    ended: list[tuple[float, float, float]], predicted_s: float, alone_s: float
) -> None:
    usual = UsualTimes()
    for each in ended:
        usual.note(KIND, *each)
    expected = [predicted_s, *(alone_s * actual_s / its_alone_s for _, its_alone_s, actual_s in ended)]
    mixed_s = usual.mix(KIND, predicted_s, alone_s)
    assert min(expected) * 0.999 <= mixed_s <= max(expected) * 1.001
