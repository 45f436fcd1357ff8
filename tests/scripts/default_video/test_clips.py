"""The clips that the default video model learns from, their captions, and the judge that reads clips back."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from lib.default_model import words
from lib.default_model.drawing import outline
from lib.default_video.architecture import TEXT_TOKENS, build_tokenizer, list_motion_words
from lib.default_video.clips import FRAMES, describe_motion, describe_motion_plainly, draw_clip
from lib.default_video.denoiser_training import draw_clip_size
from lib.default_video.latents import CLIP_SIZES
from lib.default_video.motion import DIRECTIONS, TRAINED_KINDS, Area, MovingScene, draw_motion, part_picture
from lib.default_video.vae_training import draw_crop
from lib.judge.motion_asking import draw_motion_questions, pass_through_mp4
from lib.judge.motion_scoring import score_clip

SIDES = [64, 96, 128]


def draw_scenes(number: int, side: int, held_out: bool = False) -> list[MovingScene]:
    rng = random.Random(side)
    return [draw_motion(rng, side, side, held_out) for _ in range(number)]


def test_clips_are_small_or_of_any_size() -> None:
    rng = random.Random(3)
    smaller, larger = CLIP_SIZES
    assert {draw_clip_size(rng, is_any=False) for _ in range(100)} == {smaller}
    assert {draw_clip_size(rng, is_any=True) for _ in range(100)} == {smaller, larger}


@pytest.mark.parametrize("side", SIDES)
def test_things_stay_in_the_picture_and_apart(side: int) -> None:
    for scene in draw_scenes(200, side):
        for progress in (0, 0.3, 1):
            frozen = scene.freeze(progress)
            for thing in frozen.things:
                for x, y in outline(thing):
                    assert -0.04 <= x <= 1.04
                    assert -0.04 <= y <= 1.04
            if len(frozen.things) == 2:
                one, other = frozen.things
                distance = ((one.x - other.x) ** 2 + (one.y - other.y) ** 2) ** 0.5
                assert distance > 0.5 * (one.diameter + other.diameter)


def test_held_out_motions_are_never_trained_on() -> None:
    trained = {describe_motion_plainly(scene).split(" on a ")[0] for scene in draw_scenes(3000, 96)}
    prompts = {question.prompt for question in draw_motion_questions(200, 96, 5)}
    assert len(prompts) == 200
    assert not trained & {prompt.split(" on a ")[0] for prompt in prompts}


def test_as_many_clips_that_are_trained_on_have_two_things_as_was_meant() -> None:
    """Two of one color are drawn again: that must not leave fewer of them."""
    scenes = draw_scenes(1000, 96)
    assert sum(scene.kind == "two" for scene in scenes) / 1000 == pytest.approx(TRAINED_KINDS["two"], abs=0.05)


@pytest.mark.parametrize("side", SIDES)
def test_each_of_two_things_that_are_trained_on_has_a_part_of_the_picture_for_itself(side: int) -> None:
    for scene in draw_scenes(200, side):
        if scene.kind == "two":
            parts = part_picture(Area(0.0, 0.0, 1.0, 1.0), *(part.direction for part in scene.things))
            for area, moving in zip(parts, scene.things, strict=True):
                for thing in (moving.move(0), moving.move(1)):
                    reach = thing.diameter / 2
                    assert area.left <= thing.x - reach <= thing.x + reach <= area.right
                    assert area.top <= thing.y - reach <= thing.y + reach <= area.bottom


@pytest.mark.parametrize("first", DIRECTIONS)
@pytest.mark.parametrize("second", DIRECTIONS)
def test_two_things_part_the_picture_in_the_order_of_reading(first: str, second: str) -> None:
    picture = Area(0.0, 0.0, 1.5, 1.0)
    one, other = part_picture(picture, first, second)
    assert (one.left, one.top, other.right, other.bottom) == (0.0, 0.0, 1.5, 1.0)
    if {first, second} <= {"up", "down"}:
        assert (one.right, one.bottom, other.top) == (other.left, 1.0, 0.0)
    else:
        assert (one.bottom, one.right, other.left) == (other.top, 1.5, 0.0)
        # The one that moves up or down has more room.
        if first in {"up", "down"}:
            assert one.bottom > 0.5
        elif second in {"up", "down"}:
            assert one.bottom < 0.5
        else:
            assert one.bottom == 0.5


def test_captions_say_what_moves_where_and_fit() -> None:
    rng = random.Random(1)
    tokenizer = build_tokenizer()
    for word in list_motion_words():
        assert len(tokenizer.tokenize(word)) == 1, word
    for scene in draw_scenes(100, 96):
        texts = {describe_motion(scene, rng) for _ in range(20)}
        assert len(texts) > 5
        for text in texts:
            for part in scene.things:
                assert part.thing.color in text
                assert part.direction in text
                assert any(noun in text for noun in words.SHAPES[part.thing.shape])
            assert len(tokenizer(text, truncation=False).input_ids) <= TEXT_TOKENS
            assert tokenizer.unk_token_id not in tokenizer(text).input_ids


@pytest.mark.parametrize("side", SIDES)
def test_the_judge_reads_a_drawn_clip_without_an_error(side: int) -> None:
    for scene in draw_scenes(25, side, held_out=True):
        score = score_clip(scene, draw_clip(scene, side, side))
        assert (score.color, score.shape, score.direction, score.background) == (1, 1, 1, 1), scene


@pytest.mark.parametrize("side", SIDES)
def test_the_judge_reads_the_clip_of_a_file(side: int) -> None:
    for scene in draw_scenes(10, side, held_out=True):
        clip = pass_through_mp4(draw_clip(scene, side, side))
        assert clip.shape == (FRAMES, side, side, 3)
        score = score_clip(scene, clip)
        assert (score.color, score.direction, score.background) == (1, 1, 1), scene


def test_the_judge_sees_what_is_wrong() -> None:
    for scene in draw_scenes(40, 96):
        clip = draw_clip(scene, 96, 96)
        assert score_clip(scene, clip[::-1]).direction == 0
        assert score_clip(scene, np.repeat(clip[:1], FRAMES, 0)).direction == 0
        first = scene.things[0]
        others = [direction for direction in DIRECTIONS if direction != first.direction]
        assert score_clip(replace(scene, things=(replace(first, direction=others[0]),)), clip).direction == 0
        unused = next(name for name in words.COLORS if name not in {part.thing.color for part in scene.things})
        recolored = replace(first, thing=replace(first.thing, color=unused))
        assert score_clip(replace(scene, things=(recolored,)), clip).color == 0


def test_a_crop_is_a_part_of_a_clip() -> None:
    rng = random.Random(2)
    crops = np.stack([draw_crop(rng) for _ in range(20)])
    assert crops.shape == (20, 9, 32, 32, 3)
    moving = [crop for crop in crops if (crop[0] != crop[-1]).any()]
    assert len(moving) > 15
