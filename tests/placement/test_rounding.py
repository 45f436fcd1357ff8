"""Largest remainder with minimums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.split import share_by_largest_remainder


def test_hamiltons_textbook_case() -> None:
    assert share_by_largest_remainder(10, [4.7, 1.6, 1.58, 1.2], [0, 0, 0, 0]) == [5, 2, 2, 1]


def test_ties_go_to_the_first_and_minimums_come_first() -> None:
    assert share_by_largest_remainder(3, [1, 1], [0, 0]) == [2, 1]
    assert share_by_largest_remainder(4, [0.99, 0.01], [1, 2]) == [2, 2]
    assert share_by_largest_remainder(8, [0.9, 0.05, 0.05], [1, 3, 1]) == [4, 3, 1]


claims = st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 5)), min_size=1, max_size=6)


@given(claims, st.integers(0, 50))
def test_shares_sum_to_the_total_and_keep_quota_and_minimum(claims: list[tuple[float, int]], extra: int) -> None:
    weights, minimums = [weight for weight, _ in claims], [minimum for _, minimum in claims]
    total = sum(minimums) + extra
    shares = share_by_largest_remainder(total, weights, minimums)
    assert sum(shares) == total
    assert all(share >= minimum for share, minimum in zip(shares, minimums, strict=True))
    # Nobody gets a worker more than its proportion asks for, unless its minimum does.
    for share, weight, minimum in zip(shares, weights, minimums, strict=True):
        assert share <= max(minimum, total * weight / sum(weights) + 1)


@pytest.mark.parametrize(
    ("total", "weights", "minimums"), [(1, [1.0, 1.0], [1, 1]), (1, [], []), (2, [1.0, 0.0], [0, 0])]
)
def test_impossible_shares_are_refused(total: int, weights: list[float], minimums: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot share"):
        share_by_largest_remainder(total, weights, minimums)
