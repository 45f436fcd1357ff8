"""scripts/serve.py over a stand-in for `serve`: what it refuses, what it says, and that it leaves nothing behind."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import yaml

from tests.support import processes
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
# What the script says of a file that it refuses.
Refused = Callable[[Path], str]
# A script that stands in for `serve run CONFIG`: it answers /img/health, and ends in order on SIGINT.
SERVE = """#!{python}
import http.server, json, os, sys, yaml
from itertools import takewhile
from pathlib import Path
from subprocess import Popen

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        waits = {{"status": "waiting_for_gpus", "workers": 0, "problems": ["Ray has 0 GPUs"]}}
        ready = {{"status": "ready", "placement": {{"n0w0": "m:EDC"}}}}
        body = json.dumps(waits if config.with_name("lacks").exists() else ready).encode()
        self.send_response(200 if self.path == "/img/health" else 404)
        self.end_headers()
        self.wfile.write(body if self.path == "/img/health" else b"[]")
    def log_message(self, *_): pass

config = Path(sys.argv[2])
server = http.server.HTTPServer(("127.0.0.1", yaml.safe_load(config.read_text())["http_options"]["port"]), Handler)
config.with_name("pid").write_text(str(os.getpid()))
if config.with_name("ray").exists():
    print("2026-11-28 04:46:37,120\tINFO worker.py:2014 --", config.with_name("ray").read_text(), flush=True)
try:
    server.serve_forever()
except KeyboardInterrupt:
    config.with_name("ended").write_text("in order")
    if config.with_name("leave").exists():
        import subprocess
        left = subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        config.with_name("left").write_text(str(left.pid))
"""
# Code that runs a script as Python does, but with the `serve` of another Python.
CODE = (
    "import runpy, sys; sys.executable = {fake!r}; sys.argv = {argv!r}; sys.path[0] = {folder!r}; "
    "runpy.run_path({script!r}, run_name='__main__')"
)


def write_config(folder: Path, port: int, tiny: str = "sd3", **app: Any) -> Path:
    """Our application comes second, under a prefix, with limits that 256x256 and 8 steps are outside of."""
    limits = {"min_side": 320, "max_side": 512, "max_steps": 4, "max_prompt_chars": 12}
    args = {
        "models": [{"name": "m", "tiny": tiny, "profile_as": "tiny-sd3", "limits": limits}],
        "cluster": {"workers_per_node": 1, "memory_mb": 1024},
        "placement": ["EDC"],
        "cache_dir": str(folder),
    }
    ours = {"name": "ours", "route_prefix": "/img", "import_path": "deployments.app:build_app", "args": args, **app}
    other = {"name": "other", "route_prefix": "/other", "import_path": "json:dumps"}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"http_options": {"port": port}, "applications": [other, ours]}))
    return file


def started(config: Path) -> AbstractContextManager[Popen[str]]:
    fake = config.with_name("serve")
    fake.write_text(SERVE.format(python=sys.executable))
    fake.chmod(0o755)
    code = CODE.format(
        fake=str(config.with_name("python")),
        argv=["serve.py", str(config)],
        folder=str(ROOT / "scripts"),
        script=str(ROOT / "scripts" / "serve.py"),
    )
    # A proxy of the environment, which nobody answers for, is not asked. Streams have buffers, whatever it says.
    env = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "PYTHONUNBUFFERED": ""}
    return processes.started([sys.executable, "-c", code], ROOT, env)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the script in this process, which takes no seconds for imports."""

    def run(config: Path) -> str:
        monkeypatch.setattr("sys.argv", ["serve.py", str(config)])
        # Where no `serve` lies beside it: nothing can be started.
        monkeypatch.setattr("sys.executable", str(config.with_name("python")))
        assert runpy.run_path(str(ROOT / "scripts" / "serve.py"))["main"]() == 1
        return capsys.readouterr().err

    return run


def said_until_ready(output: Iterable[str]) -> Iterator[str]:
    return takewhile(lambda line: not line.startswith("Ctrl-C"), output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_service_in_order(number: signal.Signals, tmp_path: Path) -> None:
    config = write_config(tmp_path, free_port())
    with started(config) as process:
        assert process.stdout is not None
        text = "".join(said_until_ready(process.stdout))
        if number is signal.SIGHUP:  # the terminal is gone: nothing can be said any more
            assert process.stderr is not None
            process.stdout.close()
            process.stderr.close()
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE_S) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
    assert f":{yaml.safe_load(config.read_text())['http_options']['port']}/img/v1/images/generations" in text
    assert '{"model": "m", "prompt": "a red circle", "size": "320x320", "num_inference_steps": 4}' in text
    assert (tmp_path / "ended").read_text() == "in order"


def test_a_model_that_starts_from_a_image_is_shown_with_one(tmp_path: Path) -> None:
    with started(write_config(tmp_path, free_port(), tiny="flux_kontext")) as process:
        assert process.stdout is not None
        (command,) = (line for line in said_until_ready(process.stdout) if "curl" in line)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 0
    form = "-F model=m -F prompt='a red circle' -F num_inference_steps=4 -F image=@YOUR_IMAGE.png"
    assert f"/img/v1/images/edits {form} \\" in command


@pytest.mark.slow
def test_what_the_service_leaves_behind_is_killed(tmp_path: Path) -> None:
    config = write_config(tmp_path, free_port())
    (tmp_path / "leave").touch()
    with started(config) as process:
        assert process.stdout is not None
        assert list(said_until_ready(process.stdout))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        status = Path(f"/proc/{(tmp_path / 'left').read_text()}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()
    assert process.returncode == 1
    assert "did not end in time: killed" in errors


def test_gpus_that_no_node_will_bring_end_the_start(tmp_path: Path) -> None:
    config = write_config(tmp_path, free_port())
    (tmp_path / "lacks").touch()
    (tmp_path / "ray").write_text("Started a local Ray instance.")
    with started(config) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert errors.endswith("The service cannot start:\nRay has 0 GPUs\n")
    assert (tmp_path / "ended").read_text() == "in order"


def test_gpus_that_nodes_of_another_cluster_may_bring_are_waited_for(tmp_path: Path) -> None:
    config = write_config(tmp_path, free_port())
    (tmp_path / "lacks").touch()
    (tmp_path / "ray").write_text("Connected to Ray cluster.")
    with started(config) as process:
        assert process.stderr is not None
        assert any("Joined the Ray cluster" in line for line in process.stderr)
        (tmp_path / "lacks").unlink()
        assert process.stdout is not None
        assert list(said_until_ready(process.stdout))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 0


def test_a_port_that_is_taken_by_anything(refused: Refused, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"Something listens on port {port} of 127.0.0.1 already" in refused(write_config(tmp_path, port))
    assert not (tmp_path / "pid").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "cannot be read"), ("applications: []\nhttp_options:", "http_options: "), ("x", "must be a mapping")],
)
def test_files_that_are_no_configuration(refused: Refused, text: str | None, expected: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    if text is not None:
        config.write_text(text)
    assert expected in refused(config)


def test_an_application_without_an_address(refused: Refused, tmp_path: Path) -> None:
    assert "has no route_prefix" in refused(write_config(tmp_path, free_port(), route_prefix=None))
