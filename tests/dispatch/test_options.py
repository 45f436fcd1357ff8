"""Options that make no sense are refused by their name."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch import DispatchOptions, ValueOptions
from tridentserve.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_efficiency": 0.0}, "min_efficiency is 0.0"),
        ({"max_degree": 0}, "max_degree is 0"),
        ({"handoff_reserve_bytes": -1}, "handoff_reserve_bytes is -1"),
        ({"solver": "Gurobi"}, "solver is 'Gurobi'; Input should be 'highs' or 'cbc'"),
        ({"time_limit_s": float("nan")}, "time_limit_s is nan"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_batch": "most"}, "max_batch is 'most'; Input should be a valid integer"),
        ({"gap": 1.0}, "gap is 1.0"),
        ({"segment_s": 0.0}, "segment_s is 0.0"),
        ({"request_weights": {"one": 0.0}}, "request_weights.one is 0.0"),
        ({"fair_shares": {"one": -1.0}}, "fair_shares.one is -1.0"),
    ],
)
def test_bad_options_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DispatchOptions(**settings)


@pytest.mark.parametrize(("name", "value"), [("horizon", 0.0), ("spare", -1.0), ("hopeless", 0.0)])
def test_bad_weights_of_the_objective_are_named(name: str, value: float) -> None:
    """Urgency is divided by the horizon, and the worth of a group is never negative nor nothing."""
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        ValueOptions(**wrong)
