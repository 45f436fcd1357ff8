"""The routes of videos over a fake backend: all encodings, jobs, files, errors."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import FileResponse
from starlette.types import Message

from deployments.config.videos import VideosArgs
from deployments.http.video_files import VideoBytesResponse
from deployments.schemas.common.generation_request import REQUEST_ID
from deployments.videos.jobs import VideoJobs
from tests.deployments.clients import get_error, open_image_client, open_video_client
from tests.deployments.fake_backend import FakeBackend, make_png, make_video
from tests.support.waiting import PATIENCE_S
from tridentserve.engine.live.updates import FailedUpdate
from tridentserve.errors import OverloadedError
from tridentserve.models.input_image import encode_png, read_image

VIDEOS = "/v1/videos"
BODY = {"prompt": "a fox", "size": "64x64", "num_frames": 9, "num_inference_steps": 2, "fps": 8}
EXTRA = {name: BODY[name] for name in BODY if name != "prompt"}
TEXTS = {name: str(value) for name, value in BODY.items()}
IMAGE = make_png(48, 32)


def make_raw(content: bytes, content_type: str) -> dict[str, Any]:
    return {"content": content, "headers": {"Content-Type": content_type}}


class Served:
    """A client, and the backend behind it."""

    def __init__(self, http: httpx.AsyncClient, backend: FakeBackend, jobs: VideoJobs) -> None:
        self.http, self.backend, self.jobs = http, backend, jobs

    async def submit(self, **fields: Any) -> dict[str, Any]:
        answer = await self.http.post(VIDEOS, json={**BODY, **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def wait_until_ended(self, video_id: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + PATIENCE_S
        while (job := (await self.http.get(f"{VIDEOS}/{video_id}")).json())["status"] not in ("completed", "failed"):
            assert time.monotonic() < deadline_s, job
        return dict(job)


@pytest.fixture(params=["local", "elsewhere"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    """Files in a directory, or where only fsspec reaches them."""
    backend = FakeBackend()
    url = None if request.param == "local" else f"memory://{tmp_path.name}"
    jobs = VideoJobs(backend, VideosArgs(results_url=url), tmp_path)
    await jobs.start()
    async with open_video_client(backend, jobs) as http:
        yield Served(http, backend, jobs)
    await jobs.stop()


async def test_a_job_names_what_was_ignored(served: Served) -> None:
    assert (await served.submit(flow_shift=3.0, enable_teacache=False))["ignored"] == ["enable_teacache"]
    assert "ignored" not in await served.submit()


@pytest.mark.parametrize(
    "sent",
    [
        {"json": {**BODY, "num_outputs_per_prompt": 1}},
        {"json": {"prompt": "a fox", "extra_body": EXTRA}},
        {"data": TEXTS},
        {"data": {**{name: TEXTS[name] for name in TEXTS if name != "size"}, "width": "64", "height": "64"}},
        {"files": {name: (None, text) for name, text in TEXTS.items()}},
        {"files": {"prompt": (None, "a fox"), "extra_body": (None, json.dumps(EXTRA))}},
    ],
    ids=["json", "extra_body", "urlencoded", "width and height", "multipart", "multipart with extra_body"],
)
async def test_all_encodings_give_the_same_job(served: Served, sent: dict[str, Any]) -> None:
    answer = await served.http.post(VIDEOS, **sent)
    assert answer.status_code == 200, answer.text
    job = answer.json()
    assert (job["object"], job["status"], job["model"]) == ("video", "queued", "tiny-wan")
    assert (job["size"], job["seconds"], job["num_frames"], job["num_inference_steps"]) == ("64x64", "1.125", 9, 2)
    done = await served.wait_until_ended(job["id"])
    assert (done["status"], done["progress"]) == ("completed", 100)
    assert done["url"] == f"http://test{VIDEOS}/{job['id']}/content"


async def test_the_content_of_a_job(served: Served) -> None:
    job = await served.submit(n=2, request_id="twins")
    assert (await served.wait_until_ended("twins"))["num_outputs"] == 2
    assert job["id"] == "twins"
    for index, name in ((0, "twins.mp4"), (1, "twins-1.mp4")):
        answer = await served.http.get(f"{VIDEOS}/twins/content", params={"index": index})
        assert (answer.status_code, answer.content) == (200, make_video("a fox", index))
        assert answer.headers["content-type"] == "video/mp4"
        assert name in answer.headers["content-disposition"]
    part = await served.http.get(f"{VIDEOS}/twins/content", headers={"Range": "bytes=0-4"})
    assert (part.status_code, part.content) == (206, make_video("a fox")[:5])
    for params, status in (({"index": 2}, 404), ({"index": -1}, 422), ({"variant": "thumbnail"}, 422)):
        answer = await served.http.get(f"{VIDEOS}/twins/content", params=params)
        assert answer.status_code == status
        get_error(answer)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The temporary files that there are."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return lambda: [path.name for path in directory.iterdir()]


@pytest.mark.parametrize("range_", ["bytes=abc", "bytes=9999-", "pages=1", "bytes=0-3", "bytes=0-1,4-5"])
async def test_no_temporary_file_is_left_whatever_range_is_asked_for(
    served: Served, temporary: Callable[[], list[str]], range_: str
) -> None:
    await served.submit(request_id="a")
    await served.wait_until_ended("a")
    answer = await served.http.get(f"{VIDEOS}/a/content", headers={"Range": range_})
    assert answer.status_code == {"bytes=9999-": 416, "bytes=0-3": 206, "bytes=0-1,4-5": 206}.get(range_, 400)
    assert temporary() == []


async def test_no_temporary_file_is_left_by_a_client_that_leaves(temporary: Callable[[], list[str]]) -> None:
    sent = list[str]()

    async def gone(message: Message) -> None:
        sent.extend(temporary())
        raise ConnectionResetError

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    answer = VideoBytesResponse(b"x" * 2**20, "a.mp4")
    with pytest.raises(ConnectionResetError):
        await answer({"type": "http", "method": "GET", "headers": [], "asgi": {"spec_version": "2.4"}}, never, gone)
    assert len(sent) == 1
    assert temporary() == []


@pytest.mark.parametrize("when", ["before it is looked at", "before it is opened"])
async def test_a_file_that_goes_before_it_is_sent(served: Served, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retention removes it, for example. The answer is that of a video that does not exist."""
    opened = FileResponse._handle_simple

    async def removed_at_last(self: FileResponse, *args: Any) -> None:
        await asyncio.to_thread(Path(self.path).unlink)
        await opened(self, *args)

    async def removed(video_id: str, index: int) -> Path:
        assert path is not None
        path.unlink()
        return path

    await served.submit(request_id="a")
    await served.wait_until_ended("a")
    path = await served.jobs.find_local_file("a", 0)
    if path is None:  # what is elsewhere is in memory by then
        return
    if when == "before it is opened":
        monkeypatch.setattr(FileResponse, "_handle_simple", removed_at_last)
    else:
        monkeypatch.setattr(served.jobs, "find_local_file", removed)
    answer = await served.http.get(f"{VIDEOS}/a/content")
    assert (answer.status_code, get_error(answer)["code"]) == (404, "request_not_found")


async def test_the_id_of_a_job_that_was_deleted_is_free_for_another_request(served: Served) -> None:
    """Also for the scheduler, which may still know the first one; and so is the id of an answered request."""
    await served.http.post(f"{VIDEOS}/sync", json={**BODY, "request_id": "a"})
    for prompt in ("a fox", "a dog"):
        await served.submit(request_id="a", prompt=prompt)
        assert (await served.wait_until_ended("a"))["status"] == "completed"
        assert (await served.http.get(f"{VIDEOS}/a/content")).content == make_video(prompt)
        await served.http.delete(f"{VIDEOS}/a")
    asked = [spec.request_id for spec, _ in served.backend.seen]
    assert len(set(asked)) == 3
    assert [REQUEST_ID.fullmatch(request_id) is None for request_id in asked] == [False, True, True]


async def test_the_same_id_with_another_seed_is_another_request(served: Served) -> None:
    first = await served.submit(request_id="a", seed=5)
    for fields in ({"seed": 5}, {}):
        assert (await served.submit(request_id="a", **fields))["seed"] == first["seed"] == 5
    answer = await served.http.post(VIDEOS, json={**BODY, "request_id": "a", "seed": 6})
    assert (answer.status_code, get_error(answer)["param"]) == (422, "request_id")


async def test_a_request_is_stopped_by_its_id_also_where_it_is_a_job(served: Served) -> None:
    served.backend.allowed_steps = 0
    await served.submit(request_id="a")
    for status in (200, 404):
        assert (await served.http.delete("/v1/requests/a")).status_code == status
    job = (await served.http.get(f"{VIDEOS}/a")).json()
    assert (job["status"], job["error"]["code"]) == ("failed", "cancelled")


async def test_a_full_disk_is_reported(served: Served) -> None:
    store = served.jobs._store.store._db
    store.execute(f"PRAGMA max_page_count = {store.execute('PRAGMA page_count').fetchone()[0]}")
    answers = [await served.http.post(VIDEOS, json={**BODY, "prompt": "x" * 200}) for _ in range(40)]
    error = get_error(answers[-1])
    assert (answers[-1].status_code, error["code"], error["type"]) == (507, "storage_failed", "server_error")
    assert {answer.status_code for answer in answers} == {200, 507}


async def test_jobs_are_listed(served: Served) -> None:
    for name in "abc":
        await served.submit(request_id=name)
    page = (await served.http.get(VIDEOS, params={"limit": 2})).json()
    assert (page["object"], [job["id"] for job in page["data"]]) == ("list", ["c", "b"])
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("c", "b", True)
    rest = (await served.http.get(VIDEOS, params={"limit": 2, "after": "b"})).json()
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == (["a"], False)
    first = (await served.http.get(VIDEOS, params={"order": "asc", "limit": 1})).json()
    assert [job["id"] for job in first["data"]] == ["a"]
    for param, value in (("limit", 0), ("limit", 101), ("limit", "some"), ("order", "best"), ("after", "gone")):
        answer = await served.http.get(VIDEOS, params={param: value})
        assert (answer.status_code, get_error(answer)["param"]) == (422, param)


async def test_delete(served: Served) -> None:
    await served.submit(request_id="a")
    await served.wait_until_ended("a")
    answer = await served.http.delete(f"{VIDEOS}/a")
    assert answer.json() == {"id": "a", "object": "video.deleted", "deleted": True}
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = await served.http.request(method, f"{VIDEOS}/a{path}")
        assert (answer.status_code, get_error(answer)["code"]) == (404, "request_not_found")


async def test_a_job_that_failed_is_reported_with_200(served: Served) -> None:
    served.backend.fail = FailedUpdate("a", "c", "m")
    await served.submit(request_id="a")
    job = await served.wait_until_ended("a")
    assert (job["status"], job["error"]["code"], "url" in job) == ("failed", "c", False)


async def test_a_video_in_one_answer(served: Served) -> None:
    answer = await served.http.post(f"{VIDEOS}/sync", data={**TEXTS, "request_id": "now", "seed": "5"})
    assert (answer.status_code, answer.content) == (200, make_video("a fox"))
    assert answer.headers["content-type"] == "video/mp4"
    assert (answer.headers["x-video-id"], answer.headers["x-seed"]) == ("now", "5")
    facts = json.loads(answer.headers["x-request-facts"])
    assert (facts["stage_durations"]["diffuse"], facts["timeline"][0]["workers"]) == (0.3, ["n0w0"])
    assert (facts["peak_memory_mb"], float(answer.headers["x-peak-memory-mb"])) == (12.5, 12.5)
    assert (await served.http.get(f"{VIDEOS}/now")).status_code == 404
    two = await served.http.post(f"{VIDEOS}/sync", json={**BODY, "n": 2})
    assert (two.status_code, get_error(two)["param"]) == (422, "n")
    served.backend.refuse = OverloadedError("full")
    assert (await served.http.post(f"{VIDEOS}/sync", json=BODY)).status_code == 429


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        ({"json": {**BODY, "num_frames": 8}}, 422, "num_frames"),
        ({"json": {**BODY, "model": "tiny-sd3"}}, 404, "model"),
        ({"data": {**TEXTS, "colour": "red"}}, 422, "colour"),
        ({"data": {**TEXTS, "num_frames": "nine"}}, 422, "num_frames"),
        ({"files": {"prompt": (None, "a fox"), "input_reference": ("x.png", b"png")}}, 422, "input_reference"),
        ({"files": {"prompt": ("prompt.txt", b"a fox")}}, 422, "prompt"),
        (make_raw(b"prompt=a&prompt=b", "application/x-www-form-urlencoded"), 422, "prompt"),
        (make_raw(b"--x", "multipart/form-data"), 422, None),
        (make_raw(b"--x\r\n", "multipart/form-data; boundary=y"), 422, None),
        (make_raw(b"a", "text/plain"), 415, None),
        ({"data": {"prompt": "x" * 2**20}}, 413, None),
        ({"files": {"prompt": (None, "a fox"), "extra_body": (None, "{")}}, 422, None),
    ],
)
async def test_what_is_refused(served: Served, sent: dict[str, Any], status: int, param: str | None) -> None:
    for path in (VIDEOS, f"{VIDEOS}/sync"):
        answer = await served.http.post(path, **sent)
        assert answer.status_code == status, answer.text
        assert get_error(answer)["param"] == param
    assert not served.backend.seen
    assert (await served.http.get(VIDEOS)).json()["data"] == []


@pytest.mark.parametrize(
    "sent",
    [
        {
            "data": {"prompt": "a fox", "extra_body": json.dumps(EXTRA)},
            "files": {"input_reference": ("a.png", IMAGE)},
        },
        {"data": TEXTS, "files": {"input_reference": ("fox.png", IMAGE, "image/png")}},
        {"json": {**BODY, "input_reference": b64encode(IMAGE).decode()}},
        {"json": {**BODY, "input_reference": {"image_url": f"data:image/png;base64,{b64encode(IMAGE).decode()}"}}},
    ],
    ids=["SGLang", "openai", "base64", "object"],
)
async def test_a_video_from_an_image(served: Served, sent: dict[str, Any]) -> None:
    async with open_image_client(served.backend, served.jobs) as http:
        job = (await http.post(VIDEOS, **sent)).json()
        at_once = await http.post(f"{VIDEOS}/sync", **sent)
    assert (job["model"], at_once.status_code) == ("tiny-wan-i2v", 200)
    assert (await served.wait_until_ended(job["id"]))["status"] == "completed"
    assert [inputs.image for _, inputs in served.backend.seen] == [encode_png(read_image(IMAGE, 10**6))] * 2


@pytest.mark.parametrize("video_id", ["unknown", "%00", ".x", "a" * 129, "%2e%2e%2fjobs"])
async def test_ids_that_no_job_has(served: Served, video_id: str) -> None:
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = await served.http.request(method, f"{VIDEOS}/{video_id}{path}")
        assert answer.status_code == 404
        get_error(answer)


async def test_a_service_without_jobs_says_what_is_missing() -> None:
    async with open_video_client(FakeBackend(), None) as http:
        answer = await http.post(VIDEOS, json=BODY)
        assert (answer.status_code, "`videos:` section" in get_error(answer)["message"]) == (500, True)
        assert (await http.get(VIDEOS)).json()["data"] == []
        assert (await http.get(f"{VIDEOS}/a")).status_code == 404
        assert (await http.post(f"{VIDEOS}/sync", json=BODY)).content == make_video("a fox")


async def test_models_say_what_they_make() -> None:
    async with open_video_client(FakeBackend(), None) as http:
        told = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    assert (told["tiny-sd3"]["output_modality"], told["tiny-wan"]["output_modality"]) == ("image", "video")
    assert told["tiny-wan"]["limits"]["frame_multiple"] == 4
    assert told["tiny-wan"]["defaults"] == {
        "size": "256x256",
        "num_frames": 1,
        "fps": 16,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
    }
    assert "max_frames" not in told["tiny-sd3"]["limits"]
