"""The checks before the first request of a replay is sent, so that mistakes are reported at once and in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from traces.requests import TraceRequest
from tridentserve.errors import ConfigError, InvalidRequestError, UnknownModelError

_TIMEOUT_S = 10.0
_MAX_PORT = 65535
# No pipeline makes larger images; what is above it comes from a mistake in the scale.
MAX_SIDE = 16384


@dataclass(frozen=True, slots=True)
class Served:
    """A model of a service."""

    name: str
    makes_videos: bool | None = None
    """None where the service does not say, and may make both."""
    needs_image: bool = False
    """True: its requests start from an image."""

    def fits(self, request: TraceRequest) -> bool:
        """A video of one frame is one too; an image has no more."""
        return request.num_frames == 1 or self.makes_videos is not False

    def gives_video(self, request: TraceRequest) -> bool:
        return request.num_frames > 1 if self.makes_videos is None else self.makes_videos

    def path(self, request: TraceRequest) -> str:
        """The route for the request."""
        if self.gives_video(request):
            return "/v1/videos/sync"
        return "/v1/images/edits" if self.needs_image else "/v1/images/generations"


def check_sizes(requests: Sequence[TraceRequest]) -> None:
    """Raises `InvalidRequestError` when a request has a side above `MAX_SIDE`."""
    large = next((request for request in requests if max(request.width, request.height) > MAX_SIDE), None)
    if large is not None:
        width, height = (f"{side:,}" if side < 10**9 else f"{side:.0e}" for side in (large.width, large.height))
        raise InvalidRequestError(
            f"request {large.request_id} asks for {width} x {height} pixels: a side is at most {MAX_SIDE:,}; choose a "
            "smaller --scale-pixels, or correct the trace",
            param="size",
        )


async def choose_models(
    client: httpx.AsyncClient, url: str, requests: Sequence[TraceRequest], model: str | None
) -> list[Served]:
    """The model to ask for, for each request: `model`, else the one that the row names, else the only one served.

    Raises `ConfigError` when no healthy service answers at `url` or the model is left open, `UnknownModelError` when a
    model is not served, and `InvalidRequestError` for videos of a model that makes images.
    """
    await _get(client, url, "/health")
    served = await _list_served_models(client, url)
    chosen = []
    for request in requests:
        name = model or request.model or (next(iter(served)) if len(served) == 1 else None)
        if name is None:
            raise ConfigError(f"{url} serves several models: choose one of {', '.join(served)}")
        if name not in served:
            raise UnknownModelError(f"{url} does not serve {name!r}; it serves {', '.join(served)}", param="model")
        if not served[name].fits(request):
            raise InvalidRequestError(
                f"request {request.request_id} asks for {request.num_frames} frames: {name} makes images only",
                param="num_frames",
            )
        chosen.append(served[name])
    return chosen


async def _get(client: httpx.AsyncClient, url: str, path: str) -> httpx.Response:
    try:
        port = httpx.URL(url).port or 0
        if port > _MAX_PORT:
            raise ConfigError(f"{url} has the port {port}: a port is at most {_MAX_PORT}")
        response = await client.get(f"{url}{path}", timeout=_TIMEOUT_S)
    except httpx.ConnectError:
        raise ConfigError(f"nothing listens at {url}: start a service first, or check the address") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        raise ConfigError(f"{url}{path} does not answer: {type(error).__name__} {error}".rstrip()) from None
    if response.status_code != 200:
        raise ConfigError(f"{url}{path} answers HTTP {response.status_code}: the service is not ready, or not ours")
    return response


async def _list_served_models(client: httpx.AsyncClient, url: str) -> dict[str, Served]:
    response = await _get(client, url, "/v1/models")
    try:
        body: Any = response.json()
        served = {str(entry["id"]): _read_served(entry) for entry in body["data"]}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{url}/v1/models does not answer with a list of models") from None
    if not served:
        raise ConfigError(f"{url} serves no model")
    return served


def _read_served(entry: dict[str, Any]) -> Served:
    modality = entry.get("output_modality")
    needs_image = entry.get("input_images", {}).get("min", 0) > 0
    return Served(str(entry["id"]), None if modality is None else modality == "video", needs_image)
