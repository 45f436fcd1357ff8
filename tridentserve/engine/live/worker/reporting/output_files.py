"""Encodes what C makes as the outputs that clients get: PNG, JPEG or WebP files, MP4 files of videos, or arrays of
frames. A video with sound has it in its MP4 file, or beside its frames."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tridentserve.errors import TridentServeError
from tridentserve.models.decoded_outputs import DecodedOutputs, Sound, SoundVideo
from tridentserve.requests import GenerationInputs

# Most clients receive an image once and drop it: speed counts more than the last tenth of its size.
_PNG_COMPRESS_LEVEL = 1
# Of JPEG and WebP files, where the client asks for none: no loss that is seen at a usual distance.
_QUALITY = 95
# Visually lossless for most eyes; of the presets the fastest that still predicts between frames well.
_H264 = {"crf": "18", "preset": "veryfast"}
# BT.709 in all three properties: players guess by the height of the frames where it is not said.
_BT709 = 1

EncodedOutput = bytes | NDArray[np.uint8] | SoundVideo


def encode_outputs(decoded: DecodedOutputs, inputs: GenerationInputs) -> list[EncodedOutput]:
    """One item per output of a request, in its `output_format`."""
    pixels, sounds = decoded.pixels, decoded.list_sounds()
    match inputs.output_format:
        case "png":
            return [_encode_image(image, "PNG", compress_level=_PNG_COMPRESS_LEVEL) for image in pixels]
        case "jpeg" | "webp":
            quality = _QUALITY if inputs.compression is None else inputs.compression
            return [_encode_image(image, inputs.output_format.upper(), quality=quality) for image in pixels]
        case "frames":
            return [
                frames if sound is None else SoundVideo(frames, sound)
                for frames, sound in zip(pixels, sounds, strict=True)
            ]
        case "mp4":
            if inputs.fps is None:
                raise TridentServeError("an MP4 file needs the frames per second")
            return [encode_mp4(frames, inputs.fps, sound) for frames, sound in zip(pixels, sounds, strict=True)]


def encode_mp4(frames: NDArray[np.uint8], fps: float, sound: Sound | None = None) -> bytes:
    """An MP4 file (H.264, 4:2:0; AAC) of (frames, height, width, 3), whose sides are even, and of the sound. Its index
    is in front, so that a player can begin before it has all."""
    # Workers that make no videos start without it, a third of a second sooner.
    import av
    from av.video.reformatter import ColorRange, Colorspace

    # A file on disk: to put the index in front, the muxer reads again what it wrote.
    with tempfile.TemporaryDirectory(prefix="tridentserve-") as folder:
        path = Path(folder) / "video.mp4"
        with av.open(path, "w", format="mp4", options={"movflags": "+faststart"}) as container:
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=_H264)
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            context = stream.codec_context
            context.colorspace = context.color_primaries = context.color_trc = _BT709
            context.color_range = ColorRange.MPEG
            hearing = None if sound is None else _add_sound(container, sound)
            for pixels in frames:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)))
            container.mux(stream.encode())
            if sound is not None and hearing is not None:
                samples = av.AudioFrame.from_ndarray(sound.samples, format="fltp", layout=hearing.layout)
                samples.sample_rate = sound.sampling_rate
                container.mux(hearing.encode(samples))
                container.mux(hearing.encode())
        return path.read_bytes()


def _add_sound(container: Any, sound: Sound) -> Any:
    """Add a stream of sound to a file, with one channel or two."""
    layout = "mono" if len(sound.samples) == 1 else "stereo"
    return container.add_stream("aac", rate=sound.sampling_rate, layout=layout)


def _encode_image(image: NDArray[np.uint8], file_format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format=file_format, **options)
    return buffer.getvalue()
