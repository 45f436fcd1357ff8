"""Prompts that the default video model was never trained on, and clips of them: by the stock pipeline, or a service."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import numpy as np

from lib.default_video.clips import FRAMES, describe_motion_plainly
from lib.default_video.motion import MovingScene, draw_motion
from lib.judge.asking import JudgedPrompt, PictureSampling, draw_prompts, make_bodies, post_bodies

_BATCH = 4


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


def ask_video_service(
    url: str, model: str, questions: Sequence[JudgedPrompt[MovingScene]], settings: PictureSampling, clients: int
) -> Iterator[np.ndarray]:
    """Ask a running service, with so many requests at a time. Raises `httpx.HTTPError`."""

    bodies = make_bodies(model, questions, settings, num_frames=FRAMES)
    for answer in post_bodies(f"{url}/v1/videos/sync", bodies, clients):
        with av.open(io.BytesIO(answer.content), mode="r") as file:
            yield np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
