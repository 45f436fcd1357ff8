"""The order in which replicas leave a worker's memory: any plan can rely on it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tridentserve.engine.eviction import choose_victims
from tridentserve.plans import Replica
from tridentserve.stages import Stage

REPLICAS = [Replica(model, stage) for model in "ab" for stage in Stage]
SOME = st.frozensets(st.sampled_from(REPLICAS))


@given(
    resident=st.lists(st.sampled_from(REPLICAS), unique=True),
    needed=SOME,
    wanted=SOME,
    queued=SOME,
    sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    excess_bytes=st.integers(-5, 40),
)
def test_the_order_of_eviction(
    resident: list[Replica],
    needed: frozenset[Replica],
    wanted: frozenset[Replica],
    queued: frozenset[Replica],
    sizes: list[int],
    excess_bytes: int,
) -> None:
    size = dict(zip(REPLICAS, sizes, strict=True))
    chosen = choose_victims(resident, needed, wanted, queued, size.__getitem__, excess_bytes)
    may_go = [replica for replica in resident if replica not in needed]
    assert set(chosen) <= set(may_go)
    freed = sum(size[replica] for replica in chosen)
    assert freed >= excess_bytes or set(chosen) == set(may_go)
    assert not chosen or freed - size[chosen[-1]] < excess_bytes, "the last one was not necessary"
    stay = [replica for replica in may_go if replica not in chosen]
    for gone in chosen:
        for left in stay:
            # An evicted replica is of less use than one that stays: not queued before queued, not wanted before wanted,
            # then by age.
            assert (gone in queued, gone in wanted, resident.index(gone)) < (
                left in queued,
                left in wanted,
                resident.index(left),
            )
