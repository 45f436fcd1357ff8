#!/usr/bin/env python3
"""Takes the pictures of docs/console.md: the console in a headless Chromium, over a service of a configuration file.

A request with a preview of what becomes of it, the same with its result and timeline, the map of the cluster while
several requests run, and a result on a telephone. Needs the extra `dev` and Chromium.

Example: python scripts/picture_console.py --seed 3 --folder pictures
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import yaml
from lib.browser import find_chromium, run_chromium
from lib.command_line import Parser, parse_whole_number
from lib.local_service import run_local_service
from PIL import Image

from deployments.config.app import AppArgs

_ROOT = Path(__file__).parent.parent
_PROMPT = "a red circle above a blue square on a white background"
# What the map shows: a client for each of these sizes and numbers of steps.
_CROWD = (("256x256", 28), ("128x128", 28), ("192x192", 20), ("256x256", 28), ("128x128", 14))
# The map's past fills with what they ask for.
_PAST_S = 25.0
# By then it is known how long a request takes, and the previews of the model are prepared.
_WARM_UPS = 3
_WIDE, _NARROW = (1180, 900), (390, 844)
_MARGIN_PX = 16
# By then a preview shows what it will be.
_PREVIEW_SHARE = 0.4
_PATIENCE_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    program = find_chromium()
    if program is None:
        print("picture_console: needs Chromium (apt-get install chromium)", file=sys.stderr)
        return 1
    (app,) = yaml.safe_load(options.config.read_text(encoding="utf-8"))["applications"]
    options.folder.mkdir(parents=True, exist_ok=True)
    with nullcontext(options.url) if options.url else run_local_service(AppArgs.model_validate(app["args"])) as url:
        asyncio.run(_take_all(program, url, options))
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="picture_console", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config",
        type=Path,
        default=_ROOT / "deployments" / "quickstart.yaml",
        help="the service, whose first model draws (default deployments/quickstart.yaml)",
    )
    parser.add_argument("--url", help="a service that runs already; without it one is started")
    parser.add_argument("--prompt", default=_PROMPT, help="what to draw (default %(default)r)")
    parser.add_argument("--seed", type=parse_whole_number, default=1, help="of the images (default %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=_ROOT / "docs" / "images", help="where to write them (default docs/images)"
    )
    return parser.parse_args(argv)


async def _take_all(program: str, url: str, options: argparse.Namespace) -> None:
    async with run_chromium(program) as browser:
        async with _open(browser, url, _WIDE, "light") as page:
            for _ in range(_WARM_UPS):
                await _open_fresh(page, url)
                await _submit(page, options)
                await page.wait_for_function("document.querySelector('.result img')")
            await _open_fresh(page, url)
            await page.click("#more > summary")
            await _submit(page, options)
            await page.wait_for_function(
                f"{_STEP} >= {_PREVIEW_SHARE} * document.querySelector('.result progress').max"
            )
            await _take(page, options.folder / "console-preview.png", "header.top", ".result")
            await page.wait_for_function("document.querySelector('.result dl')")
            await page.click("#more > summary")
            await _take(page, options.folder / "console-generate.png", "header.top", ".result")
        async with _open(browser, url, _WIDE, "dark") as page, _crowd(url, options):
            await page.wait_for_function(_IS_BUSY)
            await asyncio.sleep(_PAST_S)
            await _take(page, options.folder / "console-cluster.png", "#cluster-title", "#request-list")
        async with _open(browser, url, _NARROW, "dark") as page:
            await _submit(page, options)
            await page.wait_for_function("document.querySelector('.result dl')")
            await _take(page, options.folder / "console-phone.png", ".result", ".result")


# Several plans run, and something waits.
_IS_BUSY = (
    "document.querySelectorAll('.bar.plan').length > 1 "
    "&& document.querySelectorAll('#request-list tbody tr').length > 3"
)
# The step of the latest preview.
_STEP = "Number(document.querySelector('.result canvas.preview')?.dataset.step ?? 0)"


@asynccontextmanager
async def _open(browser: Any, url: str, size: tuple[int, int], scheme: str) -> AsyncIterator[Any]:
    """A page of this size in a profile of its own, with the live state of the cluster."""
    viewport = {"width": size[0], "height": size[1]}
    # The page's policy forbids Playwright's way to wait for something.
    context = await browser.new_context(viewport=viewport, color_scheme=scheme, locale="en-GB", bypass_csp=True)
    page = await context.new_page()
    page.set_default_timeout(1000 * _PATIENCE_S)
    await _open_fresh(page, url)
    try:
        yield page
    finally:
        await context.close()


async def _open_fresh(page: Any, url: str) -> None:
    await page.goto(f"{url}/")
    await page.wait_for_selector(".worker")
    await page.wait_for_selector("#model option", state="attached")


async def _submit(page: Any, options: argparse.Namespace) -> None:
    await page.fill("#prompt", options.prompt)
    await page.fill("#seed", str(options.seed))
    await page.locator("#prompt").focus()
    await page.wait_for_function("document.getElementById('quote').textContent")
    await page.click("#composer button.primary")


async def _take(page: Any, path: Path, first: str, last: str) -> None:
    """The picture of a page from the top of one element to the bottom of another, over the whole width."""
    top, bottom = [await page.locator(at).first.bounding_box() for at in (first, last)]
    offset = await page.evaluate("window.scrollY")
    start = max(0, top["y"] + offset - _MARGIN_PX)
    end = bottom["y"] + bottom["height"] + offset + _MARGIN_PX
    clip = {"x": 0, "y": start, "width": page.viewport_size["width"], "height": end - start}
    image = Image.open(io.BytesIO(await page.screenshot(full_page=True, clip=clip)))
    # No palette: it would change the colours that are rare, which mean something here.
    image.convert("RGB").save(path, optimize=True)
    print(f"{path}: {image.width} x {image.height}", flush=True)


@asynccontextmanager
async def _crowd(url: str, options: argparse.Namespace) -> AsyncIterator[None]:
    """Clients that ask for one image after another, each of its size, until the block ends."""
    async with httpx.AsyncClient(timeout=_PATIENCE_S, trust_env=False) as client, asyncio.TaskGroup() as tasks:

        async def ask(size: str, steps: int) -> None:
            body = {"prompt": options.prompt, "size": size, "num_inference_steps": steps}
            while True:
                (await client.post(f"{url}/v1/images/generations", json=body)).raise_for_status()

        asking = [tasks.create_task(ask(*wish)) for wish in _CROWD]
        try:
            yield
        finally:
            for task in asking:
                task.cancel()


if __name__ == "__main__":
    sys.exit(main())
