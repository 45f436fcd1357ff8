"""The models that the package ships, asked for pictures and clips that they were never trained on."""

from __future__ import annotations

from lib.judge.asking import PictureSampling, ask_pipeline, draw_questions
from lib.judge.motion_asking import ask_video_pipeline, draw_motion_questions
from lib.judge.motion_scoring import score_clip
from lib.judge.reading import read_picture
from lib.judge.scoring import average, score_picture

from tridentserve.models.model_folder import find_shipped_model


def test_pictures_have_the_colors_and_shapes_that_were_asked_for() -> None:
    questions = draw_questions(8, 128, seed=11)
    pictures = ask_pipeline(find_shipped_model("shapes"), questions, PictureSampling(16, 4.0))
    figures = average([score_picture(q.scene, read_picture(p)) for q, p in zip(questions, pictures, strict=True)])
    assert figures["color"] > 0.7
    assert figures["shape"] > 0.6
    assert figures["background"] > 0.7


def test_clips_have_the_colors_that_were_asked_for_and_move_where_they_should() -> None:
    questions = draw_motion_questions(6, 64, seed=11)
    clips = ask_video_pipeline(find_shipped_model("moving-shapes"), questions, PictureSampling(10, 4.0))
    figures = average([score_clip(q.scene, clip) for q, clip in zip(questions, clips, strict=True)])
    assert figures["color"] > 0.8
    assert figures["direction"] > 0.8
    assert figures["background"] > 0.7
