from __future__ import annotations

import csv
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from PIL import Image

from tests.support.processes import run, started
from tests.support.waiting import PATIENCE_S, wait_until
from tests.traces.client.image_service import MODEL, ImageService, running

ROOT = Path(__file__).parents[3]
# The form of the published traces, to the letter.
LINES = "".join(
    f"Request(request_id={index}, timestamp={0.066667 * index:.6f}, height={size}, width={size}, num_frames=1, "
    "prompt='A futuristic cityscape', negative_prompt='low quality, blurry', num_inference_steps=28)\n"
    for index, size in enumerate([256, 1024, 2048, 256, 512, 1024, 128, 512])
)


@pytest.fixture
def service() -> Iterator[ImageService]:
    with running(ImageService(slo_s=600.0, modality={MODEL: "image"})) as running_service:
        yield running_service


def replay_trace(folder: Path, *arguments: str, trace: str = LINES) -> CompletedProcess[str]:
    (folder / "trace.txt").write_text(trace)
    command = [sys.executable, str(ROOT / "scripts" / "replay_trace.py"), "trace.txt", *arguments]
    return run(command, folder)


def test_end_to_end(tmp_path: Path, service: ImageService) -> None:
    options = ["--speed", "2", "--limit", "6", "--scale-pixels", "0.015625", "--steps", "4", "--out", "out"]
    options += ["--save-images", "images"]
    done = replay_trace(tmp_path, "--url", service.url, *options)
    assert done.returncode == 0, done.stderr
    assert "6/6" in done.stderr
    assert "failed=0" in done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (figures["completed_requests"], figures["failed_requests"]) == (6, 0)
    assert figures["slo_attainment_rate"] == 1.0
    assert figures["diffuse_degrees"] == {"1": 3, "2": 3}
    assert "completed / failed     6 / 0" in done.stdout
    assert [body["size"] for body in service.bodies] == [f"{side}x{side}" for side in (32, 128, 256, 32, 64, 128)]
    saved = sorted((tmp_path / "images").iterdir())
    assert [path.name for path in saved] == [f"{index:06d}-{index}.png" for index in range(6)]
    widths = []
    for path in saved:
        with Image.open(path) as image:
            widths.append(image.width)
    assert widths == [32, 128, 256, 32, 64, 128]
    assert {body["num_inference_steps"] for body in service.bodies} == {4}
    with (tmp_path / "out" / "requests.csv").open(newline="") as file:
        assert [row["decode_workers"] for row in csv.DictReader(file)] == ["w3"] * 6
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"encode", "diffuse", "decode"}


def test_rows_say_what_is_done_when_they_are_late_and_how_urgent_they_are(
    tmp_path: Path, service: ImageService
) -> None:
    service.modes = {1: "refuse", 2: "reduce"}
    trace = LINES.replace("=28)", "=28, seed=1, on_late='refuse')", 1)
    trace = trace.replace("=28)", "=28, seed=2, on_late='degrade', priority=3)", 1)
    done = replay_trace(tmp_path, "--url", service.url, "--limit", "3", "--scale-pixels", "0.01", trace=trace)
    assert done.returncode == 1, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert [figures[f"{name}_requests"] for name in ("completed", "failed", "refused", "degraded")] == [2, 1, 1, 1]
    bodies = sorted(service.bodies, key=lambda body: body.get("seed", 9))
    assert [(body.get("on_late"), body.get("priority")) for body in bodies] == [
        ("refuse", None),
        ("degrade", 3),
        (None, None),
    ]


def test_exit_status_1_when_a_request_failed(tmp_path: Path, service: ImageService) -> None:
    service.modes = {7: "error"}
    trace = LINES.replace("=28)", "=28, seed=7)", 1)
    done = replay_trace(tmp_path, "--url", service.url, "--limit", "2", "--scale-pixels", "0.01", trace=trace)
    assert done.returncode == 1, done.stderr
    assert "failed=1" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["errors"] == {"HTTP 500: out of memory": 1}
    assert (tmp_path / "out" / "replay" / "summary.json").exists()


@pytest.mark.parametrize(
    ("arguments", "trace", "message"),
    [
        (["--url", "URL", "--limit", "0"], LINES, "--limit"),
        (["--url", "URL", "--speed", "nan"], LINES, "--speed"),
        (["--url", "URL", "--colour"], LINES, "--colour"),
        ([], LINES, "--url"),
        (["--url", "URL"], LINES + "Request(request_id=9)", "line 9: missing field timestamp"),
        (["--url", "URL"], LINES.replace("num_frames=1", "num_frames=17"), "17 frames"),
        (["--url", "URL", "--model", "sdxl"], LINES, "does not serve 'sdxl'"),
        (["--url", "http://127.0.0.1:1"], LINES, "nothing listens"),
        (
            ["--url", "http://127.0.0.1:99999"],
            LINES,
            "http://127.0.0.1:99999 has the port 99999: a port is at most 65535",
        ),
        (["--url", "URL", "--scale-pixels", "1e300"], LINES, "request 0 asks for 3e+152 x 3e+152 pixels"),
        (["--url", "URL", "--scale-pixels", "100"], LINES, "request 2 asks for 20,480 x 20,480 pixels"),
        (["--url", "URL", "--out", "trace.txt"], LINES, "trace.txt"),
    ],
)
def test_bad_usage_is_exit_status_2_and_one_line(
    tmp_path: Path, service: ImageService, arguments: list[str], trace: str, message: str
) -> None:
    done = replay_trace(tmp_path, *[service.url if word == "URL" else word for word in arguments], trace=trace)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("replay_trace: ")
    assert message in done.stderr
    assert not service.bodies


def interrupt(folder: Path, service: ImageService) -> tuple[int, str, str]:
    """Ctrl-C once the progress bar shows as many ended requests as the service answers, 0 or 1. One request is sent in
    each second, and the bar is drawn again with each."""
    fields = LINES.splitlines()[0].partition("timestamp=0.000000, ")[2]
    lines = (f"Request(request_id={i}, timestamp={i}.0, {fields}" for i in range(1000))
    (folder / "trace.txt").write_text("\n".join(lines))
    command = [sys.executable, str(ROOT / "scripts" / "replay_trace.py"), "trace.txt", "--url", service.url]
    with started(command, folder) as replaying:
        assert replaying.stderr is not None
        next(line for line in replaying.stderr if f"{service.num_answered}/1000 " in line)
        wait_until(lambda: bool(service.bodies), "a request comes in")
        replaying.send_signal(signal.SIGINT)
        stdout, stderr = replaying.communicate(timeout=PATIENCE_S)
    return replaying.returncode, stdout, stderr


def test_ctrl_c_reports_what_has_ended(tmp_path: Path, service: ImageService) -> None:
    service.num_answered = 1
    status, stdout, stderr = interrupt(tmp_path, service)
    assert status == 130
    assert stderr.splitlines()[-1] == "replay_trace: interrupted; 1 of 1000 requests had ended"
    figures = json.loads(stdout.splitlines()[-1])
    assert (figures["completed_requests"], figures["failed_requests"]) == (1, 0)
    assert figures == json.loads((tmp_path / "out" / "replay" / "summary.json").read_text())


def test_ctrl_c_before_anything_ended_leaves_no_report(tmp_path: Path, service: ImageService) -> None:
    service.num_answered = 0
    status, stdout, stderr = interrupt(tmp_path, service)
    assert (status, stdout) == (130, "")
    assert stderr.splitlines()[-1] == "replay_trace: interrupted; 0 of 1000 requests had ended; no report written"
    assert not (tmp_path / "out" / "replay" / "summary.json").exists()


def test_the_client_starts_without_heavy_imports() -> None:
    code = (
        "import sys; sys.argv = ['replay_trace', '--help']; import runpy\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"  # as Python does for a script that is run by name
        f"try: runpy.run_path({str(ROOT / 'scripts' / 'replay_trace.py')!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "sys.exit(','.join({'torch', 'ray', 'diffusers', 'pandas', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
