"""Videos as files and as arrays, with sound and without."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import pytest

from deployments.plain_updates import to_plain
from tests.pipelines.models import make_inputs
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.engine.live.worker.reporting.output_files import encode_outputs
from tridentserve.models.decoded_outputs import DecodedOutputs, Sound, SoundVideo
from tridentserve.requests import GenerationInputs

RATE, SECONDS = 24000, 0.5


def decoded(channels: int | None) -> DecodedOutputs:
    """Two videos of grey, the second of which hums higher."""
    pixels = np.full((2, 12, 32, 48, 3), 128, np.uint8)
    times = np.arange(int(RATE * SECONDS), dtype=np.float32) / RATE
    hums = [np.sin(2 * np.pi * frequency * times) / 2 for frequency in (400, 900)]
    samples = np.stack([[hum] * (channels or 1) for hum in hums]).astype(np.float32)
    return DecodedOutputs(pixels, Sound(samples, RATE) if channels else None)


def request(output_format: Any) -> GenerationInputs:
    return make_inputs(32, 48, num_outputs=2, fps=24.0, output_format=output_format)


@pytest.mark.parametrize("channels", [1, 2])
def test_the_file_of_a_video_has_its_sound(channels: int) -> None:
    made, found = decoded(channels), []
    for file in encode_outputs(made, request("mp4")):
        assert isinstance(file, bytes)
        with av.open(io.BytesIO(file), "r") as container:
            assert [stream.type for stream in container.streams] == ["video", "audio"]
            assert container.streams.audio[0].rate == RATE
            blocks = [frame.to_ndarray() for frame in container.decode(audio=0)]
        samples = np.concatenate(blocks, axis=1)
        assert len(samples) == channels
        assert samples.shape[1] == pytest.approx(RATE * SECONDS, abs=2048)
        spectrum = np.abs(np.fft.rfft(samples[0]))
        found.append(spectrum.argmax() * RATE / samples.shape[1])
        with av.open(io.BytesIO(file), "r") as container:
            assert len(list(container.decode(video=0))) == 12
    assert found == pytest.approx([400, 900], rel=0.02)


def test_a_video_without_sound_has_no_track() -> None:
    for file in encode_outputs(decoded(None), request("mp4")):
        assert isinstance(file, bytes)
        with av.open(io.BytesIO(file)) as container:
            assert [stream.type for stream in container.streams] == ["video"]


def test_frames_come_with_the_samples_of_their_sound() -> None:
    made = decoded(2)
    result = describe(encode_outputs(made, request("frames")))
    assert made.sound is not None
    assert np.array_equal(result["frames"], made.pixels)
    assert np.array_equal(result["sounds"], made.sound.samples)
    assert result["sampling_rate"] == RATE


def test_frames_without_sound_are_plain_arrays() -> None:
    result = describe(encode_outputs(decoded(None), request("frames")))
    assert not any(isinstance(video, SoundVideo) for video in result["frames"])
    assert np.array_equal(result["frames"], decoded(None).pixels)
    assert "sounds" not in result


def describe(outputs: list[Any]) -> dict[str, Any]:
    """The answer that a caller of the Python handle gets."""
    inputs = request("frames")
    return to_plain(
        CompletedUpdate(
            "r", "m", tuple(outputs), "frames", 0, inputs.shape, 0, 0.0, 1.0, None, True, 0, {}, (), 0, False
        )
    )
