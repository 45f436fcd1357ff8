"""Start a service: `serve run CONFIG`, with the address and a curl line once it is ready. Ctrl-C ends all of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import httpx
import yaml
from lib.command_line import Parser
from lib.serve_console import SESSION_LOGS, ServeConsole
from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

from deployments.config.file import read_args
from deployments.models.served import ServedModel, build_served_models
from deployments.replica_logs import prepare_logs
from deployments.serve.gpu_shortage import WAITING_FOR_GPUS
from deployments.serve.ingress import list_ingress_settings
from deployments.validation.serve_file import check_config, is_ours
from tridentserve.errors import ModelFolderError

# The time that `serve run` has to end, and after its end the processes that it started.
_STOP_S, _LEFT_BEHIND_S = 30.0, 10.0
_TOKEN = Path("~/.ray/auth_token")
# NIXL says what goes wrong, and no more.
_QUIET = {"NIXL_LOG_LEVEL": "WARN"}
_PROMPT, _SIDE, _STEPS = "a red circle above a blue square", 256, 8
# Addresses to listen on everywhere, and one on which this machine then reaches itself.
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("config", type=Path, help="a Serve config file, such as deployments/quickstart.yaml")
    path: Path = parser.parse_args().config
    if problems := check_config(path):
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    app = next(app for app in config.applications if is_ours(app))
    if app.route_prefix is None:
        print(f"{path}: {app.name} has no route_prefix, so no address; start it with `serve run`", file=sys.stderr)
        return 1
    host = _choose_host(config.http_options)
    if _is_listening(host, config.http_options.port):
        print(
            f"Something listens on port {config.http_options.port} of {host} already: end it, or choose another port "
            f"in {path}.",
            file=sys.stderr,
        )
        return 1
    if not _fetch_models(path):
        return 1
    model = next(iter(build_served_models(read_args(path).models).values()))
    return _serve(path, _build_url(host, config.http_options.port, app.route_prefix), model)


def _fetch_models(path: Path) -> bool:
    """Fetch the models of the hub to this machine, so that what is wrong with them shows before anything is started;
    the service brings them to other nodes. The result is False when the configuration does not fit them."""
    wanted = [model.hub_model for model in read_args(path).models if model.hub_model is not None]
    if not wanted:
        return True
    # Imported here: other configurations need nothing of huggingface_hub.
    from tridentserve.hub.fetching import fetch_to_cache

    prepare_logs()
    try:
        for model in dict.fromkeys(wanted):
            fetch_to_cache(model)
    except ModelFolderError as error:
        problems = [str(error)]
    except KeyboardInterrupt:
        problems = ["Ended while models were fetched; the next start goes on from there."]
    else:
        problems = check_config(path)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return not problems


def _choose_host(http: HTTPOptionsSchema) -> str:
    return _ANY_HOST.get(http.host, http.host)


def _build_url(host: str, port: int, route_prefix: str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{route_prefix.rstrip('/')}"


def _is_listening(host: str, port: int) -> bool:
    """True when anything accepts connections there, whatever its protocol."""
    try:
        with socket.create_connection((host, port), timeout=2.0):
            return True
    except OSError:
        return False


def _serve(path: Path, url: str, model: ServedModel) -> int:
    stop = _Stop()
    # Handlers are set before the child starts: a shell that runs this in the background has SIGINT ignored, which the
    # child would inherit. A session of its own: Ctrl-C reaches this process alone, which ends `serve run` in order.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as with nohup: then a closed terminal is no end
        signal.signal(signal.SIGHUP, stop)
    began_s = time.monotonic()
    command = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
    environment = {**_QUIET, **list_ingress_settings(), **os.environ, "PYTHONUNBUFFERED": "1"}
    _warn_of_token()
    tiny = " The first start also makes tiny models." if any(model.tiny for model in read_args(path).models) else ""
    _say(f"Starting {path}; Ray first.{tiny} All that Ray says: {SESSION_LOGS}")
    child = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    console = ServeConsole()
    shower = threading.Thread(target=_show_output, args=(child, console), daemon=True)
    shower.start()
    lacks: list[str] = []
    try:
        announced = False
        while child.poll() is None and not stop.asked and not lacks:
            if not announced and (health := _fetch_health(url)) is not None:
                if health.get("status") == "ready":
                    _announce(url, model, health, time.monotonic() - began_s)
                    announced = True
                elif health.get("status") == WAITING_FOR_GPUS and console.has_own_ray:
                    lacks = health["problems"]
            time.sleep(0.25)
    finally:
        ended = child.poll() is not None or _end(child)
    if lacks:
        _say("\n".join(["The service cannot start:", *lacks]))
        return 1
    if not stop.asked:
        shower.join(_LEFT_BEHIND_S)
        _say(f"The service has ended by itself, with exit status {child.returncode}. Why: above, and in {SESSION_LOGS}")
        return child.returncode or 1
    return 0 if ended else 1


def _show_output(child: subprocess.Popen[str], console: ServeConsole) -> None:
    """Read what the service prints to its end, whether or not somebody reads what is shown of it."""
    assert child.stdout is not None
    for line in child.stdout:
        if (shown := console.translate(line)) is not None:
            _say(shown)


def _warn_of_token() -> None:
    """A process whose Ray finds a token takes no answers of a cluster without one, and waits for ever."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled" and _TOKEN.expanduser().exists():
        _say(
            f"WARNING RAY_AUTH_MODE=disabled is set here, and {_TOKEN} exists: a program that calls Python handles "
            "waits for ever unless it takes RAY_AUTH_MODE from /v1/handle, as README.md has it. Unset it here, and "
            "both use the token."
        )


class _Stop:
    """A signal handler that remembers."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def _end(child: subprocess.Popen[str]) -> bool:
    """False when something had to be killed. The signal goes first: a closed terminal takes no messages."""
    child.send_signal(signal.SIGINT)
    _say("Ending the service ...")
    with suppress(subprocess.TimeoutExpired):
        child.wait(_STOP_S)
        # Where the terminal is gone `serve run` trips over its own messages, and leaves processes of Ray behind.
        deadline_s = time.monotonic() + _LEFT_BEHIND_S
        while _has_members(child.pid) and time.monotonic() < deadline_s:
            time.sleep(0.1)
    if not _has_members(child.pid):
        return True
    _say("The service did not end in time: killed")
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return False


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _say(text: str, stream: TextIO = sys.stderr) -> None:
    """Print a line even if its reader is gone: the service does not stop for that, and its shutdown continues."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        # Python would try to write it again at its end, fail again, and end with status 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fetch_health(url: str) -> dict[str, Any] | None:
    """The answer of /health, None when nothing answers, or not with an object."""
    try:
        # Not through a proxy of the environment: the service is on this machine.
        answer = httpx.get(f"{url}/health", timeout=6.0, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _announce(url: str, model: ServedModel, health: dict[str, Any], seconds: float) -> None:
    workers = "\n".join(f"    {worker}: {kind}" for worker, kind in health["placement"].items())
    _say(
        f"""
TridentServe is ready on {url} after {seconds:.0f} s. Its workers:
{workers}
Try it:
{_format_example(url, model)}
Python handles: {url}/v1/handle says where, and README.md how.
Ctrl-C ends it.
""",
        sys.stdout,
    )


def _format_example(url: str, model: ServedModel) -> str:
    """A command that asks for one image or video, small enough to come soon."""
    steps = min(model.defaults.num_inference_steps or _STEPS, model.limits.max_steps)
    prompt = _PROMPT[: model.limits.max_prompt_chars]
    decode = "base64.b64decode(json.load(sys.stdin)['data'][0]['b64_json'])"
    save = f"""| python3 -c "import base64, json, sys; open('image.png', 'wb').write({decode})\""""
    if model.makes_videos or model.needs_image:
        route, field = ("videos/sync", "input_reference") if model.makes_videos else ("images/edits", "image")
        form = {"model": model.name, "prompt": f"'{prompt}'", "num_inference_steps": steps}
        source = {field: "@YOUR_IMAGE.png"} if model.needs_image else {}
        fields = " ".join(f"-F {name}={value}" for name, value in (form | source).items())
        return f"    curl -s {url}/v1/{route} {fields} " + (
            "-o video.mp4" if model.makes_videos else f"\\\n      {save}"
        )
    side = model.choose_side_near(_SIDE)
    size = f'"size": "{side}x{side}", "num_inference_steps": {steps}'
    body = f'{{"model": "{model.name}", "prompt": "{prompt}", {size}}}'
    return f"""    curl -s {url}/v1/images/generations -H 'Content-Type: application/json' \\
      -d '{body}' \\
      {save}"""


if __name__ == "__main__":
    sys.exit(main())
