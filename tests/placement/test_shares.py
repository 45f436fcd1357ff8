"""The part of a stage's weights that workers keep: whole, divided or streamed, whichever fits and takes least."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement import LoadShare
from placement.shares import AllowedShares, choose_shares, describe_shares
from profiler import CostModel
from tests.placement.test_units import RESERVE_BYTES, SMALL, TIMES, D, E, cluster
from tests.profiler.synthetic import MIB, table
from tridentserve.errors import ProfileError
from tridentserve.stages import Stage
from tridentserve.weights_share import WHOLE, LayerSizes, WeightsShare

LOAD = [LoadShare("one", SMALL, 20)]
# D's 800 MiB as 40 MiB outside 38 layers.
LAYERS = LayerSizes(40 * MIB, (20 * MIB,) * 38)
STREAMED = WeightsShare(streamed=True)


def choose(workers: int, memory_mib: int, times: CostModel = TIMES, **allowed: object) -> WeightsShare:
    """The share of D."""
    ways = {D: AllowedShares(**{"layers": LAYERS, **allowed})}  # type: ignore[arg-type]
    shares = choose_shares(times, LOAD, cluster([workers], memory_mib), RESERVE_BYTES, ways)
    return shares.get(D, WHOLE)


def with_links(intra_node: float, host: float) -> CostModel:
    links = replace(TIMES.links, intra_node_bytes_per_s=intra_node, host_bytes_per_s=host)
    return CostModel([table()], "gpu", links)


def test_a_lone_worker_streams_what_it_cannot_hold() -> None:
    assert choose(1, 850) == WHOLE
    assert choose(1, 800) == STREAMED
    assert choose(1, 120) == STREAMED
    assert choose(1, 90) == WHOLE, "which does not fit: two slots and what is outside the layers are 80 MiB"
    assert choose(1, 800, streamed=False) == WHOLE
    assert choose(1, 800, layers=None) == WHOLE


def test_the_way_that_takes_fewer_worker_seconds_is_taken() -> None:
    slow_host, slow_peers = with_links(1e12, 1e8), with_links(1e8, 1e12)
    assert choose(8, 600, slow_host) == WeightsShare(2)
    assert choose(8, 600, slow_peers) == STREAMED
    assert choose(8, 600, slow_host, divided=False) == STREAMED
    assert choose(8, 600, slow_peers, streamed=False) == WeightsShare(2)


def test_a_share_may_be_asked_for() -> None:
    assert choose(8, 5000) == WHOLE
    assert choose(8, 5000, whole=False, divided=False) == STREAMED
    assert choose(8, 5000, whole=False, streamed=False) == WeightsShare(2)


def test_slots_count_where_weights_are_divided() -> None:
    """A half of 800 MiB with 6 of activations fits 425 less the 10 of the reserve; not with what is whole and slots."""
    assert choose(8, 425, layers=None) == WeightsShare(2)
    assert choose(8, 425, with_links(1e12, 1e6)) == WeightsShare(4)


@given(
    unit=st.sampled_from((1, 2, 4, 8)),
    streamed=st.booleans(),
    rest=st.integers(0, 10**9),
    layers=st.lists(st.integers(1, 10**9), min_size=1, max_size=60),
)
def test_a_worker_never_keeps_less_than_its_part(unit: int, streamed: bool, rest: int, layers: list[int]) -> None:
    share, sizes = WeightsShare(1 if streamed else unit, streamed), LayerSizes(rest, tuple(layers))
    kept, supplied = sizes.count_kept_bytes(share), sizes.count_supplied_bytes(share, unit)
    if share.is_whole:
        assert (kept, supplied) == (rest + sum(layers), 0)
    elif streamed:
        assert kept >= rest + 2 * max(layers)
        assert supplied == sum(layers)
    else:
        assert kept >= rest + sum(layers) / unit + 2 * max(layers)
        assert supplied <= sum(layers) - sum(layers) // unit
        assert sizes.count_supplied_bytes(share, 2 * unit) >= supplied


def test_times_of_shares() -> None:
    """Layers that come slowly set the time of a step; workers keep less."""
    times = with_links(1e8, 1e8).share({D: STREAMED, E: WeightsShare(2)}, {D: LAYERS})
    assert times.shares == {D: STREAMED, E: WeightsShare(2)}
    assert times.weights_bytes("one", Stage.DIFFUSE) == pytest.approx(80 * MIB, rel=0.01)
    assert times.weights_bytes("one", Stage.ENCODE) == TIMES.weights_bytes("one", Stage.ENCODE) // 2
    assert times.seconds("one", Stage.DIFFUSE, SMALL) == pytest.approx(760 * MIB / 1e8, rel=0.01)
    assert times.seconds("one", Stage.ENCODE, SMALL) == pytest.approx(200 * MIB / 1e8, rel=0.01)
    assert times.seconds("one", Stage.DECODE, SMALL) == TIMES.seconds("one", Stage.DECODE, SMALL)
    assert times.unit("one", Stage.DIFFUSE) == 1
    assert times.unit("one", Stage.ENCODE) == 2
    fast = with_links(1e15, 1e15).share({D: STREAMED}, {D: LAYERS})
    assert fast.seconds("one", Stage.DIFFUSE, SMALL) == TIMES.seconds("one", Stage.DIFFUSE, SMALL)
    with pytest.raises(ProfileError):
        TIMES.share({replace(D, model="unknown"): STREAMED}, {})


def test_shares_are_said() -> None:
    times = TIMES.share({D: STREAMED, E: WeightsShare(2)}, {D: LAYERS})
    streamed, divided = describe_shares(times)
    assert divided.startswith("one E is divided among units of 2: ")
    assert streamed == (
        "one D is streamed: a worker keeps 0.1 GB of the weights, and copies each layer from the host copy before it "
        "computes"
    )
