"""Prompts that the default model was never trained on, and their pictures: by the stock pipeline, or by a service."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
import numpy as np
from PIL import Image

from lib.default_model.captions import describe_plainly
from lib.default_model.scenes import DrawnScene, draw_scene

_BATCH_PIXELS = 8 * 128 * 128


AskedScene = TypeVar("AskedScene")


@dataclass(frozen=True)
class JudgedPrompt(Generic[AskedScene]):
    """A scene that was never trained on, and how a picture or a clip of it is asked for."""

    scene: AskedScene
    prompt: str
    side: int
    """Width and height in pixels."""
    seed: int


@dataclass(frozen=True)
class PictureSampling:
    """Values of all requests; None leaves them to the model's defaults."""

    steps: int | None
    guidance_scale: float | None

    def list_chosen(self) -> dict[str, Any]:
        """The values that are not left to the model, by their names in requests and in diffusers' pipelines."""
        values = {"num_inference_steps": self.steps, "guidance_scale": self.guidance_scale}
        return {name: value for name, value in values.items() if value is not None}


def draw_questions(number: int, side: int, seed: int) -> list[JudgedPrompt[DrawnScene]]:
    """Draw held-out scenes, the same for every side, until there are so many different prompts."""
    return draw_prompts(number, side, seed, draw_scene, describe_plainly)


def draw_prompts(
    number: int,
    side: int,
    seed: int,
    draw: Callable[[random.Random, int, int, bool], AskedScene],
    describe: Callable[[AskedScene], str],
) -> list[JudgedPrompt[AskedScene]]:
    """As `draw_questions`, with scenes of any kind: `draw` takes width, height and whether they are held out."""
    rng = random.Random(seed)
    scenes: dict[str, AskedScene] = {}
    while len(scenes) < number:
        scene = draw(rng, 1, 1, True)
        scenes.setdefault(describe(scene), scene)
    return [JudgedPrompt(scene, prompt, side, seed * 1_000_000 + i) for i, (prompt, scene) in enumerate(scenes.items())]


def ask_pipeline(
    folder: Path, questions: Sequence[JudgedPrompt[DrawnScene]], settings: PictureSampling
) -> Iterator[np.ndarray]:
    """Make the pictures with diffusers' own pipeline, in this process."""
    import torch
    from diffusers import StableDiffusion3Pipeline

    pipe: Any = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    size = max(1, _BATCH_PIXELS // questions[0].side ** 2)
    for start in range(0, len(questions), size):
        batch = questions[start : start + size]
        images = pipe(
            [question.prompt for question in batch],
            height=batch[0].side,
            width=batch[0].side,
            max_sequence_length=pipe.tokenizer_3.model_max_length,
            generator=[torch.Generator().manual_seed(question.seed) for question in batch],
            **settings.list_chosen(),
        ).images
        yield from map(np.asarray, images)


def request_pictures(
    url: str, model: str, questions: Sequence[JudgedPrompt[DrawnScene]], settings: PictureSampling, clients: int
) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Ask a running service, with so many requests at a time: each picture, and the service's whole answer. Raises
    `httpx.HTTPError`."""
    bodies = make_bodies(model, questions, settings)
    for answer in post_bodies(f"{url}/v1/images/generations", bodies, clients):
        content = answer.json()
        image = Image.open(io.BytesIO(base64.b64decode(content["data"][0]["b64_json"])))
        yield np.asarray(image.convert("RGB")), content


def make_bodies(
    model: str, questions: Sequence[JudgedPrompt[Any]], settings: PictureSampling, **further: Any
) -> list[dict[str, Any]]:
    """The bodies of requests for all questions, with `further` fields in each."""
    return [
        {
            "model": model,
            "prompt": question.prompt,
            "size": f"{question.side}x{question.side}",
            "seed": question.seed,
            **settings.list_chosen(),
            **further,
        }
        for question in questions
    ]


def post_bodies(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> Iterator[httpx.Response]:
    """The answers to all bodies, in order, so many at a time. Raises `httpx.HTTPError`."""

    def post(body: dict[str, Any]) -> httpx.Response:
        return client.post(url, json=body).raise_for_status()

    with httpx.Client(timeout=600) as client, ThreadPoolExecutor(clients) as pool:
        yield from pool.map(post, bodies)
