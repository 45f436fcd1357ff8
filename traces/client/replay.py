"""The open-loop client: sends each request at its time, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import base64
import math
import re
import ssl
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from traces.client.answers import read_image, read_video
from traces.client.bodies import build_body
from traces.client.preflight import Served, check_sizes, choose_models
from traces.requests import TraceRequest
from traces.results import AnswerFacts, ReplayResult
from tridentserve.errors import ConfigError


async def replay(
    requests: Sequence[TraceRequest],
    url: str,
    *,
    speed: float = 1.0,
    model: str | None = None,
    timeout_s: float = 600.0,
    save_dir: Path | None = None,
    on_sent: Callable[[TraceRequest], None] | None = None,
    on_done: Callable[[ReplayResult], None] | None = None,
) -> list[ReplayResult]:
    """Sends request i at `timestamp_s / speed` seconds, to `{url}/v1/images/generations` or, as its model makes it, to
    `/v1/images/edits` or `/v1/videos/sync`; results are in the same order. Models that start from an image get one
    that is made from the request's seed.

    `model` is asked for instead of what the rows name. `save_dir` gets the images and videos. `on_sent` and `on_done`
    are called on the event loop as requests are sent and end. A request that fails in whatever way is a result, never
    an exception. Before anything is sent this raises `InvalidRequestError` for videos of a model that makes images,
    `ConfigError` for bad arguments or when
    nothing listens at `url`, `UnknownModelError` for unknown models.
    """
    if not (math.isfinite(speed) and speed > 0):
        raise ConfigError(f"speed must be above 0, not {speed}")
    run = await open_session(requests, url, model=model, timeout_s=timeout_s, save_dir=save_dir, on_done=on_done)
    tasks: dict[int, asyncio.Task[ReplayResult]] = {}
    async with asyncio.TaskGroup() as group:
        for index in sorted(range(len(requests)), key=lambda index: requests[index].timestamp_s):
            due_s = requests[index].timestamp_s / speed
            await asyncio.sleep(max(0.0, due_s - run.now_s()))
            tasks[index] = group.create_task(run.send(requests[index], run.models[index], index, due_s))
            if on_sent is not None:
                on_sent(requests[index])
    return [tasks[index].result() for index in range(len(requests))]


async def open_session(
    requests: Sequence[TraceRequest],
    url: str,
    *,
    model: str | None = None,
    timeout_s: float = 600.0,
    save_dir: Path | None = None,
    on_done: Callable[[ReplayResult], None] | None = None,
) -> ReplaySession:
    """Before anything is sent: whether these requests can be, and by which model. Arguments and errors as of
    `replay`."""
    check_sizes(requests)
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the address must start with http:// or https://, not {url!r}")
    if not timeout_s > 0:
        raise ConfigError(f"timeout must be above 0, not {timeout_s}")
    tls = ssl.create_default_context()
    async with _open_client(tls) as client:
        models = await choose_models(client, url, requests, model)
    # Two replays of one trace are not the same requests.
    run_id, start_s = uuid.uuid4().hex[:8], asyncio.get_running_loop().time()
    return ReplaySession(url, tls, models, timeout_s, save_dir, on_done, run_id, start_s)


def _open_client(tls: ssl.SSLContext) -> httpx.AsyncClient:
    """A client for one request, as each comes from a user of its own. No connection is used twice, so none is closed by
    the server just as it is used again; and the cost of a send does not grow with the number in flight, as it does in
    a shared pool (2,000 in flight: sends 2 s late). Our own time limit covers a request as a whole."""
    return httpx.AsyncClient(verify=tls, timeout=None, trust_env=False)


@dataclass(frozen=True, slots=True)
class ReplaySession:
    """The state that the requests of one replay share; made by `open_session`."""

    url: str
    tls: ssl.SSLContext
    models: Sequence[Served]
    """The models of the requests that the session was opened for."""
    timeout_s: float
    save_dir: Path | None
    """The directory for the images and videos; None to keep none."""
    on_done: Callable[[ReplayResult], None] | None
    run_id: str
    start_s: float

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.start_s

    async def send(self, request: TraceRequest, model: Served, number: int, due_s: float) -> ReplayResult:
        """One request from sending, at once, to its result. `number`: another one for each. `due_s`: when it should
        have been sent."""
        # Ids of a trace may hold what the service does not take in one; the number keeps them apart all the same.
        name = re.sub("[^A-Za-z0-9._:-]", "_", request.request_id)[:80]
        service_request_id = f"{self.run_id}-{number}-{name}"
        video = model.gives_video(request)
        # In a thread: drawing an input image on the event loop would make the next sends late.
        body = await asyncio.to_thread(build_body, request, model, service_request_id)
        sent_s = self.now_s()
        reply = await self._post(model.path(request), body)
        latency_s = self.now_s() - sent_s
        facts, error = AnswerFacts(), reply.error
        if reply.answer is not None:
            try:
                # In a thread: decoding a large image on the event loop would make the next sends late.
                facts = await asyncio.to_thread(_read_facts, reply.answer, request, video)
                if self.save_dir is not None:
                    file = self.save_dir / f"{number:06d}-{name}{'.mp4' if video else '.png'}"
                    await asyncio.to_thread(_save, reply.answer, file, video)
            except (ValueError, OSError) as failure:
                error = str(failure)
        result = ReplayResult(
            request,
            model.name,
            service_request_id,
            sent_s,
            max(0.0, sent_s - due_s),
            latency_s,
            reply.status,
            error,
            facts,
            reply.error_code,
        )
        if self.on_done is not None:
            self.on_done(result)
        return result

    async def _post(self, path: str, body: dict[str, Any]) -> _Reply:
        try:
            async with asyncio.timeout(self.timeout_s), _open_client(self.tls) as client:
                response = await client.post(f"{self.url}{path}", json=body)
        except TimeoutError:
            return _Reply(error=f"no answer within {self.timeout_s:g} s")
        except Exception as failure:  # whatever goes wrong with one request must not stop the others
            return _Reply(error=f"{type(failure).__name__}: {failure}".rstrip(": "))
        if response.status_code != 200:
            message, code = _read_error(response)
            return _Reply(response.status_code, f"HTTP {response.status_code}: {message}", code)
        return _Reply(200, answer=response)


@dataclass(frozen=True, slots=True)
class _Reply:
    """The reply to a request, or the lack of one."""

    status: int | None = None
    """The HTTP status; None without an answer."""
    error: str | None = None
    """None when the status is 200."""
    error_code: str | None = None
    """The code of an OpenAI error body."""
    answer: httpx.Response | None = None
    """The answer of status 200."""


def _read_facts(answer: httpx.Response, request: TraceRequest, video: bool) -> AnswerFacts:
    """Raises `ValueError` when the answer does not hold what was asked for."""
    if video:
        return read_video(answer.content, answer.headers, request.width, request.height, request.num_frames)
    return read_image(answer.content, request.width, request.height)


def _save(answer: httpx.Response, file: Path, video: bool) -> None:
    """Write the image or video of an answer that was read without an error."""
    file.write_bytes(answer.content if video else base64.b64decode(answer.json()["data"][0]["b64_json"]))


def _read_error(response: httpx.Response) -> tuple[str, str | None]:
    """The message of an OpenAI error body, else the start of whatever came, on one line; and the code in it."""
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = response.text, None
    return " ".join(message.split())[:300], None if code is None else str(code)
