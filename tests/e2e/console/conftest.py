"""A headless Chromium for the tests of the console; without one they are skipped, and say what is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lib.browser import find_chromium, run_chromium

from tests.e2e.conftest import Service
from tests.support.waiting import until

FOLDER = Path(__file__).parent
PATIENCE_MS = 120_000


@pytest_asyncio.fixture(scope="session")
async def chromium() -> AsyncIterator[Any]:
    """The browser, with a profile of its own that is removed at the end."""
    pytest.importorskip("playwright.async_api", reason="needs `playwright` of the extra `dev`")
    program = find_chromium()
    if program is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    async with run_chromium(program) as browser:
        yield browser


class Console:
    """The page of a service in a browser. `problems` has what the browser complained of, and `addresses` what the page
    asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.addresses: set[str] = set()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: self.addresses.add(request.url))

    async def wait_for(self, condition: str) -> None:
        """Wait until an expression is true. Playwright's own way is forbidden by the page's policy."""
        await until(lambda: self.page.evaluate(condition), condition, every_s=0.05)

    async def fill(self, model: str, **fields: str | int) -> None:
        """Fill the form, and leave empty what is not named."""
        await self.page.select_option("#model", model)
        for name in ("prompt", "size", "steps", "seed", "deadline", "frames", "rate"):
            field = self.page.locator(f"#{name}")
            if await field.is_visible():
                await field.fill(str(fields.get(name, "")))

    async def submit(self) -> Any:
        """Press the button; returns the card of the result."""
        known = await self.page.locator(".result").count()
        await self.page.click("#composer button.primary")
        await self.wait_for(f"document.querySelectorAll('.result').length > {known}")
        return self.page.locator(".result").first


@asynccontextmanager
async def open_console(chromium: Any, url: str) -> AsyncIterator[Console]:
    """The page of the service at this address, in a profile of its own; nothing may be amiss with it at the end."""
    context = await chromium.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    opened = Console(await context.new_page())
    await opened.page.goto(url)
    await opened.page.wait_for_selector("#model option", state="attached")
    yield opened
    await context.close()
    assert not opened.problems
    assert all(address.startswith((url, "blob:")) for address in opened.addresses)


@pytest_asyncio.fixture
async def console(service: Service, chromium: Any) -> AsyncIterator[Console]:
    async with open_console(chromium, service.url) as opened:
        await opened.page.wait_for_selector(".worker")
        yield opened
