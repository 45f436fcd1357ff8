"""A headless Chromium of the system, for the tests of the console and its pictures."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

# It asks nobody for updates, and keeps to this machine.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_chromium() -> str | None:
    """The program, or None where there is none (`apt-get install chromium`)."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@asynccontextmanager
async def run_chromium(program: str) -> AsyncIterator[Any]:
    """Playwright's browser, with a profile of its own that is removed at the end."""
    # Only this needs the extra `dev`.
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=program, args=list(_FLAGS))
        try:
            yield browser
        finally:
            await browser.close()
