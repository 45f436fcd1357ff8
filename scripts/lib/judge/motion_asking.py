"""Prompts that the default video model was never trained on, and clips of them: by the stock pipeline, or a service."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np

from lib.default_video.clips import FRAMES, describe_motion_plainly
from lib.default_video.motion import MovingScene, draw_motion
from lib.judge.asking import JudgedPrompt, PictureSampling, draw_prompts, make_bodies, post_bodies
from tridentserve.engine.live.worker.reporting.output_files import encode_mp4

_BATCH = 4
# Frames per second, of which an encoder makes use.
_FPS = 8


def draw_motion_questions(number: int, side: int, seed: int) -> list[JudgedPrompt[MovingScene]]:
    """Draw held-out moving scenes, the same for every side, until there are so many different prompts."""
    return draw_prompts(number, side, seed, draw_motion, describe_motion_plainly)


def ask_video_pipeline(
    folder: Path, questions: Sequence[JudgedPrompt[MovingScene]], settings: PictureSampling
) -> Iterator[np.ndarray]:
    """Make the clips with diffusers' own pipeline, in this process."""
    import torch

    from lib.default_video.pipeline import load_pipeline

    pipe = load_pipeline(folder)
    pipe.set_progress_bar_config(disable=True)
    for start in range(0, len(questions), _BATCH):
        batch = questions[start : start + _BATCH]
        clips = pipe(
            [question.prompt for question in batch],
            height=batch[0].side,
            width=batch[0].side,
            num_frames=FRAMES,
            generator=[torch.Generator().manual_seed(question.seed) for question in batch],
            output_type="np",
            **settings.list_chosen(),
        ).frames
        yield from (np.asarray(clips) * 255).round().astype(np.uint8)


def request_clips(
    url: str, model: str, questions: Sequence[JudgedPrompt[MovingScene]], settings: PictureSampling, clients: int
) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Ask a running service, with so many requests at a time: each clip, and what the service says of its request.
    Raises `httpx.HTTPError`."""
    bodies = make_bodies(model, questions, settings, num_frames=FRAMES, fps=_FPS)
    for answer in post_bodies(f"{url}/v1/videos/sync", bodies, clients):
        yield _read_mp4(answer.content), json.loads(answer.headers["X-Request-Facts"])


def pass_through_mp4(clip: np.ndarray) -> np.ndarray:
    """The frames of a clip, (frames, height, width, 3), after the encoder of the service."""
    return _read_mp4(encode_mp4(clip, _FPS))


def _read_mp4(content: bytes) -> np.ndarray:
    with av.open(io.BytesIO(content), mode="r") as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
