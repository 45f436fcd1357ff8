"""The form of the console in a browser, over a backend that makes nothing: its fields follow the model, all of them are
sent, and it says when a request would be ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest_asyncio

from deployments.http.app import create_api
from deployments.models.served import ServedModel
from tests.deployments.clients import served
from tests.deployments.fake_backend import WITH_IMAGES, WITH_STARTS, FakeBackend, make_png
from tests.e2e.console.conftest import Console, open_console
from tests.support.waiting import until
from tridentserve.errors import DeadlineMissedError
from tridentserve.requests import ImageStart

VIDEOS = "**/v1/videos"


@dataclass
class Form:
    """The page, and the backend behind it: it predicts a tenth of a second for each step, and nothing for sides above
    128."""

    console: Console
    backend: FakeBackend

    @property
    def page(self) -> Any:
        return self.console.page

    async def change_field(self, name: str, value: str) -> None:
        """Type into a field, and leave it."""
        await self.page.fill(f"#{name}", value)
        await self.leave_field()

    async def leave_field(self) -> None:
        """A field tells of its change when it is left."""
        await self.page.locator("#prompt").focus()

    async def wait_for_quote(self, words: str) -> None:
        at = "document.getElementById('quote').textContent"
        await until(lambda: self._has_quote(at, words), f"the page says: {words}", every_s=0.05)

    async def _has_quote(self, at: str, words: str) -> bool:
        return bool(await self.page.evaluate(at) == words)


@pytest_asyncio.fixture
async def form(chromium: Any) -> AsyncIterator[Form]:
    backend = FakeBackend()
    async with (
        served(backend, app=create_api(backend, WITH_IMAGES)) as port,
        open_console(chromium, f"http://127.0.0.1:{port}") as console,
    ):
        yield Form(console, backend)


async def test_the_defaults_are_those_of_the_chosen_model(form: Form) -> None:
    await form.page.click("#more > summary")
    for name, model in WITH_IMAGES.items():
        await form.page.select_option("#model", name)
        assert await _read_placeholders(form) == _list_defaults(model)


def _list_defaults(model: ServedModel) -> dict[str, str]:
    defaults = model.to_json()["defaults"]
    shown = {"size": "size", "steps": "num_inference_steps", "guidance": "guidance_scale"}
    shown |= {"frames": "num_frames", "rate": "fps"} if model.makes_videos else {}
    of_image = {"size": "as the input image"} if model.needs_image else {}
    return {field: f"{defaults[key]:g}" if key != "size" else defaults[key] for field, key in shown.items()} | of_image


async def _read_placeholders(form: Form) -> dict[str, str]:
    """What the visible fields show where nothing is typed."""
    fields = {name: form.page.locator(f"#{name}") for name in ("size", "steps", "guidance", "frames", "rate")}
    return {name: await at.get_attribute("placeholder") for name, at in fields.items() if await at.is_visible()}


async def test_it_says_when_a_request_would_be_ready_or_that_it_would_be_late(form: Form) -> None:
    await form.console.fill("tiny-sd3", size="64x64", steps=5)
    await form.leave_field()
    await form.wait_for_quote("Would be ready in about 0.5 s.")
    assert await form.page.get_attribute("#composer button.primary", "aria-describedby") == "quote"
    await form.change_field("steps", "30")
    await form.wait_for_quote("Would be late: ready in about 3.0 s, 2.0 s after its deadline.")
    await form.change_field("deadline", "2.5")
    await form.wait_for_quote("Would be late: ready in about 3.0 s, 0.5 s after its deadline.")
    await form.page.click("#more > summary")
    await form.page.select_option("#on-late", "refuse")
    await form.wait_for_quote("Would be refused: ready in about 3.0 s, 0.5 s after its deadline.")
    await form.change_field("size", "160x160")
    await form.wait_for_quote("no live worker could run it at the moment")


async def test_what_cannot_be_sent_has_no_quote(form: Form) -> None:
    await form.console.fill("tiny-sd3", size="64x64", steps=5)
    await form.leave_field()
    await form.wait_for_quote("Would be ready in about 0.5 s.")
    await form.change_field("size", "64")
    await form.wait_for_quote("")
    # An edit has the size of an image that the quote does not see.
    await form.page.fill("#size", "")
    await form.page.fill("#steps", "5")
    await form.page.select_option("#model", "tiny-kontext")
    await form.change_field("size", "64x64")
    await form.wait_for_quote("Would be ready in about 0.5 s.")
    await form.change_field("size", "")
    await form.wait_for_quote("")


async def test_a_refusal_is_told_in_plain_words(form: Form) -> None:
    form.backend.refuse = DeadlineMissedError("it is predicted to end too late", 8.24)
    await form.console.fill("tiny-sd3", prompt="a red fox", size="64x64")
    card = await form.console.submit()
    await card.locator(".blank", has_text="refused").wait_for()
    assert await card.locator(".problem").inner_text() == (
        "Refused: it would be ready in about 8.2 s, after its deadline. Nothing was computed. "
        "More time, fewer steps or a smaller size may help."
    )
    form.console.problems = [text for text in form.console.problems if "503" not in text]  # the browser's own line


async def test_all_settings_reach_the_service_and_are_counted(form: Form) -> None:
    await form.page.click("#more > summary")
    await form.page.fill("#guidance", "1.5")
    await form.page.fill("#priority", "-2")
    await form.page.select_option("#tier", "flex")
    await form.page.select_option("#on-late", "refuse")
    options = form.page.locator("#quality option")
    assert await options.evaluate_all("all => all.map(one => one.value)") == ["", "exact", "high", "fast"]
    await form.page.select_option("#quality", "fast")
    await form.console.fill("tiny-sd3", prompt="a red fox", size="64x32", steps=2, seed=7, deadline=3)
    assert await form.page.locator("#more > summary").inner_text() == "More settings (5 set)"
    await form.page.click("#more > summary")
    card = await form.console.submit()
    await card.locator("img").wait_for()
    ((spec, inputs),) = form.backend.seen
    assert (spec.on_late, spec.priority, spec.slo_s, spec.num_inference_steps) == ("refuse", -3, 3.0, 2)
    assert (inputs.guidance_scale, inputs.seed, inputs.prompt) == (1.5, 7, "a red fox")
    assert (spec.quality, inputs.quality) == ("fast", "fast")
    assert (inputs.shape.width, inputs.shape.height) == (64, 32)


async def test_a_wrong_setting_is_shown_where_it_was_hidden(form: Form) -> None:
    await form.page.click("#more > summary")
    await form.page.fill("#guidance", "500")
    await form.page.click("#more > summary")
    await form.console.fill("tiny-sd3", prompt="a red fox", size="64x64")
    await form.page.click("#composer button.primary")
    await form.console.wait_for("document.getElementById('more').open")
    assert await form.page.evaluate("document.activeElement.id") == "guidance"
    assert not form.backend.seen


async def test_the_fields_of_a_video(form: Form) -> None:
    await form.console.fill("tiny-wan", prompt="a film", size="64x64", frames=6, rate=18)
    await form.page.click("#composer button.primary")
    # One more than a multiple of four is allowed: nothing was sent.
    assert await form.page.locator(".result").count() == 0
    await form.change_field("frames", "9")
    await form.page.locator("#frames-hint", has_text="0.5 s long").wait_for()

    async def answer(route: Any) -> None:
        await route.fulfill(json={"id": "v", "status": "failed", "error": {"code": "x", "message": "made up"}})

    await form.page.route(VIDEOS, answer)
    async with form.page.expect_request(VIDEOS) as asked:
        card = await form.console.submit()
    await card.locator(".problem", has_text="made up").wait_for()
    sent = {"model": "tiny-wan", "prompt": "a film", "size": "64x64", "num_frames": 9, "fps": 18}
    assert (await asked.value).post_data_json == sent


async def test_a_hidden_field_of_another_model_does_not_hold_a_request_up(form: Form) -> None:
    await form.console.fill("tiny-wan", size="64x64", frames=6)
    await form.console.fill("tiny-sd3", prompt="a red fox", size="64x64", steps=2)
    card = await form.console.submit()
    await card.locator("img").wait_for()


async def test_an_edit_needs_its_image(form: Form) -> None:
    await form.console.fill("tiny-kontext", prompt="at night", steps=2)
    await form.page.click("#composer button.primary")
    assert await form.page.locator(".result").count() == 0
    picture = {"name": "fox.png", "mimeType": "image/png", "buffer": make_png(64, 64)}
    await form.page.set_input_files("#image", picture)
    card = await form.console.submit()
    await card.locator("img").wait_for()
    ((spec, inputs),) = form.backend.seen
    assert (spec.model, spec.shape.width, spec.shape.height) == ("tiny-kontext", 64, 64)
    assert inputs.image is not None


async def test_how_far_an_image_is_changed(chromium: Any) -> None:
    """The quote of a request from an image has fewer steps, and its mask may be left out."""
    backend, picture = FakeBackend(), {"name": "fox.png", "mimeType": "image/png", "buffer": make_png(64, 64)}
    async with (
        served(backend, app=create_api(backend, WITH_STARTS)) as port,
        open_console(chromium, f"http://127.0.0.1:{port}") as console,
    ):
        form = Form(console, backend)
        await form.console.fill("tiny-start", prompt="at night", size="64x64", steps=10)
        await form.leave_field()
        await form.wait_for_quote("Would be ready in about 1.0 s.")
        assert await form.page.get_attribute("#strength", "placeholder") == "0.6"
        await form.page.set_input_files("#image", picture)
        await form.wait_for_quote("Would be ready in about 0.6 s.")
        await (await form.console.submit()).locator("img").wait_for()
        await form.change_field("strength", "0.2")
        await form.wait_for_quote("Would be ready in about 0.2 s.")
        await form.page.set_input_files("#mask", picture)
        await (await form.console.submit()).locator("img").wait_for()
    assert [inputs.start for _, inputs in backend.seen] == [ImageStart(0.6), ImageStart(0.2, has_mask=True)]


async def test_several_images_none_and_a_mask(form: Form) -> None:
    picture = {"name": "fox.png", "mimeType": "image/png", "buffer": make_png(64, 64)}
    await form.console.fill("tiny-klein", prompt="at night", size="64x64", steps=2)
    await (await form.console.submit()).locator("img").wait_for()
    await form.page.set_input_files("#image", [picture, picture])
    await (await form.console.submit()).locator("img").wait_for()
    await form.console.fill("tiny-fill", prompt="a pond", size="64x64", steps=2)
    await form.page.set_input_files("#image", picture)
    await form.page.set_input_files("#mask", picture)
    await (await form.console.submit()).locator("img").wait_for()
    assert [(spec.model, len(inputs.images), inputs.mask is not None) for spec, inputs in form.backend.seen] == [
        ("tiny-klein", 0, False),
        ("tiny-klein", 2, False),
        ("tiny-fill", 1, True),
    ]
