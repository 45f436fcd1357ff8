"""The sample traces, and one request in both formats, for the tests of them."""

from __future__ import annotations

from pathlib import Path

from traces.requests import TraceRequest

SAMPLES = Path(__file__).parents[3] / "traces" / "data" / "samples"

LINE = (
    "Request(request_id=0, timestamp=0.5, height=256, width=512, num_frames=1, prompt='a \\'fox\\', red', "
    "negative_prompt='', num_inference_steps=28)"
)
HEADER = "request_id,timestamp,height,width,num_frames,prompt,negative_prompt,num_inference_steps"
ROW = "0,0.5,256,512,1,\"a 'fox', red\",,28"
REQUEST = TraceRequest("0", 0.5, 256, 512, 1, "a 'fox', red", "", 28)


def write(folder: Path, text: str) -> Path:
    """The file of a trace that has this text."""
    path = folder / "trace"
    path.write_text(text, encoding="utf-8", newline="")
    return path
