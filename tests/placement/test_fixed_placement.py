"""Placements from a configuration: what is written is what is placed, and mistakes are named."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from placement import build_fixed_placement
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import PlacementError
from tridentserve.stages import PlacementType

WORKERS = [WorkerSpec(f"w{i}", "n0", 1) for i in range(4)]


def test_a_type_name_holds_for_every_model() -> None:
    plan = build_fixed_placement(["EDC", "EDC", "DC", "E"], WORKERS, ["a", "b"])
    for model in ("a", "b"):
        assert [plan.type_of(f"w{i}", model) for i in range(4)] == ["EDC", "EDC", "DC", "E"]
    assert plan.describe("w3") == "a:E+b:E"


def test_a_mapping_names_a_type_per_model() -> None:
    plan = build_fixed_placement([{"a": "D", "b": "EDC"}, {"a": "E"}, {"a": "C"}, {"b": "EDC"}], WORKERS, ["a", "b"])
    assert plan.type_of("w0", "b") is PlacementType.EDC
    assert plan.type_of("w2", "a") is PlacementType.C
    assert plan.type_of("w3", "a") is None


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["EDC"], "the placement lists 1 workers and there are 4"),
        (["EDC", "EC", "E", "C"], "worker w1: 'EC' is no placement type; use one of EDC, DC, ED, D, E, C"),
        (["EDC", {}, "EDC", "EDC"], "worker w1 holds nothing; give it a type"),
        ([{"c": "EDC"}, {}, {}, {}], "worker w0: model 'c' is not served; served are a"),
        (["E", "E", "C", "C"], "no worker holds the diffuse stage of a"),
        (["EDC", "DC", "DC", "C"], "worker w1 holds DC of a and can never run a request: no worker holds E alone"),
        (["EDC", "EDC", "EDC", "D"], "worker w3 holds D of a .*: no worker holds E or C alone"),
        (["EDC", "D", "DC", "C"], "worker w1 holds D of a .*: no worker holds E alone"),
    ],
)
def test_mistakes_are_named(types: list[str | Mapping[str, str]], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        build_fixed_placement(types, WORKERS, ["a"])


def test_a_placement_needs_models() -> None:
    with pytest.raises(PlacementError, match="no models"):
        build_fixed_placement(["EDC"] * 4, WORKERS, [])
