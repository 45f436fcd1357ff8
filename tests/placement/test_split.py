"""Split and padding: the bounds of appendix C.1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.split import keeps_up, pad_to_degrees, split
from placement.units import count_smallest_workable
from tridentserve.errors import PlacementError
from tridentserve.stages import PlacementType, VirtualReplica

rate = st.floats(0.01, 100)
replicas = st.sampled_from(VirtualReplica)


def rates_of(replica: VirtualReplica, values: list[float]) -> dict[PlacementType, float]:
    return dict(zip((replica.primary, *replica.auxiliaries), values, strict=False))


@given(replicas, st.integers(0, 200), st.lists(rate, min_size=3, max_size=3), st.sampled_from([1, 2, 4]))
def test_the_budget_is_used_up_and_auxiliaries_keep_up(
    replica: VirtualReplica, extra: int, values: list[float], min_primaries: int
) -> None:
    rates, budget = rates_of(replica, values), count_smallest_workable(replica, min_primaries) + extra
    counts = split(replica, budget, rates, min_primaries)
    assert set(counts) == {replica.primary, *replica.auxiliaries}
    assert sum(counts.values()) == budget
    assert counts[replica.primary] >= min_primaries
    assert min(counts.values()) >= 1
    assert keeps_up(replica, counts, rates) or counts[replica.primary] == min_primaries


@given(replicas, st.integers(0, 40), st.lists(rate, min_size=3, max_size=3))
def test_no_primary_more_would_keep_up(replica: VirtualReplica, extra: int, values: list[float]) -> None:
    rates, budget = rates_of(replica, values), count_smallest_workable(replica) + extra
    counts = split(replica, budget, rates)
    left = budget - counts[replica.primary] - 1
    for encode in range(1, left):
        kinds = replica.auxiliaries
        parts = (encode, left - encode)[: len(kinds)] if len(kinds) == 2 else (left,)
        other = {replica.primary: counts[replica.primary] + 1, **dict(zip(kinds, parts, strict=True))}
        assert not kinds or not keeps_up(replica, other, rates) or sum(other.values()) != budget


def test_known_splits() -> None:
    dc, ed, d, e, c = (PlacementType(name) for name in ("DC", "ED", "D", "E", "C"))
    assert split(VirtualReplica.V0, 5, {PlacementType.EDC: 1.0}) == {PlacementType.EDC: 5}
    # The paper's rule for V1: n_pri = floor(N v_aux / (v_pri + v_aux)).
    assert split(VirtualReplica.V1, 8, {dc: 1.0, e: 3.0}) == {dc: 6, e: 2}
    assert split(VirtualReplica.V1, 8, {dc: 1.0, e: 50.0}) == {dc: 7, e: 1}
    assert split(VirtualReplica.V2, 9, {ed: 2.0, c: 1.0}) == {ed: 3, c: 6}
    assert split(VirtualReplica.V3, 10, {d: 1.0, e: 1.0, c: 0.5}) == {d: 2, e: 3, c: 5}
    # A tiny budget: one of each, although neither auxiliary keeps up.
    assert split(VirtualReplica.V3, 3, {d: 9.0, e: 1.0, c: 1.0}) == {d: 1, e: 1, c: 1}


def test_a_share_below_the_smallest_workable_set_is_refused() -> None:
    with pytest.raises(PlacementError, match="V3 needs at least 4 workers, its share is 3"):
        split(VirtualReplica.V3, 3, dict.fromkeys(PlacementType, 1.0), min_primaries=2)


@given(replicas, st.integers(0, 60), st.lists(rate, min_size=3, max_size=3))
def test_padding_keeps_the_bounds(replica: VirtualReplica, extra: int, values: list[float]) -> None:
    rates, budget = rates_of(replica, values), count_smallest_workable(replica) + extra
    counts = split(replica, budget, rates)
    padded = pad_to_degrees(replica, counts, rates, (1, 2, 4))
    assert sum(padded.values()) == budget
    assert min(padded.values()) >= 1
    assert padded[replica.primary] >= counts[replica.primary]
    assert padded == counts or (keeps_up(replica, padded, rates) and padded[replica.primary] % 2 == 0)


def test_padding_borrows_where_auxiliaries_can_spare_workers() -> None:
    dc, e = PlacementType.DC, PlacementType.E
    rates = {dc: 1.0, e: 4.0}
    assert pad_to_degrees(VirtualReplica.V1, {dc: 3, e: 5}, rates, (2, 4)) == {dc: 4, e: 4}
    assert pad_to_degrees(VirtualReplica.V1, {dc: 7, e: 1}, rates, (2, 4)) == {dc: 7, e: 1}
    slow = {dc: 4.0, e: 1.0}
    assert pad_to_degrees(VirtualReplica.V1, {dc: 1, e: 4}, slow, (2, 4)) == {dc: 1, e: 4}
