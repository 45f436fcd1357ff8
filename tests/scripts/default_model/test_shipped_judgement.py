"""The model that the package ships, asked for pictures that it was never trained on."""

from __future__ import annotations

from lib.judge.asking import PictureSampling, ask_pipeline, draw_questions
from lib.judge.reading import read_picture
from lib.judge.scoring import average, score_picture

from tridentserve.models.model_folder import find_shipped_model


def test_pictures_have_the_colors_that_were_asked_for() -> None:
    questions = draw_questions(8, 128, seed=11)
    pictures = ask_pipeline(find_shipped_model("shapes"), questions, PictureSampling(16, 4.0))
    figures = average([score_picture(q.scene, read_picture(p)) for q, p in zip(questions, pictures, strict=True)])
    assert figures["color"] > 0.7
    assert figures["background"] > 0.7
