"""The console's page and its live events over HTTP, without Ray; and the types of its modules."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.console.cluster_feed import MAX_EVENTS_PER_S, ClusterFeed
from deployments.console.cluster_watch import ClusterWatch
from tests.deployments.clients import open_client, served
from tests.deployments.fake_backend import FakeBackend
from tests.support.processes import run
from tests.support.waiting import until
from tridentserve.errors import WorkerError
from tridentserve.scheduling.watching.cluster_state import ClusterState, EndedStage, WatchedWorker

ROOT = Path(__file__).parents[3]
FILES = ROOT / "deployments" / "console" / "static"
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
WORKER = WatchedWorker("n0w0", "n0", True, "tiny-sd3:EDC")
STATE = ClusterState(now_s=1000.0, workers=(WORKER,), cursor=(0,))


def make_stage(number: int, end_s: float = 999.0) -> EndedStage:
    return EndedStage(number, number, "tiny-sd3", "D", ("n0w0",), ("r",), end_s - 1, end_s, 4)


async def test_browsers_get_a_page_and_others_json() -> None:
    async with open_client(FakeBackend()) as http:
        page, about = await http.get("/", headers=HTML), await http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert about.json()["name"] == "TridentServe"
    assert {page.headers["vary"], about.headers["vary"]} == {"Accept"}


async def test_the_page_runs_its_own_files_only_and_all_are_there() -> None:
    async with open_client(FakeBackend()) as http:
        page = await http.get("/", headers=HTML)
        named = set(re.findall(r'(?:src|href)="(/console/[^"]+)"', page.text))
        assert len(named) == 3
        for path in sorted(named | {f"/console/{file.name}" for file in FILES.glob("*.js")}):
            answer = await http.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == page.headers["content-security-policy"]
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.findall(r"<script(?![^>]* src=)|<style| style=| on\w+=", page.text)
    for file in FILES.glob("*.js"):
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text()), file
        assert not re.findall(r"https?://", file.read_text()), file


@pytest.mark.parametrize(
    "path", ["/console/none.js", "/console/", "/console/../jsconfig.json", "/console/%2e%2e/__init__.py"]
)
async def test_no_other_file_is_given_away(path: str) -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_the_types_of_the_modules_are_right() -> None:
    checker = ROOT / "tests" / "e2e" / "console" / "node_modules" / "typescript" / "bin" / "tsc"
    if shutil.which("node") is None or not checker.exists():
        pytest.skip("needs node, and `npm ci --prefix tests/e2e/console` (make test does both where npm is installed)")
    ended = run(["node", str(checker), "-p", str(ROOT / "deployments" / "console" / "jsconfig.json")], ROOT)
    assert ended.returncode == 0, ended.stdout


# The live events.


class Reader:
    """The events of one console."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def read(self) -> tuple[str, dict[str, Any]]:
        name = await self._read_line("event: ")
        return name, json.loads(await self._read_line("data: "))

    async def _read_line(self, begin: str) -> str:
        async for line in self._lines:
            if line.startswith(begin):
                return line.removeprefix(begin)
        raise AssertionError("the stream has ended")


@asynccontextmanager
async def opened(port: int) -> AsyncIterator[Reader]:
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http,
        http.stream("GET", "/v1/cluster/events") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Reader(answer.aiter_lines())


async def test_consoles_share_one_source_and_nobody_asks_when_all_have_left() -> None:
    backend = FakeBackend(cluster=replace(STATE, ended=(make_stage(1),), cursor=(1,)))
    async with served(backend) as port:
        async with opened(port) as first, opened(port) as second:
            for reader in (first, second):
                name, state = await reader.read()
                assert (name, [stage["number"] for stage in state["ended"]]) == ("state", [1])
            backend.cluster = replace(STATE, now_s=1001.0, ended=(make_stage(2),), cursor=(2,))
            for reader in (first, second):
                name, state = await reader.read()
                assert (name, [stage["number"] for stage in state["ended"]]) == ("change", [2])
            async with opened(port) as late:
                name, state = await late.read()
                assert (name, [stage["number"] for stage in state["ended"]]) == ("state", [1, 2])
            asked = backend.num_described
            await until(lambda: backend.num_described > asked)
        await until(lambda: _is_quiet(backend))


def _is_quiet(backend: FakeBackend) -> bool:
    return not [task for task in asyncio.all_tasks() if "ClusterFeed._ask" in str(task.get_coro())]


async def test_a_lost_scheduler_is_told_and_its_return_too() -> None:
    backend = FakeBackend(cluster=WorkerError("the scheduler is starting"))
    async with served(backend) as port, opened(port) as reader:
        assert await reader.read() == ("unavailable", {"message": "the scheduler is starting"})
        backend.cluster = STATE
        while (event := await reader.read())[0] == "unavailable":
            pass
        assert event[0] == "state"


async def test_a_state_that_has_not_changed_is_not_sent_again() -> None:
    num_asked = 0

    async def describe(_: tuple[int, ...]) -> ClusterState:
        nonlocal num_asked
        num_asked += 1
        return replace(STATE, now_s=1000.0 + num_asked)

    feed = ClusterFeed(describe, heartbeat_s=60.0, period_s=0.001)
    events = feed.watch()
    assert (await anext(events)).startswith(b"event: state")
    waiting = asyncio.ensure_future(anext(events))
    await until(lambda: num_asked > 20)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_slow_console_gets_the_whole_state_again() -> None:
    states = iter(range(1, 1000))

    async def describe(cursor: tuple[int, ...]) -> ClusterState:
        number = next(states)
        return replace(STATE, now_s=1000.0 + number, ended=(make_stage(number, 1000.0 + number),), cursor=(number,))

    feed = ClusterFeed(describe, heartbeat_s=60.0, period_s=0.001)
    quick, slow = feed.watch(), feed.watch()
    assert (await anext(slow)).startswith(b"event: state")
    last = 0
    for _ in range(20):
        last = max(last, *(stage["number"] for stage in _read(await anext(quick))["ended"]))
    message = await anext(slow)
    assert message.startswith(b"event: state")
    numbers = [stage["number"] for stage in _read(message)["ended"]]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert numbers[-1] >= last - 1


def _read(message: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(message.decode().partition("data: ")[2])
    return found


@pytest.mark.parametrize("count", [1, 10, 200, 2000])
async def test_many_consoles_get_fewer_events_each(count: int) -> None:
    async def describe(_: tuple[int, ...]) -> ClusterState:
        return STATE

    feed = ClusterFeed(describe, heartbeat_s=60.0)
    consoles = [feed.watch() for _ in range(count)]
    await asyncio.gather(*(anext(console) for console in consoles))
    pause_s = feed._choose_pause()
    assert pause_s >= 1
    assert count / pause_s <= MAX_EVENTS_PER_S


async def test_consoles_that_come_while_it_pauses_make_the_pause_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def describe(cursor: tuple[int, ...]) -> ClusterState:
        nonlocal asked
        asked += 1
        return replace(STATE, now_s=STATE.now_s + asked)

    feed = ClusterFeed(describe, heartbeat_s=60.0, period_s=0.1)
    first, second = feed.watch(), feed.watch()
    await anext(first)
    monkeypatch.setattr("deployments.console.cluster_feed.MAX_EVENTS_PER_S", 1e-3)
    await anext(second)
    await asyncio.sleep(0.5)
    assert asked == 1


async def test_the_scheduler_is_asked_once_for_all_who_ask_at_a_time() -> None:
    num_asked = 0

    async def fetch() -> ClusterState:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(0)
        return replace(STATE, ended=tuple(make_stage(number) for number in (1, 2, 3)), cursor=(3,))

    watch = ClusterWatch(fetch, period_s=3600.0)
    answers = await asyncio.gather(*(watch.describe(after) for after in (0, 1, 3, 7)))
    assert num_asked == 1
    # A number that this scheduler has not reached is that of one before it.
    assert [[stage.number for stage in answer.ended] for answer in answers] == [[1, 2, 3], [2, 3], [], [1, 2, 3]]
