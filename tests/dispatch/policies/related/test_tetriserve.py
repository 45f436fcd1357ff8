"""TetriServe in action: minimal degrees, scale-up, rounds, and workers that stay."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.policies.related.tetriserve import SLO_SHARE, TetriServe
from tests.dispatch.cluster import request, workers
from tests.dispatch.policies.step_engine import BATCHES, HUGE, LARGE, MIDDLE, SMALL, TIMES, StepEngine, running
from tests.profiler.synthetic import step_seconds
from tridentserve.protocols import ClusterView
from tridentserve.requests import Shape
from tridentserve.stages import Stage

ROUND_S = 5 * step_seconds(LARGE, 4)
DECODE_S = TIMES.seconds("one", Stage.DECODE, LARGE)
# A deadline that 50 steps of the large size at degree 4 just meet.
TIGHT_S = 0.02 + 50 * step_seconds(LARGE, 4) + DECODE_S + 0.05


def degrees(engine_or_view: ClusterView) -> dict[str, int]:
    decisions = TetriServe(TIMES).decide(engine_or_view)
    return {each.request_ids[0]: len(each.diffuse) for each in decisions.assignments}


def test_idle_workers_widen_what_runs() -> None:
    assert degrees(ClusterView(0.0, [request("r", LARGE, steps=50)], (), workers(4, "EDC"))) == {"r": 4}
    pending = [request(name, LARGE, steps=50) for name in ("r1", "r2")]
    assert degrees(ClusterView(0.0, pending, (), workers(4, "EDC"))) == {"r1": 2, "r2": 2}
    pending += [request(name, LARGE, steps=50) for name in ("r3", "r4")]
    assert set(degrees(ClusterView(0.0, pending, (), workers(4, "EDC"))).values()) == {1}


def test_small_sizes_are_not_widened_beyond_their_fastest_degree() -> None:
    assert degrees(ClusterView(0.0, [request("r", SMALL, steps=50)], (), workers(4, "EDC"))) == {"r": 2}


def test_a_tight_deadline_takes_the_width_that_the_relaxed_can_spare() -> None:
    relaxed = [request(f"r{i}", LARGE, 100.0, steps=50) for i in range(3)]
    tight = request("tight", LARGE, TIGHT_S, steps=50)
    assert degrees(ClusterView(0.0, [*relaxed, tight], (), workers(4, "EDC"))) == {"tight": 4}


def test_a_segment_is_what_fits_in_a_round() -> None:
    (assignment,) = (
        TetriServe(TIMES)
        .decide(ClusterView(0.0, [request("r", LARGE, TIGHT_S, steps=50)], (), workers(4, "EDC")))
        .assignments
    )
    assert assignment.num_steps == int((ROUND_S - 0.02) / step_seconds(LARGE, 4))
    assert assignment.decode == ()
    assert assignment.expected_finish_s <= ROUND_S


def test_what_comes_within_a_round_waits_for_the_next() -> None:
    engine = StepEngine(TetriServe(TIMES), workers(4, "EDC"))
    engine.play([request(f"r{i}", LARGE, 60.0, steps=50) for i in range(3)] + [request("late", SMALL, arrival_s=0.01)])
    starts_s = sorted({now_s for now_s, _ in engine.log})
    first_of_late_s = next(now_s for now_s, each in engine.log if each.request_ids == ("late",))
    assert starts_s[0] == 0.0
    assert starts_s[1] == first_of_late_s > 0.01


def test_requests_keep_their_workers_while_nothing_else_comes() -> None:
    engine = StepEngine(TetriServe(TIMES), workers(8, "EDC"))
    engine.play([request(f"r{i}", LARGE, 60.0, steps=50) for i in range(2)])
    for name in ("r0", "r1"):
        assert len({each.diffuse for _, each in engine.log if each.request_ids == (name,)}) == 1
    assert len(engine.log) > 10


def test_degrees_change_between_rounds_and_a_block_shrinks_to_a_part_of_itself() -> None:
    engine = StepEngine(TetriServe(TIMES), workers(4, "EDC"))
    engine.play([request("first", LARGE, 20.0, steps=50), request("second", LARGE, 20.0, steps=50, arrival_s=0.5)])
    sets = [each.diffuse for _, each in engine.log if each.request_ids == ("first",)]
    assert {len(diffuse) for diffuse in sets} == {2, 4}
    narrow = next(diffuse for diffuse in sets if len(diffuse) == 2)
    assert narrow == sets[0][:2]


def test_a_short_request_does_not_wait_for_the_end_of_a_round_beside_idle_workers() -> None:
    """The first round of the large request alone is longer than the short one has from its arrival."""
    policy = TetriServe(TIMES)
    huge = request("huge", HUGE, 60.0, steps=4)
    (started,) = policy.decide(ClusterView(0.0, [huge], (), workers(4, "EDC"))).assignments
    assert started.expected_finish_s > 0.3
    short = request("short", SMALL, 0.2, arrival_s=0.1)
    view = ClusterView(0.1, [short], (running(huge, *started.diffuse),), workers(4, "EDC", node="n1"))
    (second,) = policy.decide(view).assignments
    assert second.request_ids == ("short",)


def test_no_round_is_longer_than_a_share_of_the_shortest_slo_that_was_seen() -> None:
    engine = StepEngine(TetriServe(TIMES), workers(4, "EDC"))
    engine.play(
        [request("short", SMALL, 0.3, steps=2)]
        + [request(f"r{i}", LARGE, 60.0, steps=50, arrival_s=0.2 + i) for i in range(3)]
    )
    for now_s, each in engine.log:
        step_s = step_seconds(LARGE, len(each.diffuse))
        if each.request_ids != ("short",) and now_s >= 0.2:
            assert each.num_steps is None or each.num_steps * step_s <= max(step_s, SLO_SHARE * 0.3)


def test_a_step_longer_than_the_round_spans_rounds_and_is_not_starved() -> None:
    """Short requests keep coming; the large one ends by its deadline, long before they are all done."""
    engine = StepEngine(TetriServe(TIMES), workers(4, "EDC"))
    stream = [request(f"s{i}", MIDDLE, 0.6, steps=10, arrival_s=0.1 * i) for i in range(150)]
    engine.play([request("huge", HUGE, 8.0, steps=4), *stream])
    assert engine.finish_s["huge"] < 8.0
    assert max(engine.finish_s.values()) > 12.0


@settings(max_examples=50)
@given(
    sizes=st.lists(st.sampled_from((SMALL, MIDDLE, LARGE, HUGE)), min_size=1, max_size=8),
    slos_s=st.lists(st.floats(-1.0, 20.0), min_size=8, max_size=8),
    gap_s=st.floats(0.0, 2.0),
)
def test_all_end_whatever_the_deadlines(sizes: list[Shape], slos_s: list[float], gap_s: float) -> None:
    engine = StepEngine(TetriServe(TIMES), workers(4, "EDC"))
    requests = [
        request(f"r{i}", size, slo_s, steps=4, arrival_s=i * gap_s)
        for i, (size, slo_s) in enumerate(zip(sizes, slos_s, strict=False))
    ]
    engine.play(requests)
    assert engine.finish_s.keys() == {each.spec.request_id for each in requests}


def test_small_requests_without_workers_share_the_steps_of_one_like_them() -> None:
    """Section 5. A large one shares nothing, and no one of another size."""
    pending = [*(request(f"s{i}", SMALL, 60.0, steps=50) for i in range(3)), request("large", LARGE, 90.0, steps=50)]
    view = ClusterView(0.0, pending, (), workers(2, "EDC"))
    made = TetriServe(TIMES, BATCHES).decide(view).assignments
    assert [set(each.request_ids) for each in made] == [{"s0", "s2"}, {"s1"}]
    assert "in a batch of 2" in made[0].reason
    alone = TetriServe(TIMES).decide(view).assignments
    assert [len(each.request_ids) for each in alone] == [1, 1]


def test_nobody_shares_steps_where_workers_are_idle_for_all() -> None:
    pending = [request(f"s{i}", SMALL, 60.0, steps=50) for i in range(3)]
    decisions = TetriServe(TIMES, BATCHES).decide(ClusterView(0.0, pending, (), workers(4, "EDC")))
    assert [len(each.request_ids) for each in decisions.assignments] == [1, 1, 1]


def test_nobody_in_a_batch_misses_a_deadline_that_it_would_meet_alone() -> None:
    """With the second one, the steps of the first would be too long for it. One that is late anyway has no say."""
    alone_s = 0.02 + 50 * step_seconds(SMALL, 1) + TIMES.seconds("one", Stage.DECODE, SMALL)
    tight, relaxed = request("tight", SMALL, alone_s + 0.001, steps=50), request("relaxed", SMALL, 60.0, steps=50)
    lost = request("lost", SMALL, 0.01, steps=50)
    policy, one = TetriServe(TIMES, BATCHES), workers(1, "EDC")
    (made,) = policy.decide(ClusterView(0.0, [tight, relaxed], (), one)).assignments
    assert len(made.request_ids) == 1
    (made,) = TetriServe(TIMES, BATCHES).decide(ClusterView(0.0, [lost, relaxed], (), one)).assignments
    assert set(made.request_ids) == {"lost", "relaxed"}


def test_a_batch_ends_with_the_round_and_its_members_have_their_steps() -> None:
    engine = StepEngine(TetriServe(TIMES, BATCHES), workers(1, "EDC"))
    engine.play([request(f"s{i}", SMALL, 60.0, steps=20 + 10 * i) for i in range(3)])
    assert {len(each.request_ids) for _, each in engine.log} >= {3}
    assert set(engine.finish_s) == {"s0", "s1", "s2"}


@given(st.lists(st.tuples(st.floats(0.01, 4.0), st.integers(1, 50)), min_size=1, max_size=10))
@settings(max_examples=100)
def test_batches_compromise_no_deadline(asked: list[tuple[float, int]]) -> None:
    """Each batch ends in time for all its members at the pace at which it runs, but for those that no degree serves in
    time."""
    pending = {f"r{i}": request(f"r{i}", SMALL, slo_s, steps=steps) for i, (slo_s, steps) in enumerate(asked)}
    decisions = TetriServe(TIMES, BATCHES).decide(ClusterView(0.0, list(pending.values()), (), workers(2, "EDC")))

    def end_s(steps: int, degree: int, batch: int) -> float:
        encode_s, decode_s = (TIMES.seconds("one", stage, SMALL, 1, batch) for stage in (Stage.ENCODE, Stage.DECODE))
        return encode_s + steps * TIMES.seconds("one", Stage.DIFFUSE, SMALL, degree, batch) + decode_s

    for made in decisions.assignments:
        for member in (pending[name] for name in made.request_ids if len(made.request_ids) > 1):
            steps = member.spec.num_inference_steps
            could = any(end_s(steps, degree, 1) <= member.deadline_s for degree in (1, 2))
            assert not could or end_s(steps, 1, len(made.request_ids)) <= member.deadline_s + 1e-9
