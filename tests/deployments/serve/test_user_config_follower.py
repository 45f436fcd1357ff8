"""The cells come to the `user_config` of the first one, which may be absent for a while."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.serve import user_config_follower
from deployments.serve.user_config_follower import UserConfigFollower
from tests.support.waiting import until


class FirstCell:
    """In place of the handle of the first cell's deployment."""

    def __init__(self) -> None:
        self.user_config: Any = {}
        self.error: Exception | None = None
        self.is_silent = False
        self.asked = 0
        self.get_user_config = SimpleNamespace(remote=self._answer)

    async def _answer(self) -> Any:
        self.asked += 1
        if self.is_silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.user_config


@pytest.fixture(autouse=True)
def _short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_config_follower, "_PERIOD_S", 0.01)
    monkeypatch.setattr(user_config_follower, "_TIMEOUT_S", 0.1)


async def test_a_change_is_told_once_and_an_absent_cell_changes_nothing() -> None:
    first, told = FirstCell(), list[Any]()
    follower = UserConfigFollower(first)
    follower.follow({}, told.append)
    await until(lambda: first.asked > 3)
    assert told == []
    first.user_config = {"drain_timeout_s": 1}
    await until(lambda: told == [{"drain_timeout_s": 1}])
    first.error = RuntimeError("the actor died")
    before = first.asked
    await until(lambda: first.asked > before + 3)
    first.error = None
    before = first.asked
    await until(lambda: first.asked > before + 3)
    assert told == [{"drain_timeout_s": 1}]
    follower.stop()


async def test_a_start_does_not_wait_for_a_first_cell_that_starts_itself() -> None:
    first = FirstCell()
    follower = UserConfigFollower(first)
    assert await follower.fetch({"mine": 1}) == {}
    first.is_silent = True
    assert await follower.fetch({"mine": 1}) == {"mine": 1}
