"""The comparison of simulator and service: what is calibrated from answers is what made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import compare_simulation
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lib.compare.calibration import Calibration, apply_measured, calibrate, compute_hurry_ms
from lib.compare.crowding import estimate_slowdown
from lib.compare.samples import StagePoint, StageSample, list_stage_samples
from lib.compare.warm_up import WarmUp
from lib.compare.workload import make_traces

from deployments.assembly.profiles import load_served_tables, make_cost_model
from deployments.assembly.simulation import simulate_service
from deployments.config.app import AppArgs
from deployments.config.file import read_args
from profiler import CostModel
from tests.support.tables.steady_times import STEADY_TIMES
from traces.requests import TraceRequest
from traces.results import ReplayResult
from traces.simulated import make_arrivals, make_results
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import ConfigError, ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

ROOT = Path(__file__).parents[3]
SIDES = (256, 512)
STEPS = 10
HTTP_S = 0.02
SERVICE = SimulationOptions(
    plan_overhead_s=0.004,
    report_overhead_s=0.003,
    image_s_per_pixel=5e-8,
    slowdown=(1.0, 1.2, 1.8, 2.4),
    wide_slowdown=(1.0, 1.0, 2.0, 2.8),
    keep_plans=True,
)


@pytest.fixture(params=["tiny", "disaggregated"])
def args(request: pytest.FixtureRequest) -> AppArgs:
    given = read_args(ROOT / "deployments" / f"{request.param}.yaml")
    return given.model_copy(update={"profiles": [STEADY_TIMES]})


def served(args: AppArgs, sides: list[int], slo_ms: dict[int, float] | None = None) -> list[ReplayResult]:
    """Requests that come at once, as a service answers that is slower by half than its profile says."""
    model = args.models[0].name
    requests = [
        TraceRequest(f"r{i}", 0.0, side, side, 1, "a fox", "", STEPS, slo_ms=(slo_ms or {}).get(side))
        for i, side in enumerate(sides)
    ]
    result = simulate_service(args, slow(args), slow(args), make_arrivals(requests, [model]), SERVICE)
    ends_s = {request.spec.request_id: request.latency_s for request in result.requests}
    return [
        replace(
            answer,
            latency_s=answer.latency_s + HTTP_S,
            facts=answer.facts.model_copy(update={"latency_s": ends_s[answer.request.request_id]}),
        )
        for answer in make_results(requests, result)
    ]


def slow(args: AppArgs) -> CostModel:
    tables = [
        replace(t, rows=tuple(replace(r, seconds=1.5 * r.seconds) for r in t.rows)) for t in load_served_tables(args)
    ]
    return CostModel(tables, args.cluster.device_name)


def warm_up(args: AppArgs) -> WarmUp:
    alone = [served(args, [side])[0] for side in SIDES for _ in range(2)]
    slo_ms = compute_hurry_ms(slow(args), args.models[0].name, SIDES, STEPS)
    crowds = [served(args, [512, 256] * number) for number in (1, 2, 3)]
    return WarmUp(alone, [served(args, [side], slo_ms)[0] for side in slo_ms], crowds)


def test_the_calibration_is_what_the_service_costs(args: AppArgs) -> None:
    found = calibrate([warm_up(args)], 4)
    times, model = slow(args), args.models[0].name
    for side in SIDES:
        for stage in Stage:
            # Alone, a request has the width at which it ends first.
            points = [point for point in found.stage_s if (point.stage, point.shape) == (stage, Shape(side, side))]
            assert points
            for point in points:
                expected = times.seconds(model, stage, point.shape, point.degree)
                assert found.stage_s[point] == pytest.approx(expected)
        assert found.http_s[Shape(side, side)] == pytest.approx(HTTP_S)
    assert found.jitter == pytest.approx(0.0, abs=1e-9)
    assert found.plan_overhead_s == pytest.approx(SERVICE.plan_overhead_s)
    assert found.report_overhead_s == pytest.approx(SERVICE.report_overhead_s, abs=1e-3)
    assert found.image_s_per_pixel == pytest.approx(SERVICE.image_s_per_pixel, rel=0.1)
    assert found.slowdown[:2] == pytest.approx(SERVICE.slowdown[:2], rel=0.1)


def test_requests_in_a_hurry_show_what_two_workers_take(args: AppArgs) -> None:
    answers = warm_up(args)
    assert answers.hurried
    for result in answers.hurried:
        [diffuse] = [sample for sample in list_stage_samples([result]) if sample.point.stage is Stage.DIFFUSE]
        assert diffuse.point.degree == 2
        found = calibrate([answers], 4).stage_s[diffuse.point]
        assert found == pytest.approx(slow(args).seconds(*diffuse.point))


@given(
    steps=st.lists(st.floats(1.0, 2.0), min_size=2, max_size=2),
    queues=st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=6), min_size=3, max_size=3),
)
@example(steps=[1.0, 2.0], queues=[[1, 3, 9], [1, 4, 9], [1, 6, 9]])  # with two at work only a moment was seen
def test_slowdowns_are_found_again(steps: list[float], queues: list[list[int]]) -> None:
    """Within 25 % where two stages' worth was seen at that number of workers; else it may lean to the neighbours."""
    slowdown = [1.0, steps[0], steps[0] * steps[1]]
    samples, seen = _ran([4 * queue for queue in queues], slowdown)
    alone_s = {sample.point: sample.point.shape.height / 2 for sample in samples}  # all of them are of two steps
    alone = [StageSample(point, ("w0",), 0.0, 2 * seconds, 2) for point, seconds in alone_s.items()]
    found = estimate_slowdown([(crowd, alone_s) for crowd in (samples, *([each] for each in alone))], 3, wide=False)
    assert list(found) == sorted(found)
    for index, stages in enumerate(seen):
        neighbours = slowdown[index : index + 1] if stages >= 2 else slowdown[max(index - 1, 0) : index + 2]
        assert 0.75 * min(neighbours) <= found[index] <= 1.25 * max(neighbours)


def _ran(queues: list[list[int]], slowdown: list[float]) -> tuple[list[StageSample], list[float]]:
    """Each worker does its queue of works, given in seconds alone; with n at work all of them are slowed down.

    With the samples, per number of workers at work: how many stages of mean length would tell as much of it as these
    did, of which long ones count by their square.
    """
    now_s, samples, left = 0.0, [], [list(map(float, queue)) for queue in queues]
    begun_s = [0.0] * len(queues)
    shares_s, squares_s2 = [[0.0] * len(queues) for _ in queues], [0.0] * len(queues)
    while busy := [worker for worker, works in enumerate(left) if works]:
        factor = slowdown[len(busy) - 1]
        step_s = min(left[worker][0] for worker in busy)
        now_s += step_s * factor
        for worker in busy:
            shares_s[worker][len(busy) - 1] += step_s * factor
            left[worker][0] -= step_s
            if left[worker][0] == 0:
                left[worker].pop(0)
                side = queues[worker][-len(left[worker]) - 1]
                samples.append(
                    StageSample(
                        StagePoint("m", Stage.DECODE, Shape(side, side), 1), (f"w{worker}",), begun_s[worker], now_s, 2
                    )
                )
                begun_s[worker] = now_s
                squares_s2 = [sum_s2 + share_s**2 for sum_s2, share_s in zip(squares_s2, shares_s[worker], strict=True)]
                shares_s[worker] = [0.0] * len(queues)
    mean_s = sum(sample.end_s - sample.start_s for sample in samples) / len(samples)
    return samples, [sum_s2 / mean_s**2 for sum_s2 in squares_s2]


def test_measured_tables_keep_the_proportions_of_wider_degrees(args: AppArgs) -> None:
    model, shape = args.models[0].name, Shape(512, 512)
    before = make_cost_model(args)
    alone = before.seconds(model, Stage.DIFFUSE, shape)
    after = CostModel(
        apply_measured(load_served_tables(args), {StagePoint(model, Stage.DIFFUSE, shape, 1): 3 * alone}), "cpu"
    )
    for degree in before.degrees(model, Stage.DIFFUSE):
        ratio = after.seconds(model, Stage.DIFFUSE, shape, degree) / before.seconds(model, Stage.DIFFUSE, shape, degree)
        assert ratio == pytest.approx(3.0)
    assert after.seconds(model, Stage.ENCODE, shape) == before.seconds(model, Stage.ENCODE, shape)
    with pytest.raises(ProfileError, match="was not profiled at 200x200"):
        apply_measured(load_served_tables(args), {StagePoint(model, Stage.DIFFUSE, Shape(200, 200), 1): 1.0})


def test_other_warm_ups_add_what_was_seen_of_crowds_and_of_wide_plans(args: AppArgs) -> None:
    """And nothing to what the stages take: machines drift."""
    whole = warm_up(args)
    calm = WarmUp(whole.alone, [], whole.crowds[:1])
    found = calibrate([calm], 4)
    assert found.wide_slowdown == found.slowdown, "nobody was in a hurry"
    drifted = WarmUp(_slower(whole.alone), _slower(whole.hurried), [_slower(crowd) for crowd in whole.crowds])
    added, all_of_it = calibrate([calm], 4, [drifted]), calibrate([whole], 4)
    assert {point.degree for point in added.stage_s} == {1, 2}
    assert {point: added.stage_s[point] for point in found.stage_s} == found.stage_s
    assert added.slowdown == pytest.approx(all_of_it.slowdown, rel=0.05)


def _slower(answers: Sequence[ReplayResult]) -> list[ReplayResult]:
    """All of it took twice as long."""
    slower = []
    for answer in answers:
        spans = [
            span.model_copy(update={"start_s": 2 * span.start_s, "end_s": 2 * span.end_s})
            for span in answer.facts.timeline
        ]
        slower.append(replace(answer, facts=answer.facts.model_copy(update={"timeline": spans})))
    return slower


def test_a_failed_warm_up_is_said(args: AppArgs) -> None:
    answers = warm_up(args)
    with pytest.raises(ConfigError, match="the warm-up failed: HTTP 500"):
        calibrate([replace(answers, alone=[replace(answers.alone[0], error="HTTP 500: oops")])], 4)


def test_traces_have_the_load_that_was_asked_for() -> None:
    shapes = [Shape(side, side) for side in (256, 384, 512)]
    stage_s = {StagePoint("m", stage, shape, 1): 0.01 * shape.pixels / 65536 for stage in Stage for shape in shapes}
    calibration = Calibration(stage_s, {}, 0.0, 0.0, 0.0, 0.0, (1.0, 1.0, 2.0), ())
    traces = make_traces("m", [256, 384, 512], 10, 200, 0.5, 3, calibration, seed=1)
    assert list(traces) == ["even", "poisson", "bursty"]
    for requests in traces.values():
        assert len(requests) == 200
        work_s = sum(12 * 0.01 * request.height * request.width / 65536 for request in requests)
        # Two workers at once are as fast as it gets: 2 s of work per second.
        assert work_s / requests[-1].timestamp_s == pytest.approx(0.5 * 2, rel=0.35)
    assert traces == make_traces("m", [256, 384, 512], 10, 200, 0.5, 3, calibration, seed=1)
    with pytest.raises(ConfigError, match="ran no encode of 640x640 on one worker; raise --rounds"):
        make_traces("m", [256, 384, 640], 10, 200, 0.5, 3, calibration, seed=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: [", "cannot be read as YAML"),
        ("applications: []", "no application has the import_path deployments.app:build_app and args"),
        ("applications: [{import_path: other:app, args: {}}]", "no application has the import_path"),
        ("applications: [{import_path: deployments.app:build_app, args: {models: []}}]", "args.models: "),
    ],
)
def test_a_configuration_that_cannot_be_used_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml: ") as caught:
        read_args(tmp_path / "c.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sides", "out", "message"),
    [("192,256,384", "new", "tiny-sd3 encode was not profiled at 192x192"), ("256,384,512", "taken", "taken")],
)
def test_what_cannot_be_compared_is_said_before_the_service_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sides: str, out: str, message: str
) -> None:
    (tmp_path / "taken").write_text("a file")
    where = ["--config", str(ROOT / "deployments/tiny.yaml"), "--url", "http://127.0.0.1:1"]
    assert compare_simulation.main([*where, "--sides", sides, "--out", str(tmp_path / out)]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert "warm-up" not in written
