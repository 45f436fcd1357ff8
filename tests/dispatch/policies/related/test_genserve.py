"""GenServe in action: videos make room for images while their slack allows, and come back."""

from __future__ import annotations

from dispatch.policies.related.genserve import GenServe
from dispatch.policies.related.video_rounds import Video, plan_round
from tests.dispatch.cluster import request, worker, workers
from tests.dispatch.policies.step_engine import BATCHES, MIDDLE, SMALL, TIMES, VIDEO, StepEngine, running
from tests.profiler.synthetic import step_seconds
from tridentserve.protocols import ClusterView, PendingRequest, RunningRequest, WorkerView
from tridentserve.stages import Stage

POLICY = GenServe(TIMES, BATCHES)
IMAGE_S = 0.02 + 20 * step_seconds(SMALL, 1) + TIMES.seconds("one", Stage.DECODE, SMALL)
VIDEO_REST_S = 40 * step_seconds(VIDEO, 1) + TIMES.seconds("one", Stage.DECODE, VIDEO)


def busy(n: int, of: int) -> list[WorkerView]:
    return [worker(f"n0-w{i}", "EDC", free_at_s=9.0 if i < n else None) for i in range(of)]


def video(name: str, slack_s: float, *diffuse: str) -> RunningRequest:
    """40 of 50 steps are left; `slack_s` is what it has to spare at degree 1."""
    return running(request(name, VIDEO, VIDEO_REST_S + slack_s, steps=50, steps_done=10), *diffuse)


def stopped(pending: list[PendingRequest], active: list[RunningRequest], views: list[WorkerView]) -> dict[str, str]:
    decisions = POLICY.decide(ClusterView(0.0, pending, active, views))
    return {each.request_id: each.reason for each in decisions.preemptions}


def test_an_urgent_image_stops_a_video_with_slack() -> None:
    image = request("image", SMALL, IMAGE_S + 0.05)
    assert "pause" in stopped([image], [video("v", 5.0, "n0-w0")], busy(1, of=1))["v"]


def test_a_video_without_slack_is_not_stopped() -> None:
    image = request("image", SMALL, 10.0)
    assert stopped([image], [video("v", 0.01, "n0-w0")], busy(1, of=1)) == {}


def test_the_video_with_the_most_slack_is_stopped() -> None:
    image = request("image", SMALL, IMAGE_S + 0.05)
    active = [video("v0", 2.0, "n0-w0"), video("v1", 9.0, "n0-w1"), video("v2", 4.0, "n0-w2")]
    assert list(stopped([image], active, busy(3, of=3))) == ["v1"]


def test_nothing_is_stopped_where_workers_are_idle() -> None:
    decisions = POLICY.decide(ClusterView(0.0, [request("image", SMALL)], [video("v", 5.0, "n0-w0")], busy(1, of=2)))
    assert decisions.preemptions == ()
    assert [each.request_ids for each in decisions.assignments] == [("image",)]


def test_a_wide_video_goes_narrower_for_an_image_and_a_narrow_one_wider_on_idle_workers() -> None:
    image = request("image", SMALL, IMAGE_S + 0.05)
    wide = video("v", 5.0, "n0-w0", "n0-w1", "n0-w2", "n0-w3")
    assert "degree 2" in stopped([image], [wide], busy(4, of=4))["v"]
    assert "degree 2" in stopped([image], [video("v", 5.0, "n0-w0")], busy(1, of=4))["v"]


def test_a_video_that_yields_is_not_asked_again_and_its_workers_are_waited_for() -> None:
    yielding = running(request("v", VIDEO, 60.0, steps=50, steps_done=10), "n0-w0", yielding=True)
    decisions = POLICY.decide(ClusterView(0.0, [request("image", SMALL, IMAGE_S + 0.05)], [yielding], busy(1, of=1)))
    assert decisions.preemptions == ()
    assert decisions.assignments == ()


def test_images_of_one_size_run_together_unless_the_first_would_be_late() -> None:
    images = [request(f"i{i}", SMALL, 10.0) for i in range(8)] + [request("other", MIDDLE, 10.0)]
    decisions = POLICY.decide(ClusterView(0.0, images, (), workers(2, "EDC")))
    assert sorted(len(each.request_ids) for each in decisions.assignments) == [1, 8]
    tight = [request("first", SMALL, IMAGE_S + 0.001), *images[:3]]
    decisions = POLICY.decide(ClusterView(0.0, tight, (), workers(2, "EDC")))
    assert sorted(each.request_ids for each in decisions.assignments) == [("first",), ("i0", "i1", "i2")]


def test_a_paused_video_comes_back_and_all_are_in_time() -> None:
    engine = StepEngine(GenServe(TIMES, BATCHES), workers(1, "EDC"))
    requests = [request("v", VIDEO, 8.0, steps=50)]
    requests += [request(f"i{i}", SMALL, 0.4, arrival_s=0.5 + i * 0.9) for i in range(3)]
    engine.play(requests)
    assert engine.preempted == ["v", "v", "v"]
    assert all(engine.finish_s[each.spec.request_id] <= each.deadline_s for each in requests)


def test_two_videos_do_not_displace_each_other() -> None:
    step_s = {1: 1.0}
    runs, waits = Video(10, step_s, 1.0, 30.0, degree=1), Video(10, step_s, 1.0, 29.0)
    assert plan_round([runs, waits], [], 1, round_s=1.0).degrees == (1, 0)
