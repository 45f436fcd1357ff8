"""The curl lines of the documents, as they stand there, against a running service."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tests import http
from tests.docs.commands import ShownCommand, list_commands
from tests.e2e.conftest import Service
from tests.processes import output_of
from tests.waiting import wait_until

SHOWN_URL = "http://127.0.0.1:8000"
LINES = list({command.text: command for command in list_commands() if command.text.startswith("curl")}.values())
IMAGES = [line for line in LINES if "/v1/images/generations" in line.text]
# The line for edits needs a model of its own; `test_edits.py` sends the same form.
EDITS = [line for line in LINES if "/v1/images/edits" in line.text]
VIDEOS = [line for line in LINES if "/v1/videos" in line.text]
HEALTH = [line for line in LINES if line.text.endswith("/health")]


def run_line(line: ShownCommand, service: Service, folder: Path) -> str:
    """What a line prints, which a reader has typed in this directory."""
    return output_of(["bash", "-o", "pipefail", "-c", line.text.replace(SHOWN_URL, service.url)], folder)


def test_no_line_is_left_out() -> None:
    assert sorted(map(str, LINES)) == sorted(map(str, [*IMAGES, *EDITS, *VIDEOS, *HEALTH]))
    assert len(IMAGES) >= 4


@pytest.mark.parametrize("line", IMAGES, ids=str)
def test_images(line: ShownCommand, service: Service, tmp_path: Path) -> None:
    printed = run_line(line, service, tmp_path)
    files = list(tmp_path.iterdir())
    if '"stream": true' in line.text:
        assert "image_generation.completed" in printed
    elif files:
        (file,) = files
        width, height = Image.open(io.BytesIO(file.read_bytes())).size
        assert f"{width}x{height}" in line.text
    else:
        assert json.loads(printed)["timeline"]


def test_videos(service: Service, tmp_path: Path) -> None:
    for line in VIDEOS:
        if line.text.endswith("/content -o fox.mp4"):
            wait_until(lambda: http.get(f"{service.url}/v1/videos/fox").json()["status"] == "completed", "the job ends")
        printed = run_line(line, service, tmp_path)
        assert "error" not in (json.loads(printed) if printed else {}) or json.loads(printed)["error"] is None
    assert b"ftyp" in (tmp_path / "fox.mp4").read_bytes()[:16]
    assert http.delete(f"{service.url}/v1/videos/fox").status_code == 200


def test_health(service: Service, tmp_path: Path) -> None:
    for line in HEALTH:
        assert json.loads(run_line(line, service, tmp_path))["status"] == "ready"
