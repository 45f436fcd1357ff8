"""The pictures that the default model learns from, their captions, and the judge that reads pictures back."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from lib.default_model import words
from lib.default_model.captions import describe, describe_plainly
from lib.default_model.drawing import draw_picture, outline
from lib.default_model.scenes import DrawnScene, Thing, draw_scene
from lib.judge.asking import draw_questions
from lib.judge.reading import read_picture
from lib.judge.scoring import average, score_picture

SIZES = [(64, 64), (128, 128), (192, 128), (128, 256), (256, 256)]


def draw_scenes(number: int, width: int, height: int, held_out: bool = False) -> list[DrawnScene]:
    rng = random.Random(f"{width}x{height}")
    return [draw_scene(rng, width, height, held_out) for _ in range(number)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_things_lie_in_the_picture_and_where_the_relation_says(width: int, height: int) -> None:
    side = min(width, height)
    for scene in draw_scenes(200, width, height):
        for thing in scene.things:
            for x, y in outline(thing):
                assert -0.04 <= x <= width / side + 0.04
                assert -0.04 <= y <= height / side + 0.04
        if scene.relation is not None:
            right, down = words.RELATIONS[scene.relation]
            first, second = scene.things
            along, across = second.x - first.x, second.y - first.y
            if not right:
                along, across = across, along
            assert along * (right + down) > abs(across)


def test_held_out_combinations_are_never_trained_on() -> None:
    trained = {describe_plainly(scene).split(" on a ")[0] for scene in draw_scenes(3000, 128, 128)}
    prompts = {question.prompt for question in draw_questions(200, 128, 5)}
    assert len(prompts) == 200
    asked = {prompt.split(" on a ")[0] for prompt in prompts}
    assert not trained & asked


def test_captions_say_what_is_there_in_several_wordings() -> None:
    rng = random.Random(1)
    for scene in draw_scenes(100, 128, 128):
        texts = {describe(scene, rng).lower() for _ in range(30)}
        assert len(texts) > 5
        for thing in scene.things:
            assert all(thing.color in text for text in texts)
            assert all(any(noun in text for noun in words.SHAPES[thing.shape]) for text in texts)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_judge_reads_a_drawn_picture_without_an_error(width: int, height: int) -> None:
    for scene in draw_scenes(60, width, height, held_out=True):
        score = score_picture(scene, read_picture(draw_picture(scene, width, height)))
        assert (score.color, score.shape, score.count, score.background, score.relation) in (
            (1, 1, 1, 1, 1),
            (1, 1, 1, 1, None),
        ), scene


def test_the_judge_sees_what_is_wrong() -> None:
    for scene in draw_scenes(150, 128, 128):
        reading = read_picture(draw_picture(scene, 128, 128))
        thing = scene.things[0]
        others = [name for name in words.SHAPES if name not in {thing.shape for thing in scene.things}]
        assert score_picture(_change_first(scene, replace(thing, shape=others[0])), reading).shape < 1
        unused = [name for name in words.COLORS if name not in {thing.color for thing in scene.things}]
        assert score_picture(_change_first(scene, replace(thing, color=unused[0])), reading).color < 1
        if scene.relation is not None:
            swapped = replace(scene, things=scene.things[::-1])
            assert score_picture(swapped, reading).relation == 0
        if scene.kind == "count":
            fewer = replace(scene, things=scene.things[1:])
            assert score_picture(fewer, reading).count == 0


def test_noise_and_an_empty_picture_score_nothing() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    empty = np.full((128, 128, 3), 250, np.uint8)
    for picture in (noise, empty):
        figures = average([score_picture(scene, read_picture(picture)) for scene in draw_scenes(50, 128, 128)])
        assert figures["shape"] == figures["relation"] == figures["count"] == 0


def _change_first(scene: DrawnScene, thing: Thing) -> DrawnScene:
    return replace(scene, things=(thing, *scene.things[1:]))
