"""The console in a browser, over a whole service: generate, watch, cancel, see the map move."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.conftest import Service, decode_image
from tests.e2e.console.conftest import FOLDER, Console
from tests.support import http
from tests.support.waiting import until

AXE = FOLDER / "node_modules" / "axe-core" / "axe.min.js"
# Far more steps than a test waits for.
ENDLESS = 1000


async def test_an_image_is_generated_with_progress_and_its_timeline(
    service: Service, console: Console, tmp_path: Path
) -> None:
    await console.fill("tiny-sd3", prompt="<b>a red fox</b>", size="512x512", steps=24, seed=7)
    card = await console.submit()
    await card.locator("p", has_text=re.compile(r"^step \d+ of 24")).wait_for()
    picture = card.locator("img")
    await picture.wait_for()
    # What a user writes is text, not markup.
    assert await card.locator("h3").inner_text() == "<b>a red fox</b>"
    rows = await card.locator(".timeline li").all_inner_texts()
    assert [letter for letter in "EDC" if any(row.startswith(letter) for row in rows)] == ["E", "D", "C"]
    assert any("24 steps" in row for row in rows)
    async with console.page.expect_download() as download:
        await card.locator("a", has_text="Save the image").click()
    await (await download.value).save_as(tmp_path / "fox.png")
    asked = service.generate(
        model="tiny-sd3", prompt="<b>a red fox</b>", size="512x512", num_inference_steps=24, seed=7
    )
    saved = np.asarray(Image.open(tmp_path / "fox.png"))
    assert np.array_equal(saved, decode_image(asked["data"][0]["b64_json"]))


async def test_a_preview_is_in_the_place_of_the_image_until_it_comes(console: Console) -> None:
    await console.fill("tiny-sd3", prompt="a red fox", size="512x512", steps=60)
    card = await console.submit()
    await card.locator("canvas.preview").wait_for()
    assert await card.locator("canvas.preview").evaluate("canvas => [canvas.width, canvas.height]") == [64, 64]
    assert await card.locator(".blank").is_hidden()
    await card.locator("img").wait_for()
    assert await card.locator("canvas.preview").count() == 0


async def test_a_cancelled_request_keeps_no_preview(console: Console) -> None:
    await console.fill("tiny-flux", prompt="a lighthouse", size="256x256", steps=ENDLESS)
    card = await console.submit()
    await card.locator("canvas.preview").wait_for()
    await card.locator("button", has_text="Cancel").click()
    await card.locator(".blank", has_text="cancelled").wait_for()
    assert await card.locator("canvas.preview").count() == 0


async def test_the_map_shows_what_runs_and_moves(console: Console) -> None:
    await console.fill("tiny-flux", prompt="a lighthouse", size="256x256", steps=ENDLESS)
    card = await console.submit()
    bar = console.page.locator(".track .bar.plan").first
    await bar.wait_for()
    left_px = (await bar.bounding_box())["x"]
    await until(lambda: _has_moved(console, left_px), "the first bar moves to the left")
    busy = await console.page.locator(".worker .now-text", has_text=re.compile(r"(left|overdue)")).count()
    assert busy >= 1
    queue = await console.page.locator("#queue").inner_text()
    assert "tiny-flux 256x256" in queue
    # Cancelled in the list of all requests, which the card of the request hears of.
    await console.page.locator("#request-list button", has_text="Cancel").click()
    await card.locator("p", has_text=re.compile(r"^cancelled$")).wait_for()
    await console.page.locator("#request-list", has_text="Nothing waits and nothing runs.").wait_for()


async def _has_moved(console: Console, left_px: float) -> bool:
    box = await console.page.locator(".track .bar").first.bounding_box()
    return box is not None and box["x"] < left_px - 5


async def test_a_card_cancels_its_own_request(console: Console, service: Service) -> None:
    await console.fill("tiny-flux", prompt="a lighthouse", size="256x256", steps=ENDLESS)
    card = await console.submit()
    await card.locator("p", has_text=re.compile(r"^step \d+")).wait_for()
    request_id = await card.get_attribute("data-request")
    await card.locator("button", has_text="Cancel").click()
    await card.locator("p", has_text=re.compile(r"^cancelled$")).wait_for()
    assert http.delete(f"{service.url}/v1/requests/{request_id}").status_code == 404


async def test_errors_of_the_service_are_shown_in_words(console: Console) -> None:
    await console.fill("tiny-sd3", prompt="a red fox", size="513x512")
    card = await console.submit()
    problem = card.locator(".problem")
    await problem.wait_for()
    assert "size" in await problem.inner_text()
    console.problems = [text for text in console.problems if "422" not in text]  # the browser's own line


async def test_a_request_that_would_be_late_is_foretold_and_refused_in_plain_words(console: Console) -> None:
    page = console.page
    await page.click("#more > summary")
    await page.select_option("#on-late", "refuse")
    await console.fill("tiny-flux", prompt="a lighthouse", size="256x256", steps=ENDLESS, deadline="0.1")
    await page.locator("#prompt").focus()
    await page.locator(
        "#quote", has_text=re.compile(r"^Would be refused: ready in about .* after its deadline\.$")
    ).wait_for()
    card = await console.submit()
    await card.locator(".blank", has_text="refused").wait_for()
    words = await card.locator(".problem").inner_text()
    assert re.match(r"Refused: it would be ready in about .* s, after its deadline\. Nothing was computed\.", words)
    console.problems = [text for text in console.problems if "503" not in text]  # the browser's own line


async def test_a_video_is_a_job_that_plays_in_place_and_is_removed(console: Console) -> None:
    await console.fill("tiny-wan", prompt="a film", size="64x64", steps=2, frames=5, rate=10)
    card = await console.submit()
    await card.locator("video").wait_for()
    await console.wait_for("document.querySelector('.result video').videoWidth === 64")
    await console.wait_for("Math.abs(document.querySelector('.result video').duration - 0.5) < 0.01")
    job = console.page.locator("#video-list li", has_text="a film").first
    await job.locator("button", has_text="Play").click()
    await console.wait_for("document.querySelector('#video-list video').readyState >= 2")
    await job.locator("button", has_text="Remove").click()
    await job.wait_for(state="detached")


async def test_the_keyboard_is_enough(console: Console) -> None:
    page = console.page
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to the prompt"
    await page.keyboard.press("Enter")
    await page.locator("#prompt").focus()
    await page.keyboard.type("a red fox")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.id") == "model"
    await page.keyboard.press("Tab")
    await page.keyboard.type("64x64")
    await page.keyboard.press("Tab")
    await page.keyboard.type("2")
    await page.locator("#more > summary").focus()
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.id") == "guidance"
    await page.locator("#prompt").focus()
    await page.keyboard.press("Control+Enter")
    await page.locator(".result img, .result .problem").first.wait_for()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
async def test_nothing_serious_stands_in_the_way_of_any_reader(console: Console, scheme: str, width: int) -> None:
    if not AXE.exists():
        pytest.skip("needs axe-core: `npm ci --prefix tests/e2e/console` (make test does so where npm is installed)")
    page: Any = console.page
    await page.emulate_media(color_scheme=scheme)
    await page.set_viewport_size({"width": width, "height": 844})
    await page.click("#more > summary")
    await console.fill("tiny-sd3", prompt="a red fox", size="64x64", steps=2)
    card = await console.submit()
    await card.locator("img, .problem").first.wait_for()
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    await page.evaluate(AXE.read_text(encoding="utf-8"))
    found = (await page.evaluate("axe.run()"))["violations"]
    assert not [(entry["id"], entry["impact"]) for entry in found if entry["impact"] in ("serious", "critical")]
