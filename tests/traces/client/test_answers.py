from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.traces.client.image_service import mp4, png
from traces.client.answers import FACTS_HEADER, read_image, read_video
from traces.results import AnswerFacts, TimelineEntry


def body(image: bytes | None = None, **fields: Any) -> bytes:
    encoded = base64.b64encode(png(48, 32) if image is None else image).decode()
    return json.dumps({"created": 1, "data": [{"b64_json": encoded}]} | fields).encode()


def test_facts_are_read_and_other_fields_ignored() -> None:
    span = {"stage": "diffuse", "workers": ["w1", "w2"], "degree": 2, "start_s": 1.5, "end_s": 2, "steps": 4}
    facts = read_image(
        body(timeline=[span], stage_durations={"diffuse": 0.5}, slo_s=3, slo_met=True, queue_s=0, id="x"), 48, 32
    )
    assert facts == AnswerFacts(
        timeline=(TimelineEntry(stage="diffuse", workers=("w1", "w2"), degree=2, start_s=1.5, end_s=2.0, steps=4),),
        stage_durations={"diffuse": 0.5},
        slo_s=3.0,
        slo_met=True,
        queue_s=0.0,
    )


def test_a_service_that_is_not_ours_tells_no_facts() -> None:
    assert read_image(body(stage_durations=None, timeline=None, peak_memory_mb=None), 48, 32) == AnswerFacts()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "no data"),
        (b"[]", "no data"),
        (b'{"data": []}', "no data"),
        (b'{"data": [{"url": "http://127.0.0.1/x.png"}]}', "no data"),
        (b'{"data": [{"b64_json": "*"}]}', "no data"),
        (b'{"data": [{"b64_json": ""}]}', "cannot be read"),
        (b"[" * 100_000, "no data"),
        (body(b"GIF89a nonsense"), "cannot be read"),
        (body(png(32, 48)), "is 32x48 where 48x32"),
        (body(png(48, 32)[:-600]), "damaged"),
        (body(timeline=[{"stage": "encode"}]), r"timeline.0.workers is malformed: Field required"),
        (body(timeline=[{"stage": "e", "workers": [], "degree": 1, "start_s": 0, "end_s": 1}]), "timeline.0.workers"),
        (body(stage_durations={"encode": float("nan")}), "stage_durations.encode is malformed"),
        (body(queue_s="soon"), "queue_s is malformed"),
    ],
)
def test_a_bad_answer_is_reported_in_one_line(answer: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as failure:
        read_image(answer, 48, 32)
    assert "\n" not in str(failure.value)


def test_a_video_is_decoded_to_its_end() -> None:
    facts = read_video(mp4(64, 48, 5), {FACTS_HEADER: '{"queue_s": 2, "seed": 7}'}, 64, 48, 5)
    assert facts == AnswerFacts(queue_s=2.0)
    assert read_video(mp4(64, 48, 1), {}, 64, 48, 1) == AnswerFacts()


@pytest.mark.parametrize(
    ("content", "facts", "message"),
    [
        (b"", "{}", "cannot be read"),
        (b"<html>", "{}", "cannot be read"),
        (png(64, 48), "{}", "1 frames where 5"),
        (mp4(64, 48, 5)[:500], "{}", "cannot be read"),
        (mp4(64, 48, 4), "{}", "4 frames where 5"),
        (mp4(48, 64, 5), "{}", "is 48x64 where 64x48"),
        (mp4(64, 48, 5), "[]", "no JSON object"),
        (mp4(64, 48, 5), "{", "no JSON object"),
        (mp4(64, 48, 5), '{"queue_s": "soon"}', "queue_s is malformed"),
    ],
)
def test_a_bad_video_is_reported_in_one_line(content: bytes, facts: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as failure:
        read_video(content, {FACTS_HEADER: facts}, 64, 48, 5)
    assert "\n" not in str(failure.value)
