"""Who may join which request, and what becomes of it when clients leave."""

from __future__ import annotations

import asyncio

from tridentserve.engine.live.jobs import Job, JobBook
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

SPEC = RequestSpec("id", "model", Shape(64, 64), 4)


def inputs(seed: int = 1, prompt: str = "x") -> GenerationInputs:
    return GenerationInputs(prompt, SPEC.shape, 4, 5.0, seed)


def admitted() -> tuple[JobBook, Job]:
    book = JobBook(max_result_age_s=0.05)
    return book, book.admit(SPEC, inputs())


async def test_clients_join_and_begin_with_the_latest_update() -> None:
    book, job = admitted()
    job.tell({"type": "queued"})
    first = job.join()
    job.tell({"type": "progress"})
    second = job.join()
    assert book.joinable("id") is job
    assert [first.get_nowait()["type"], first.get_nowait()["type"]] == ["queued", "progress"]
    assert second.get_nowait()["type"] == "progress"


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
    assert book.joinable("id") is again


async def test_a_result_can_be_asked_for_again_for_a_while() -> None:
    book, job = admitted()
    assert book.end(job.key, keep=True) is job
    assert book.end(job.key, keep=True) is None
    assert (book.joinable("id"), book.num_unfinished) == (job, 0)
    assert not book.leave(job, job.join())
    await asyncio.sleep(0.1)
    assert book.joinable("id") is None


async def test_an_error_is_not_kept() -> None:
    book, job = admitted()
    book.end(job.key, keep=False)
    assert book.joinable("id") is None


async def test_another_seed_is_the_same_request_another_prompt_is_not() -> None:
    _, job = admitted()
    assert job.is_same(SPEC, inputs(seed=2))
    assert not job.is_same(SPEC, inputs(prompt="y"))
