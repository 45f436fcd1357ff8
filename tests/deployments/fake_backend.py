"""A `Backend` that makes no images and no videos, what the front ends are tested over."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from deployments.config.models import Limits
from deployments.models.served import ServedModel
from tests.support.waiting import until
from tridentserve.engine.live.updates import CompletedUpdate, PreviewUpdate, ProgressUpdate, QueuedUpdate, Update
from tridentserve.errors import InvalidRequestError, RequestCancelledError, RequestNotFoundError
from tridentserve.models.families import FAMILIES
from tridentserve.models.lora_files import LoraFile
from tridentserve.plans import StageSpan
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.events import Reject
from tridentserve.scheduling.prediction.experience import Estimate
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.scheduling.watching.cluster_state import ClusterState
from tridentserve.stages import Stage


def make_loras(model: str, *names: str) -> tuple[LoraFile, ...]:
    return tuple(LoraFile(model, name, Path(f"/models/{model}/loras/{name}.safetensors")) for name in names)


LIMITS = Limits(min_side=32, max_side=256, max_pixels=192 * 256, max_steps=50, max_outputs=3, max_prompt_chars=200)
MODELS = {
    "tiny-sd3": ServedModel("tiny-sd3", FAMILIES["sd3"], LIMITS),
    "tiny-flux": ServedModel("tiny-flux", FAMILIES["flux"], Limits(), loras=make_loras("tiny-flux", "ink", "pastel")),
}
VIDEO_LIMITS = Limits(min_side=32, max_side=256, max_frames=33, max_pixel_frames=128 * 128 * 17, max_outputs=2)
WITH_VIDEOS = {**MODELS, "tiny-wan": ServedModel("tiny-wan", FAMILIES["wan"], VIDEO_LIMITS)}
IMAGE_LIMITS = Limits(min_side=32, max_side=256, max_pixels=192 * 256, max_image_bytes=2**20, max_image_pixels=10**6)
WITH_IMAGES = {
    **WITH_VIDEOS,
    "tiny-kontext": ServedModel(
        "tiny-kontext", FAMILIES["flux_kontext"], IMAGE_LIMITS, loras=make_loras("tiny-kontext", "ink")
    ),
    "tiny-fill": ServedModel("tiny-fill", FAMILIES["flux_fill"], IMAGE_LIMITS),
    "tiny-plus": ServedModel("tiny-plus", FAMILIES["qwen_image_edit_plus"], IMAGE_LIMITS),
    "tiny-klein": ServedModel("tiny-klein", FAMILIES["flux2_klein"], IMAGE_LIMITS.model_copy(update={"max_images": 2})),
    "tiny-wan-i2v": ServedModel(
        "tiny-wan-i2v", FAMILIES["wan_i2v"], VIDEO_LIMITS.model_copy(update={"max_image_pixels": 10**6})
    ),
}
# The first may start from an image, the second could and is not allowed to.
WITH_STARTS = {
    "tiny-start": ServedModel(
        "tiny-start", FAMILIES["sd3"].with_image_start(), IMAGE_LIMITS.model_copy(update={"max_images": 1})
    ),
    **WITH_IMAGES,
    "tiny-xl": ServedModel(
        "tiny-xl", FAMILIES["sdxl"].with_image_start(), IMAGE_LIMITS.model_copy(update={"max_images": 1})
    ),
}


@dataclass
class FakeBackend:
    """`allowed_steps`: how many more steps it makes, of all requests together; the next one waits until there are more.
    `refuse` is raised before the first update (so often: `num_refused`), `refuse_with` comes in place of all steps,
    `fail` after the first step; a `stop_after` cuts the updates short. `ended` gets the id of each request whose
    iterator was closed or ran out, with how it ended."""

    allowed_steps: float = math.inf
    refuse: Exception | None = None
    num_refused: int = 0
    refuse_with: Update | None = None
    fail: Exception | Update | None = None
    stop_after: int | None = None
    state: dict[str, Any] | Exception = field(default_factory=lambda: {"status": "ready", "workers": 4})
    running: dict[str, tuple[RequestSpec, GenerationInputs]] = field(default_factory=dict)
    seen: list[tuple[RequestSpec, GenerationInputs]] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    cluster: ClusterState | Exception = field(default_factory=lambda: ClusterState(now_s=1000.0, cursor=(0,)))
    num_described: int = 0
    loras: dict[tuple[str, str], LoraFile] = field(default_factory=dict)
    """Those that were added and not removed."""

    async def generate(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncGenerator[Update, None]:
        if self.refuse is not None:
            self.num_refused += 1
            raise self.refuse
        request_id = spec.request_id
        self.running[request_id] = (spec, inputs)
        self.seen.append((spec, inputs))
        self.ended[request_id] = "closed"
        try:
            if with_progress:
                yield QueuedUpdate(request_id)
            if self.refuse_with is not None:
                yield self.refuse_with
                return
            for step in range(1, spec.num_inference_steps + 1):
                await asyncio.sleep(0)
                await until(lambda: self.allowed_steps > 0)
                self.allowed_steps -= 1
                if with_progress:
                    yield ProgressUpdate(request_id, step, spec.num_inference_steps)
                    if step <= inputs.partial_images:
                        yield make_preview(spec, inputs, step)
                if request_id in self.deleted:
                    raise RequestCancelledError("the request was deleted")
                if self.stop_after == step:
                    return
                if isinstance(self.fail, Exception):
                    raise self.fail
                if self.fail is not None:
                    yield self.fail
            self.ended[request_id] = "completed"
            yield make_completed(spec, inputs)
        except asyncio.CancelledError:
            self.ended[request_id] = "cancelled"
            raise
        finally:
            self.running.pop(request_id, None)  # it may have been made twice

    async def generate_in_batches(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncGenerator[list[Update], None]:
        """As the engine has it."""
        async with aclosing(self.generate(spec, inputs, with_progress)) as updates:
            async for update in updates:
                yield [update]

    async def cancel(self, request_id: str) -> bool:
        if request_id in self.running:
            self.deleted.add(request_id)
        return request_id in self.running

    async def quote(self, specs: Sequence[RequestSpec]) -> list[Quote | Reject | None]:
        """A tenth of a second for each step; the deadline is a second, where there is no other. Nothing is known of
        sides above 128, and none of 32 can be made."""
        return [_quote(spec) for spec in specs]

    async def add_lora(self, model: str, name: str, path: str) -> LoraFile:
        """Takes all files but those of a folder `odd`."""
        if "odd" in path:
            raise InvalidRequestError("path: this file is odd", "path")
        self.loras[model, name] = LoraFile(model, name, Path(path), "0" * 64)
        return self.loras[model, name]

    async def remove_lora(self, model: str, name: str) -> None:
        self.loras.pop((model, name), None)

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Knows all requests that it has seen."""
        if not any(spec.request_id == request_id for spec, _ in self.seen):
            raise RequestNotFoundError("no request with this id is kept")
        return {"object": "request.explanation", "id": request_id, "text": f"{request_id} was made up"}

    async def describe_cluster(self, cursor: tuple[int, ...] = ()) -> ClusterState:
        self.num_described += 1
        if isinstance(self.cluster, Exception):
            raise self.cluster
        return replace(self.cluster, ended=tuple(stage for stage in self.cluster.ended if (stage.number,) > cursor))

    async def get_health(self) -> dict[str, Any]:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


def _quote(spec: RequestSpec) -> Quote | Reject | None:
    if spec.shape.width == 32:
        return Reject(spec.request_id, "invalid_request", "too small")
    seconds = spec.num_inference_steps / 10
    if spec.shape.width > 128:
        return None
    return Quote(seconds, spec.slo_s or 1.0, False, Estimate.of_rehearsal(seconds, 0.0))


def make_preview(spec: RequestSpec, inputs: GenerationInputs, step: int) -> PreviewUpdate:
    """A preview after each of the first steps."""
    file_format = inputs.preview_format
    files = (make_picture(spec.shape.width // 8, spec.shape.height // 8, file_format),) * spec.num_outputs
    return PreviewUpdate(spec.request_id, step - 1, step, spec.num_inference_steps, files, file_format)


def make_completed(spec: RequestSpec, inputs: GenerationInputs) -> CompletedUpdate:
    return CompletedUpdate(
        request_id=spec.request_id,
        model=spec.model,
        outputs=_make_outputs(spec, inputs),
        output_format=inputs.output_format,
        seed=inputs.seed,
        shape=spec.shape,
        created_s=1_800_000_000,
        queue_s=0.01,
        latency_s=0.5,
        slo_s=spec.slo_s or 2.5,
        slo_met=True,
        retries=0,
        stage_durations_s={"encode": 0.1, "diffuse": 0.3, "decode": 0.1},
        timeline=(StageSpan(Stage.ENCODE, 1.0, 1.1, ("n0w0",)),),
        peak_memory_bytes=12_500 * 2**20 // 1000,
        tiled=False,
        fps=inputs.fps,
    )


def _make_outputs(spec: RequestSpec, inputs: GenerationInputs) -> tuple[bytes, ...]:
    if inputs.output_format in ("png", "jpeg", "webp"):
        return (make_picture(spec.shape.width, spec.shape.height, inputs.output_format),) * spec.num_outputs
    return tuple(make_video(inputs.prompt, index) for index in range(spec.num_outputs))


def make_video(prompt: str, index: int = 0) -> bytes:
    """The bytes that the fake makes in place of an MP4 file."""
    return f"video {index} of {prompt}".encode()


def make_png(width: int, height: int, colour: str = "black") -> bytes:
    return make_picture(width, height, "png", colour)


def make_picture(width: int, height: int, file_format: str, colour: str = "black") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, file_format)
    return buffer.getvalue()
