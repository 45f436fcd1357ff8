"""Clients that may join a request, and the request when clients leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.waiting import until
from tridentserve.engine.live.client_requests import ClientRequest, ClientRequests
from tridentserve.engine.live.plan_calls import select_inputs
from tridentserve.engine.live.updates import FailedUpdate, PreviewUpdate, ProgressUpdate, QueuedUpdate
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.requests import GenerationInputs, ImageStart, RequestSpec, Shape
from tridentserve.scheduling.events import Degrade
from tridentserve.stages import Stage

SPEC = RequestSpec("id", "model", Shape(64, 64), 4)


def inputs(seed: int = 1, prompt: str = "x", image: bytes | None = None, seed_drawn: bool = False) -> GenerationInputs:
    return GenerationInputs(prompt, SPEC.shape, 4, 5.0, seed, image=image, seed_drawn=seed_drawn)


def admitted() -> tuple[ClientRequests, ClientRequest]:
    book = ClientRequests(max_result_age_s=0.05)
    return book, book.admit(SPEC, inputs())


async def test_clients_join_and_begin_with_the_latest_update() -> None:
    book, job = admitted()
    job.publish(QueuedUpdate("id"))
    first = job.join()
    job.publish(ProgressUpdate("id", 1, 4))
    second = job.join()
    assert book.find_joinable("id") is job
    assert [first.get_nowait(), first.get_nowait()] == [QueuedUpdate("id"), ProgressUpdate("id", 1, 4)]
    assert second.get_nowait() == ProgressUpdate("id", 1, 4)


async def test_a_client_that_waits_for_the_end_hears_of_no_step() -> None:
    _, job = admitted()
    waiting, watching = job.join(with_progress=False), job.join()
    job.publish(ProgressUpdate("id", 1, 4))
    late = job.join(with_progress=False)
    job.publish(FailedUpdate("id", "code", "why"))
    for inbox in (waiting, late):
        assert [inbox.get_nowait(), inbox.empty()] == [FailedUpdate("id", "code", "why"), True]
    assert [watching.get_nowait(), watching.get_nowait()] == [
        ProgressUpdate("id", 1, 4),
        FailedUpdate("id", "code", "why"),
    ]


async def test_a_request_from_an_image_has_fewer_steps_of_a_shorter_schedule() -> None:
    start = ImageStart(0.6)
    job = ClientRequests(max_result_age_s=0.05).admit(
        replace(SPEC, num_inference_steps=6), replace(inputs(image=b"x"), num_inference_steps=10, start=start)
    )
    job.degrade(Degrade("id", 3, "it is late"))
    assert (job.spec.num_inference_steps, job.inputs.computed_steps, job.inputs.num_inference_steps) == (3, 3, 5)
    assert job.inputs.start == start


async def test_previews_go_to_those_who_want_them_and_only_forward() -> None:
    book, job = admitted()
    viewing, watching = job.join(with_previews=True), job.join()
    for step, picture in ((1, b"one"), (3, b"three"), (2, b"again"), (3, b"again")):  # it was retried behind step 3
        job.publish_preview(step, (picture,))
    assert [viewing.get_nowait(), viewing.get_nowait()] == [
        PreviewUpdate("id", 0, 1, 4, (b"one",), "png"),
        PreviewUpdate("id", 1, 3, 4, (b"three",), "png"),
    ]
    assert viewing.empty()
    assert watching.empty()
    assert job.join(with_previews=True).empty(), "whoever joins begins with the latest step, not with a preview"
    book.leave(job, viewing)
    assert len(job.viewers) == 1


async def test_who_asks_for_previews_may_join_a_request_without() -> None:
    _, job = admitted()
    assert job.is_same(SPEC, replace(inputs(), partial_images=2, preview_interval_s=1.0))


async def test_a_client_that_has_left_watches_no_more() -> None:
    book, job = admitted()
    inboxes = [job.join(), job.join(with_progress=False)]
    assert job.watchers == {inboxes[0]}
    assert not book.leave(job, inboxes[0])
    assert not job.watchers


async def test_only_the_last_client_that_leaves_ends_a_request() -> None:
    book, job = admitted()
    inboxes = [job.join(), job.join()]
    assert not book.leave(job, inboxes[0])
    assert book.leave(job, inboxes[1])


async def test_a_cancelled_id_is_free_at_once_though_its_plan_still_runs() -> None:
    book, job = admitted()
    inbox = job.join()
    assert book.withdraw("id") is job
    assert book.withdraw("id") is None
    again = book.admit(SPEC, inputs())
    assert again.key != job.key
    assert book.num_unfinished == 2
    assert not book.leave(job, inbox)  # it has been cancelled already, and must not take the new one with it
    assert book.end(job.key, keep=False) is job
    assert book.find_joinable("id") is again


async def test_a_result_can_be_asked_for_again_for_a_while() -> None:
    book, job = admitted()
    assert book.end(job.key, keep=True) is job
    assert book.end(job.key, keep=True) is None
    assert (book.find_joinable("id"), book.num_unfinished) == (job, 0)
    assert not book.leave(job, job.join())
    await until(lambda: book.find_joinable("id") is None)


async def test_an_error_is_not_kept() -> None:
    book, job = admitted()
    book.end(job.key, keep=False)
    assert book.find_joinable("id") is None


async def test_a_drawn_seed_is_the_same_request_another_seed_or_prompt_is_not() -> None:
    _, job = admitted()
    assert job.is_same(SPEC, inputs(seed=2, seed_drawn=True))
    assert not job.is_same(SPEC, inputs(seed=2))
    assert not job.is_same(SPEC, inputs(prompt="y"))


async def test_another_image_is_another_request_also_when_the_first_has_ended() -> None:
    book = ClientRequests(max_result_age_s=0.05)
    job = book.admit(SPEC, inputs(image=b"one"))
    for _ in range(2):
        assert job.is_same(SPEC, inputs(seed=2, seed_drawn=True, image=b"one"))
        assert not job.is_same(SPEC, inputs(image=b"other"))
        assert not job.is_same(SPEC, replace(inputs(image=b"one"), more_images=(b"two",)))
        assert not job.is_same(SPEC, replace(inputs(image=b"one"), mask=b"one"))
        assert not job.is_same(SPEC, inputs())
        assert book.end(job.key, keep=True) in (job, None)
    assert job.inputs.image is None


async def test_large_results_are_kept_for_less_time_than_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tridentserve.engine.live.client_requests.MAX_KEPT_BYTES", 100)
    book = ClientRequests(max_result_age_s=1000.0)
    sizes = {"a": 60, "b": 30, "c": 20, "d": 0, "e": 101}
    kept = []
    for name, size in sizes.items():
        job = book.admit(replace(SPEC, request_id=name), inputs())
        job.outputs = (bytes(size),) if size else (object(),)
        book.end(job.key, keep=True)
        kept.append("".join(each for each in sizes if book.find_joinable(each) is not None))
    assert kept == ["a", "ab", "bc", "bcd", ""]


def test_images_go_to_the_worker_that_encodes() -> None:
    jobs = {"a": ClientRequest("a", SPEC, inputs(image=b"one")), "b": ClientRequest("b", SPEC, inputs())}
    members = tuple(PlanMember(name) for name in jobs)
    whole = DispatchPlan(1, "model", tuple(Stage), ("w0", "w1"), members, "w0+w1")
    later = DispatchPlan(2, "model", (Stage.DIFFUSE, Stage.DECODE), ("w0",), members)
    assert select_inputs(whole, jobs, "w0") == {"a": inputs(image=b"one"), "b": inputs()}
    assert select_inputs(whole, jobs, "w1") == select_inputs(later, jobs, "w0") == {"a": inputs(), "b": inputs()}
