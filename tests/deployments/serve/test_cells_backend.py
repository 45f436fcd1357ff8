"""Requests over several cells: the best one gets each, a lost one loses nothing, an id is found where it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from deployments.backend import wait_for_result
from deployments.schemas.image import build_image_request
from deployments.serve import cells_backend
from deployments.serve.cell_health import combine_health
from deployments.serve.cells_backend import CellsBackend, choose_backend, make_estimate
from deployments.serve.remote_backend import RemoteBackend
from tests.deployments.fake_backend import MODELS, FakeBackend
from tests.deployments.serve.fake_scheduler import FakeHandle
from tests.deployments.serve.two_cells import make_two_cells
from tests.support.waiting import until
from tridentserve.cells.summary import CellModelLoad, CellSummary
from tridentserve.engine.live.updates import CompletedUpdate, ProgressUpdate, QueuedUpdate
from tridentserve.errors import LoraExistsError, OverloadedError, RequestNotFoundError, UnknownModelError, WorkerError
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling.estimation.request_work import RequestWork
from tridentserve.scheduling.watching.cluster_state import ClusterState, WatchedWorker

Request = tuple[RequestSpec, GenerationInputs]

pytestmark = pytest.mark.usefixtures("close_channels")


def make_request(request_id: str | None = None, steps: int = 2) -> Request:
    body = {"prompt": "a cat", "size": "64x32", "num_inference_steps": steps, "seed": 1, "request_id": request_id}
    return build_image_request(body, MODELS)


def load(idle: int = 1, work_s: float = 0.0) -> CellSummary:
    return CellSummary({"tiny-sd3": CellModelLoad(4, idle, work_s)})


class Cells:
    """Cells that can be lost, and the backend over them."""

    def __init__(self, count: int = 2, max_losses: int = 2) -> None:
        self.fakes = [FakeBackend() for _ in range(count)]
        self.handles = [FakeHandle(fake) for fake in self.fakes]
        for handle in self.handles:
            handle.service.summary = load()
        remotes = [RemoteBackend(handle) for handle in self.handles]
        self.backend = CellsBackend(remotes, lambda spec: RequestWork(1, 1.0, 1.0), max_losses, num_workers=4 * count)

    def lose(self, number: int) -> None:
        """The cell's process ends; nobody answers in its place."""
        handle = self.handles[number]
        assert handle.listener is not None
        handle.refuse = WorkerError("the service is starting")
        handle.listener.close()

    def restore(self, number: int) -> None:
        """It is back, with nothing of what it had."""
        self.handles[number].refuse = self.handles[number].listener = None

    async def wait_until_known(self) -> None:
        """All cells have told their loads."""
        await self.backend.get_health()
        await until(lambda: len(self.backend._router._cells) == len(self.fakes))


@pytest.fixture
async def cells(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cells]:
    monkeypatch.setattr(cells_backend, "_PAUSE_S", 0.02)
    monkeypatch.setattr(cells_backend, "SUMMARY_PERIOD_S", 0.02)
    made = Cells()
    yield made
    await made.backend.close()


async def test_a_request_goes_to_the_cell_with_least_work(cells: Cells) -> None:
    cells.handles[0].service.summary = load(idle=0, work_s=5.0)
    await cells.wait_until_known()
    assert isinstance(await wait_for_result(cells.backend.generate(*make_request())), CompletedUpdate)
    assert [len(fake.seen) for fake in cells.fakes] == [0, 1]
    cells.handles[0].service.summary, cells.handles[1].service.summary = load(), load(idle=0, work_s=5.0)
    await until(lambda: cells.backend._router._cells[1].summary == load(idle=0, work_s=5.0))
    await until(lambda: cells.backend._router._cells[0].summary == load())
    await wait_for_result(cells.backend.generate(*make_request()))
    assert [len(fake.seen) for fake in cells.fakes] == [1, 1]


async def test_a_request_that_comes_before_all_loads_waits_for_them(cells: Cells) -> None:
    assert isinstance(await wait_for_result(cells.backend.generate(*make_request())), CompletedUpdate)


async def test_a_model_that_no_cell_serves_is_refused_after_a_while(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells_backend, "_PATIENCE_S", 0.2)
    for handle in cells.handles:
        handle.service.summary = CellSummary({})
    with pytest.raises(OverloadedError, match="no cell serves tiny-sd3"):
        await wait_for_result(cells.backend.generate(*make_request()))


@pytest.mark.parametrize("with_progress", [True, False])
async def test_the_request_of_a_lost_cell_is_made_in_another(cells: Cells, with_progress: bool) -> None:
    cells.fakes[0].allowed_steps = 1
    cells.handles[1].service.summary = load(idle=0, work_s=9.0)
    await cells.wait_until_known()
    spec, inputs = make_request()
    updates: list[Any] = []

    async def collect() -> None:
        updates.extend([update async for update in cells.backend.generate(spec, inputs, with_progress)])

    waiting = asyncio.create_task(collect())
    await until(lambda: cells.fakes[0].allowed_steps == 0)
    cells.lose(0)
    await waiting
    completed = updates[-1]
    assert isinstance(completed, CompletedUpdate)
    assert completed.retries == 1
    assert [found.request_id for found, _ in cells.fakes[1].seen] == [spec.request_id]
    assert cells.fakes[1].seen[0][0].waited_s > 0, "its deadline counts from its arrival"
    if with_progress:
        steps = [ProgressUpdate(spec.request_id, step, 2) for step in (1, 1, 2)]
        assert updates[:-1] == [QueuedUpdate(spec.request_id), *steps]


async def test_a_cell_that_comes_back_gets_requests_again(cells: Cells) -> None:
    await cells.wait_until_known()
    cells.lose(0)
    await until(lambda: 0 in cells.backend._lost)
    for _ in range(3):
        await wait_for_result(cells.backend.generate(*make_request()))
    assert [len(fake.seen) for fake in cells.fakes] == [0, 3]
    cells.handles[1].service.summary = load(idle=0, work_s=9.0)
    cells.restore(0)
    await cells.wait_until_known()
    await until(lambda: cells.backend._router._cells[1].summary == load(idle=0, work_s=9.0))
    await wait_for_result(cells.backend.generate(*make_request()))
    assert len(cells.fakes[0].seen) == 1


async def test_a_cell_whose_load_cannot_be_told_for_any_reason_is_asked_again(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cells.wait_until_known()

    async def fail() -> CellSummary:
        raise ZeroDivisionError("nobody expects it")

    with monkeypatch.context() as patch:
        patch.setattr(cells.backend._cells[0], "summarize_load", fail)
        await until(lambda: 0 in cells.backend._lost)
    await cells.wait_until_known()
    assert cells.backend._lost == set()


async def test_the_live_state_is_that_of_all_cells_that_answer(cells: Cells) -> None:
    for number, fake in enumerate(cells.fakes):
        worker = WatchedWorker(f"n{number}w0", f"n{number}", True, "tiny-sd3:EDC")
        fake.cluster = ClusterState(1000.0, (worker,), num_requests=1, cursor=(number + 5,))
    await cells.wait_until_known()
    both = await cells.backend.describe_cluster(())
    assert ([worker.node_id for worker in both.workers], both.num_requests, both.cursor) == (["n0", "n1"], 2, (5, 6))
    cells.lose(0)
    await until(lambda: 0 in cells.backend._lost)
    one = await cells.backend.describe_cluster(both.cursor)
    assert ([worker.node_id for worker in one.workers], one.cursor) == (["n1"], (5, 6))
    cells.lose(1)
    await until(lambda: len(cells.backend._lost) == 2)
    with pytest.raises(WorkerError, match="no scheduler answers"):
        await cells.backend.describe_cluster(one.cursor)


async def test_the_cell_that_had_a_request_explains_it(cells: Cells) -> None:
    await cells.wait_until_known()
    await wait_for_result(cells.backend.generate(*make_request("mine")))
    assert sum(len(fake.seen) for fake in cells.fakes) == 1
    assert (await cells.backend.explain("mine"))["id"] == "mine"
    with pytest.raises(RequestNotFoundError):
        await cells.backend.explain("another")
    (had,) = (number for number, fake in enumerate(cells.fakes) if fake.seen)
    cells.lose(1 - had)
    assert (await cells.backend.explain("mine"))["id"] == "mine"
    with pytest.raises(WorkerError):
        await cells.backend.explain("another")


async def test_a_request_under_which_too_many_cells_are_lost_fails(cells: Cells) -> None:
    cells.backend._max_losses = 0
    for fake in cells.fakes:
        fake.allowed_steps = 0
    waiting = asyncio.create_task(wait_for_result(cells.backend.generate(*make_request())))
    await until(lambda: any(fake.running for fake in cells.fakes))
    cells.lose(0 if cells.fakes[0].running else 1)
    with pytest.raises(WorkerError, match="not available at the moment"):
        await waiting


async def test_an_id_of_a_client_is_found_in_the_cell_that_has_it(cells: Cells) -> None:
    cells.fakes[0].allowed_steps = 0
    cells.handles[1].service.summary = load(idle=0, work_s=9.0)
    await cells.wait_until_known()
    first = asyncio.create_task(wait_for_result(cells.backend.generate(*make_request("mine"))))
    await until(lambda: "mine" in cells.fakes[0].running)
    # Through another replica, to which the other cell looks better.
    cells.handles[0].service.summary, cells.handles[1].service.summary = load(idle=0, work_s=9.0), load(idle=4)
    other = CellsBackend(cells.backend._cells, lambda spec: RequestWork(1, 1.0, 1.0), 2, 8)
    again = asyncio.create_task(wait_for_result(other.generate(*make_request("mine"))))
    await until(lambda: len(cells.fakes[0].seen) == 2)
    assert cells.fakes[1].seen == []
    assert await other.cancel("mine")
    assert not await other.cancel("another")
    cells.fakes[0].allowed_steps = 9
    await asyncio.gather(first, again, return_exceptions=True)
    await other.close()


async def test_an_id_that_comes_twice_at_once_is_in_one_cell(cells: Cells) -> None:
    await cells.wait_until_known()
    for handle in cells.handles:
        handle.service.summary = load(idle=1)  # taken by the first: the second would go to the other cell
    both = (wait_for_result(cells.backend.generate(*make_request("mine"))) for _ in range(2))
    await asyncio.gather(*both)
    assert sorted(len(fake.seen) for fake in cells.fakes) == [0, 2]
    assert cells.backend._open == {}


async def test_a_lost_cell_delays_neither_a_cancel_nor_the_health(cells: Cells) -> None:
    await cells.wait_until_known()
    assert (await cells.backend.get_health())["status"] == "ready"
    cells.lose(1)
    await until(lambda: 1 in cells.backend._lost)
    asked = len(cells.handles[1].channels)
    assert not await cells.backend.cancel("unknown")
    health = await cells.backend.get_health()
    assert (health["status"], health["workers"], health["workers_total"]) == ("degraded", 4, 8)
    assert health["cells"] == [{"status": "ready", "workers": 4}, {"status": "unavailable", "workers": 0}]
    assert len(cells.handles[1].channels) == asked


def test_one_cell_is_asked_without_anything_in_between() -> None:
    args = make_two_cells()
    only = RemoteBackend(object())
    assert choose_backend([only], args) is only
    both = choose_backend([only, only], args)
    assert isinstance(both, CellsBackend)


def test_work_is_estimated_by_the_profiles() -> None:
    estimate = make_estimate(make_two_cells())
    spec = replace(make_request(steps=4)[0], shape=Shape(64, 64))
    assert estimate(spec).seconds > estimate(replace(spec, num_inference_steps=2)).seconds > 0
    assert estimate(replace(spec, model="added-since")) == RequestWork(1, 0.0, 0.0)


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (["ready", "ready"], "ready"),
        (["ready", "starting"], "degraded"),
        (["degraded", None], "degraded"),
        (["starting", None], "starting"),
        ([None, None], "unavailable"),
    ],
)
def test_the_health_of_all_cells(states: list[str | None], status: str) -> None:
    cells = [
        {"status": state, "workers": 2, "placement": {f"c{number}n0w0": "EDC"}, "models": {"a": "loading"}}
        if state is not None
        else {}
        for number, state in enumerate(states)
    ]
    if cells[0]:
        cells[0] |= {
            "models": {"a": "serving", "b": "draining"},
            "problems": ["models: no"],
            "aside": {"c0n0w0": "why"},
        }
        cells[1] |= {"problems": ["models: no"]} if cells[1] else {}
    health = combine_health(cells, num_workers=5)
    assert (health["status"], health["workers_total"]) == (status, 5)
    assert health["workers"] == 2 * sum(state is not None for state in states)
    assert len(health["placement"]) == sum(state is not None for state in states)
    assert health["problems"] == (["models: no"] if cells[0] else [])
    assert health["models"] == ({"a": "serving", "b": "draining"} if cells[0] else {})
    assert health.get("aside") == ({"c0n0w0": "why"} if cells[0] else None)


async def test_a_lora_is_in_all_cells_that_serve_its_model_or_in_none() -> None:
    cells = Cells(3)
    cells.handles[1].refuse = UnknownModelError("model: this model is not served")
    added = await cells.backend.add_lora("tiny-sd3", "chalk", "/loras/chalk.safetensors")
    assert added.name == "chalk"
    assert [list(fake.loras) for fake in cells.fakes] == [[("tiny-sd3", "chalk")], [], [("tiny-sd3", "chalk")]]
    await cells.backend.remove_lora("tiny-sd3", "chalk")
    cells.handles[1].refuse = LoraExistsError("the model has a LoRA of this name")
    with pytest.raises(LoraExistsError):
        await cells.backend.add_lora("tiny-sd3", "chalk", "/loras/chalk.safetensors")
    assert [fake.loras for fake in cells.fakes] == [{}, {}, {}]
    for handle in cells.handles:
        handle.refuse = UnknownModelError("model: this model is not served")
    with pytest.raises(UnknownModelError):
        await cells.backend.add_lora("none", "chalk", "/loras/chalk.safetensors")
