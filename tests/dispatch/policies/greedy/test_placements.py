"""Placements by hand: all stages everywhere; a cluster per stage, sized by measured rates (appendix D.2, Table 7)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.policies.greedy.placements import co_locate, compute_stage_sizes, disaggregate, sum_gpu_seconds
from tests.dispatch.policies.scenes import LOAD, cluster, holding
from tests.profiler.synthetic import SHAPES, cost_model, step_seconds
from tridentserve.errors import ConfigError, PlacementError
from tridentserve.load import LoadShare
from tridentserve.stages import Stage

TIMES = cost_model()


@given(seconds=st.tuples(*[st.floats(0.0, 100.0)] * 3), total=st.integers(3, 500))
def test_stage_sizes_sum_up_and_none_is_empty(seconds: tuple[float, float, float], total: int) -> None:
    if sum(seconds) == 0.0:
        return
    sizes = compute_stage_sizes(dict(zip(Stage, seconds, strict=True)), total)
    assert sum(sizes.values()) == total
    assert min(sizes.values()) >= 1
    exact = {stage: total * part / sum(seconds) for stage, part in zip(Stage, seconds, strict=True)}
    assert all(abs(sizes[stage] - exact[stage]) <= 3 for stage in Stage)


def test_sizes_follow_the_rates() -> None:
    """With the rates behind Table 7, Flux.1, its sizes are found again."""
    seconds = {Stage.ENCODE: 6 / 128, Stage.DIFFUSE: 96 / 128, Stage.DECODE: 26 / 128}
    assert compute_stage_sizes(seconds, 128) == {Stage.ENCODE: 6, Stage.DIFFUSE: 96, Stage.DECODE: 26}


def test_gpu_seconds_are_demand_over_rate() -> None:
    load = [LoadShare("one", SHAPES[0], 20, 3.0), LoadShare("two", SHAPES[2], 10, 2.0)]
    found = sum_gpu_seconds(TIMES, load)
    assert found[Stage.ENCODE] == pytest.approx(5 * 0.02)
    assert found[Stage.DIFFUSE] == pytest.approx(
        3 * 20 * step_seconds(SHAPES[0], 1) + 2 * 40 * step_seconds(SHAPES[2], 4)
    )


def test_each_worker_holds_one_stage_and_d_has_whole_nodes() -> None:
    specs = cluster(4, 4, 4)
    placement = disaggregate(TIMES, specs, LOAD)
    diffuse = holding(placement, [Stage.DIFFUSE])
    encode, decode = holding(placement, [Stage.ENCODE]), holding(placement, [Stage.DECODE])
    assert sorted([*diffuse, *encode, *decode]) == sorted(spec.worker_id for spec in specs)
    assert min(len(encode), len(decode)) >= 1
    assert set(diffuse) >= {spec.worker_id for spec in specs if spec.node_id in ("n0", "n1")}


def test_co_located_workers_hold_all_of_all_models() -> None:
    placement = co_locate(cluster(1, 1), [*LOAD, LoadShare("two", SHAPES[0], 20, 1.0)])
    assert all(len(held) == 6 for held in placement.replicas.values())


def test_what_cannot_be_placed_is_said() -> None:
    with pytest.raises(PlacementError, match="needs 3 workers and there are 2"):
        disaggregate(TIMES, cluster(2), LOAD)
    with pytest.raises(ConfigError, match="needs the expected load"):
        co_locate(cluster(2), [])
    with pytest.raises(ConfigError, match="brings no work"):
        disaggregate(TIMES, cluster(3), [LoadShare("one", SHAPES[0], 20, 0.0)])
