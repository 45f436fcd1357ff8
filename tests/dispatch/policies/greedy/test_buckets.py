"""Degree buckets: their sizes (appendix D.2, Table 6) and which workers they get."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.policies.greedy.buckets import assign_buckets, compute_bucket_sizes, cut_into_buckets
from dispatch.policies.greedy.work import WorkTimes
from tests.dispatch.policies.scenes import LOAD, cluster
from tests.profiler.synthetic import cost_model
from tridentserve.errors import ConfigError


@given(
    shares=st.dictionaries(st.sampled_from((1, 2, 4, 8)), st.floats(0.01, 10.0), min_size=1),
    total=st.integers(1, 200),
)
def test_sizes_are_multiples_and_sum_to_all_workers(shares: dict[int, float], total: int) -> None:
    if total < min(shares):
        with pytest.raises(ConfigError, match="no degree buckets"):
            compute_bucket_sizes(shares, total)
        return
    sizes = compute_bucket_sizes(shares, total)
    assert sum(sizes.values()) == total
    assert set(sizes) <= set(shares)
    if sum(shares) <= total:
        assert set(sizes) == set(shares)
    for degree, size in sizes.items():
        assert size >= degree
        assert size % degree == 0 or degree == min(sizes)
    if 1 in sizes and sum(shares) <= total / 4:
        whole = sum(shares.values())
        assert all(abs(size - shares[degree] / whole * total) <= 16 or size == degree for degree, size in sizes.items())


def test_sizes_as_in_the_paper() -> None:
    """The shares behind Table 6, HunyuanVideo Medium, are found again."""
    assert compute_bucket_sizes({8: 56, 4: 24, 2: 36, 1: 12}, 128) == {1: 12, 2: 36, 4: 24, 8: 56}


def test_ties_are_rounded_downward_and_the_rest_goes_where_it_lacks() -> None:
    assert compute_bucket_sizes({2: 3, 1: 5}, 8) == {1: 6, 2: 2}


def test_the_widest_joins_the_next_where_workers_are_few() -> None:
    assert compute_bucket_sizes({8: 4.0, 4: 3.0, 2: 2.0, 1: 1.0}, 8) == {1: 2, 2: 2, 4: 4}


@given(nodes=st.lists(st.integers(1, 9), min_size=1, max_size=5), data=st.data())
def test_every_worker_has_a_bucket_and_blocks_stay_inside_nodes(nodes: list[int], data: st.DataObject) -> None:
    specs = cluster(*nodes)
    fitting = [degree for degree in (1, 2, 4, 8) if degree <= max(nodes)]
    shares = data.draw(st.dictionaries(st.sampled_from(fitting), st.floats(0.1, 9.0), min_size=1))
    if len(specs) < min(shares):
        return
    sizes = compute_bucket_sizes(shares, len(specs))
    bucket_of = cut_into_buckets(sizes, specs)
    assert bucket_of.keys() == {spec.worker_id for spec in specs}
    per_node = Counter((spec.node_id, bucket_of[spec.worker_id]) for spec in specs)
    assert all(n % degree == 0 for (_, degree), n in per_node.items() if degree != min(sizes))
    if all(size == 8 for size in nodes):
        assert Counter(bucket_of.values()) == sizes


def test_shares_are_the_gpu_seconds_at_the_optimal_degrees() -> None:
    work = WorkTimes(cost_model(), aligned=True)
    specs = cluster(8, 8)
    sizes = Counter(assign_buckets(work, specs, LOAD, max_degree=None).values())
    assert sizes.keys() == {1, 2, 4}
    assert sizes[4] > sizes[2] >= sizes[1]
    assert set(assign_buckets(work, specs, LOAD, max_degree=2).values()) == {1, 2}
