"""The text encoder learns which thing each word of a caption belongs to."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from lib.default_model import words
from lib.default_video.architecture import TEXT_TOKENS, build_text_encoder, build_tokenizer
from lib.default_video.clips import describe_motion
from lib.default_video.motion import DIRECTIONS, MovingScene, draw_motion
from lib.default_video.reading import WordLabels, teach_reading
from lib.training.optimizers import build_optimizers
from lib.training.shards import tokenize

torch.set_num_threads(1)

TOKENIZER = build_tokenizer()


def draw_captions(number: int) -> tuple[list[MovingScene], torch.Tensor]:
    rng = random.Random(4)
    scenes = [draw_motion(rng, 96, 96) for _ in range(number)]
    return scenes, tokenize(TOKENIZER, [describe_motion(scene, rng) for scene in scenes], TEXT_TOKENS)


def test_words_are_labelled_by_the_thing_that_they_describe() -> None:
    scenes, ids = draw_captions(200)
    assert {scene.kind for scene in scenes} == {"one", "two"}
    for scene, row, labels in zip(scenes, ids, WordLabels(TOKENIZER).label(ids), strict=True):
        read = [tuple(label) for label in labels.tolist()]
        expected = [
            (
                place,
                list(words.COLORS).index(part.thing.color),
                list(words.SHAPES).index(part.thing.shape),
                list(DIRECTIONS).index(part.direction),
            )
            for place, part in enumerate(scene.things)
        ]
        assert sorted(set(read) - {(-1, -1, -1, -1)}) == expected
        tokens = TOKENIZER.convert_ids_to_tokens(row.tolist())
        # The article is the first word of a thing; "and" and the background belong to none.
        assert read[0] == expected[0]
        for token, label in zip(tokens, read, strict=True):
            if token in {"▁and", "▁background", "▁on", TOKENIZER.pad_token, TOKENIZER.eos_token}:
                assert label == (-1, -1, -1, -1)


def test_reading_is_learned_and_goes_on_where_it_was(tmp_path: Path) -> None:
    _, ids = draw_captions(100)
    torch.manual_seed(0)
    encoder = build_text_encoder(TOKENIZER)
    assert teach_reading(tmp_path, encoder, TOKENIZER, ids, seed=1, steps=10, batch=8)
    assert teach_reading(tmp_path, build_text_encoder(TOKENIZER), TOKENIZER, ids, seed=1, steps=21, batch=8)
    log = [json.loads(line) for line in (tmp_path / "reading.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [0, 10, 20]
    assert log[-1]["error"] < 0.9 * log[0]["error"]


def test_layers_of_a_t5_are_trained_by_adam_at_a_lower_rate() -> None:
    """Made orthogonal, its updates let it grow until each word attends to one other, whatever their order."""
    linear = torch.nn.Linear(4, 4)
    blocks = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([linear])})
    encoder = build_text_encoder(TOKENIZER)
    matrices, others = build_optimizers([blocks, encoder], 1e-3)
    assert [each for group in matrices.param_groups for each in group["params"]] == [linear.weight]
    layers = {each for name, each in encoder.named_parameters() if "layer." in name and each.ndim == 2}
    slow = {each for group in others.param_groups if group.get("share", 1.0) < 1 for each in group["params"]}
    assert slow == layers
