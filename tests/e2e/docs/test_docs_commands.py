"""The curl lines, replays and Python handles of the documents, as they stand there, against a running service."""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.docs.commands import ShownCommand, list_commands
from tests.docs.test_paths import ROOT
from tests.e2e.conftest import Service
from tests.e2e.docs.handle_scripts import PAGES_WITH_HANDLES, SHOWN_URL, check_handle_script
from tests.support import http
from tests.support.processes import output_of
from tests.support.waiting import wait_until

LINES = list({command.text: command for command in list_commands() if command.text.startswith("curl")}.values())
IMAGES = [line for line in LINES if "/v1/images/generations" in line.text]
# The line for edits needs a model of its own; `tests/e2e/test_edits.py` runs it.
EDITS = [line for line in LINES if "/v1/images/edits" in line.text]
VIDEOS = [line for line in LINES if "/v1/videos" in line.text]
CHATS = [line for line in LINES if "/v1/chat/completions" in line.text]
QUOTES = [line for line in LINES if "/v1/quotes" in line.text]
# The service of the tests has no administrator's token. `tests/e2e/test_models_live.py` adds a LoRA to one that has.
LORAS = [line for line in LINES if line.text.endswith("}'") and "/loras" in line.text]
HEALTH = [line for line in LINES if line.text.endswith("/health")]


def run_line(line: ShownCommand, service: Service, folder: Path) -> str:
    """Run a line as a reader types it in this directory, with this Python's environment active, and return what it
    prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-o", "pipefail", "-c", line.text.replace(SHOWN_URL, service.url)]
    return output_of(command, folder, {**os.environ, "PATH": path})


def test_no_line_is_left_out() -> None:
    assert sorted(map(str, LINES)) == sorted(map(str, [*IMAGES, *EDITS, *VIDEOS, *CHATS, *QUOTES, *LORAS, *HEALTH]))
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


def test_loras_are_refused_without_a_token_as_the_page_says(service: Service, tmp_path: Path) -> None:
    (line,) = LORAS
    assert "TRIDENTSERVE_ADMIN_TOKEN" in json.loads(run_line(line, service, tmp_path))["error"]["message"]


def test_quotes(service: Service, tmp_path: Path) -> None:
    for line in QUOTES:
        quotes = json.loads(run_line(line, service, tmp_path))["data"]
        assert quotes
        assert all(quote["predicted_s"] > 0 for quote in quotes)


def test_chats(service: Service, tmp_path: Path) -> None:
    for line in CHATS:
        (choice,) = json.loads(run_line(line, service, tmp_path))["choices"]
        (part,) = choice["message"]["content"]
        content = base64.b64decode(part["image_url"]["url"].partition(",")[2])
        assert Image.open(io.BytesIO(content)).size == (256, 256)


def test_health(service: Service, tmp_path: Path) -> None:
    for line in HEALTH:
        assert json.loads(run_line(line, service, tmp_path))["status"] == "ready"


def test_a_replay(service: Service, tmp_path: Path) -> None:
    lines = [one for one in list_commands() if one.text.startswith("python scripts/replay_trace.py traces/data")]
    lines = [one for one in lines if "--url" in one.text]
    assert len(lines) >= 2
    # One of them, cut short; this service has several models, and the trace names none.
    words = shlex.split(lines[-1].text.replace(SHOWN_URL, service.url))[1:]
    output_of([sys.executable, *words, "--model", "tiny-sd3", "--limit", "3", "--out", str(tmp_path)], ROOT)
    assert json.loads((tmp_path / "summary.json").read_text())["completed_requests"] == 3


@pytest.mark.parametrize("page", PAGES_WITH_HANDLES)
def test_python_handles(page: str, service: Service, tmp_path: Path) -> None:
    request_id = check_handle_script(page, tmp_path, os.environ, service.url)
    assert http.get(f"{service.url}/v1/requests/{request_id}/explain").status_code == 200
