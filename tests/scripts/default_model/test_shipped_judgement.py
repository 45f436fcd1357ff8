"""The models that the package ships, asked for pictures and clips that they were never trained on."""

from __future__ import annotations

import pytest
from lib.judge.asking import PictureSampling, ask_pipeline, draw_questions
from lib.judge.judgement import CLIPS, PICTURES, Judgement
from lib.judge.motion_asking import ask_video_pipeline, draw_motion_questions
from lib.judge.motion_scoring import score_clip
from lib.judge.reading import read_picture
from lib.judge.scoring import average, score_picture

from deployments.config.file import read_args
from tests.docs.test_paths import ROOT
from tridentserve.models.model_folder import find_shipped_model

# The shares that the models were trained to reach.
OF_PICTURES = {"color": 0.95, "shape": 0.9, "relation": 0.85}
OF_CLIPS = {"color": 0.85, "direction": 0.85}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judgement", "side", "least"),
    [(PICTURES, 128, OF_PICTURES), (PICTURES, 256, OF_PICTURES), (CLIPS, 64, OF_CLIPS), (CLIPS, 96, OF_CLIPS)],
    ids=["pictures-128", "pictures-256", "clips-64", "clips-96"],
)
def test_they_are_as_good_as_the_documents_say(judgement: Judgement, side: int, least: dict[str, float]) -> None:
    """With the settings of the quickstart, for 200 prompts."""
    models = read_args(ROOT / "deployments" / "quickstart.yaml").models
    defaults = next(model.defaults for model in models if model.name == judgement.model)
    assert defaults.num_inference_steps is not None
    settings = PictureSampling(defaults.num_inference_steps, defaults.guidance_scale)
    questions = judgement.draw(200, side, 1)
    made = judgement.ask_pipeline(find_shipped_model(judgement.model), questions, settings)
    figures = average([judgement.score(one.scene, each) for one, each in zip(questions, made, strict=True)])
    assert {name: figures[name] >= share for name, share in least.items()} == dict.fromkeys(least, True), figures
