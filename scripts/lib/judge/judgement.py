"""The two kinds of models that are judged: how each is asked, and how what it made is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lib.default_video.clips import FRAMES
from lib.judge.asking import JudgedPrompt, PictureSampling, ask_pipeline, draw_questions, request_pictures
from lib.judge.motion_asking import ask_video_pipeline, draw_motion_questions, pass_through_mp4, request_clips
from lib.judge.motion_scoring import score_clip
from lib.judge.reading import read_picture
from lib.judge.scoring import score_picture


@dataclass(frozen=True)
class Judgement:
    """The judgement of one kind of model."""

    model: str
    """The shipped model of the kind."""
    draw: Callable[[int, int, int], Sequence[JudgedPrompt[Any]]]
    """(number, side in pixels, seed)."""
    ask_pipeline: Callable[[Path, Sequence[JudgedPrompt[Any]], PictureSampling], Iterator[np.ndarray]]
    """diffusers' own pipeline of a model folder, in this process."""
    request: Callable[
        [str, str, Sequence[JudgedPrompt[Any]], PictureSampling, int], Iterator[tuple[np.ndarray, dict[str, Any]]]
    ]
    """(address of a service, model, questions, settings, requests at a time): each with what the service says of it."""
    score: Callable[[Any, np.ndarray], Any]
    """(scene, what was made)."""
    store: Callable[[np.ndarray], np.ndarray]
    """The pixels that are left of what the pipeline made after the service's kind of file."""
    frames: int
    """The number of frames of a clip; 1 for a picture."""
    sides: tuple[int, ...]
    """In pixels, if a command names none."""


PICTURES = Judgement(
    model="shapes",
    draw=draw_questions,
    ask_pipeline=ask_pipeline,
    request=request_pictures,
    score=lambda scene, made: score_picture(scene, read_picture(made)),
    store=lambda picture: picture,
    frames=1,
    sides=(128, 256),
)
CLIPS = Judgement(
    model="moving-shapes",
    draw=draw_motion_questions,
    ask_pipeline=ask_video_pipeline,
    request=request_clips,
    score=score_clip,
    store=pass_through_mp4,
    frames=FRAMES,
    sides=(64, 96),
)
