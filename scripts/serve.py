"""Start a service: `serve run CONFIG`, with the address and a curl line once it is ready. Ctrl-C ends all of it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import yaml

_STOP_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="a Serve config file, such as deployments/quickstart.yaml")
    path: Path = parser.parse_args().config
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    url = _url(config)
    if _get(url) is not None:
        print(f"Something answers on {url} already: end it, or choose another port in {path}.", file=sys.stderr)
        return 1
    return _serve(path, url, config["applications"][0]["args"]["models"][0]["name"])


def _url(config: dict[str, Any]) -> str:
    http = config.get("http_options", {})
    host = http.get("host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{http.get('port', 8000)}"


def _serve(path: Path, url: str, model: str) -> int:
    stop = _Stop()
    # A handler is set before the child starts: a shell that runs this in the background has SIGINT ignored, which the
    # child would inherit. A session of its own: Ctrl-C reaches this process alone, which ends `serve run` in order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    began_s = time.monotonic()
    command = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
    child = subprocess.Popen(command, start_new_session=True)
    announced = False
    while child.poll() is None and not stop.asked:
        if not announced and (health := _get(url)) is not None and health.get("status") == "ready":
            _announce(url, model, health, time.monotonic() - began_s)
            announced = True
        time.sleep(0.25)
    if not stop.asked:
        return child.returncode or 1
    print("Ending the service ...", file=sys.stderr, flush=True)
    return _end(child)


class _Stop:
    """A signal handler that remembers."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def _end(child: subprocess.Popen[bytes]) -> int:
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        print(f"`serve run` did not end within {_STOP_S:.0f} s: killed", file=sys.stderr)
        os.killpg(child.pid, signal.SIGKILL)
        return 1
    return 0


def _get(url: str) -> dict[str, Any] | None:
    """The answer of /health, None when nothing answers."""
    try:
        answer: dict[str, Any] = httpx.get(f"{url}/health", timeout=6.0).json()
    except (httpx.HTTPError, ValueError):
        return None
    return answer


def _announce(url: str, model: str, health: dict[str, Any], seconds: float) -> None:
    workers = "\n".join(f"    {worker}: {kind}" for worker, kind in health["placement"].items())
    body = f'{{"model": "{model}", "prompt": "a lighthouse at dawn", "size": "256x256", "num_inference_steps": 8}}'
    decode = "base64.b64decode(json.load(sys.stdin)['data'][0]['b64_json'])"
    print(
        f"""
TridentServe is ready on {url} after {seconds:.0f} s. Its workers:
{workers}
Try it:
    curl -s {url}/v1/images/generations -H 'Content-Type: application/json' \\
      -d '{body}' \\
      | python3 -c "import base64, json, sys; open('picture.png', 'wb').write({decode})"
Ctrl-C ends it.
""",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
