"""Models come and go while requests run: added, drained and removed by `serve deploy` with another `user_config`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.http.routes.lora_routes import ADMIN_TOKEN
from tests.e2e.conftest import Service
from tests.pipelines.loras import random_lora, save_lora
from tests.support import http
from tests.support.processes import run
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow  # a service of its own, and four changes: a minute

SIZE = {"size": "64x64", "num_inference_steps": 4}
SD3 = {"name": "live-sd3", "tiny": "sd3", "profile_as": "tiny-sd3", "limits": {"max_side": 256}}
FLUX = {"name": "live-flux", "tiny": "flux", "profile_as": "tiny-flux", "limits": {"max_side": 256}}


def load(model: dict[str, Any]) -> dict[str, Any]:
    return {"model": model["name"], "width": 64, "height": 64, "num_inference_steps": 4}


class Live:
    """The service under `/live`, and what `serve deploy` makes of it."""

    def __init__(self, service: Service, folder: Path) -> None:
        import ray

        self.url = f"{service.url}/live"
        self.others = pids()
        self.cache = folder / "cache"
        self.file = folder / "live.yaml"
        self.dashboard = f"http://{ray.init(ignore_reinit_error=True).dashboard_url}"
        (self.cache).mkdir()
        for name in ("tiny-sd3-v1", "tiny-flux-v1"):  # host copies of its own, model folders of all
            (self.cache / name).symlink_to(Path(service.args["cache_dir"]) / name)
        host, port = service.url.removeprefix("http://").split(":")
        self.config: dict[str, Any] = {
            "http_options": {"host": host, "port": int(port)},
            "applications": [
                {
                    "name": "live",
                    "route_prefix": "/live",
                    "import_path": "deployments.app:build_app",
                    "runtime_env": {"env_vars": {ADMIN_TOKEN: "secret"}},
                    "args": {
                        "models": [SD3],
                        "cluster": {"workers_per_node": 2, "memory_mb": 512},
                        "expected_load": [load(SD3)],
                        "cache_dir": str(self.cache),
                    },
                }
            ],
        }

    def deploy(self, *models: dict[str, Any], **more: Any) -> None:
        """Run `serve deploy` with these models, or without a `user_config` when there are none."""
        if models:
            user_config = {"models": list(models), "expected_load": [load(model) for model in models], **more}
            self.config["applications"][0]["deployments"] = [{"name": "Scheduler", "user_config": user_config}]
        self.file.write_text(yaml.safe_dump(self.config))
        serve = str(Path(sys.executable).with_name("serve"))
        command = [serve, "deploy", str(self.file), "--address", self.dashboard]
        done = run(command)
        assert done.returncode == 0, done.stderr

    def health(self) -> dict[str, Any]:
        try:
            answer = http.get(f"{self.url}/health", timeout=60.0)
            return answer.json() if answer.headers.get("content-type") == "application/json" else {}
        except httpx.HTTPError:
            return {}

    def until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the state of the service is as wanted."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_so(state := self.health()):
            assert time.monotonic() < deadline_s, state
            time.sleep(0.1)
        return state

    def listed(self) -> list[str]:
        return [model["id"] for model in http.get(f"{self.url}/v1/models").json()["data"]]

    def until_listed(self, *names: str) -> None:
        wait_until(lambda: self.listed() == list(names), f"{names} are listed")

    def begin_with(self, *models: dict[str, Any]) -> None:
        """Serve these and no others, whatever the tests before have left."""
        self.deploy(*models)
        self.until(lambda state: state.get("models") == {model["name"]: "serving" for model in models})
        self.until(lambda state: state.get("problems") == [])
        self.until_listed(*(model["name"] for model in models))

    def ask(self, model: str, **body: Any) -> httpx.Response:
        content = {"model": model, "prompt": "a lake", **SIZE, **body}
        return http.post(f"{self.url}/v1/images/generations", json=content)


def pids() -> set[int]:
    """The processes of all workers of all services."""
    import ray
    from ray.util.state import list_actors

    alive = [("class_name", "=", "StageWorker"), ("state", "=", "ALIVE")]
    actors = list_actors(ray.get_runtime_context().gcs_address, filters=alive, limit=1000)  # type: ignore[arg-type]
    return {actor.pid for actor in actors if actor.pid}


class Stream:
    """Asks for one model again and again."""

    def __init__(self, live: Live, model: str) -> None:
        self.codes: list[int] = []
        self.errors: list[dict[str, Any]] = []
        self._live, self._model = live, model
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            answer = self._live.ask(self._model, seed=len(self.codes))
            self.codes.append(answer.status_code)
            if answer.status_code != 200:
                self.errors.append(answer.json()["error"])

    def until_more(self, count: int = 3) -> None:
        wanted = len(self.codes) + count
        wait_until(lambda: len(self.codes) >= wanted, f"{count} more answers")

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def live(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two workers with tiny-sd3, beside the other service."""
    from ray import serve

    live = Live(service, tmp_path_factory.mktemp("live"))
    live.deploy()
    live.until(lambda state: state.get("status") == "ready")
    yield live
    serve.delete("live")


def test_models_come_and_go_while_requests_run(service: Service, live: Live) -> None:
    live.begin_with(SD3)
    processes = pids()
    first = Stream(live, "live-sd3")
    try:
        first.until_more()
        live.deploy(SD3, FLUX)
        live.until(lambda state: state.get("models") == {"live-sd3": "serving", "live-flux": "serving"})
        live.until_listed("live-sd3", "live-flux")
        second = Stream(live, "live-flux")
        try:
            second.until_more()
            first.until_more()
            live.deploy(FLUX)
            live.until(lambda state: state.get("models") == {"live-flux": "serving"})
            live.until_listed("live-flux")
            first.until_more(1)
            second.until_more()
        finally:
            second.end()
    finally:
        first.end()
    assert set(second.codes) == {200}
    ok = first.codes.count(200)
    # Every request was served until the model was drained, and none after it.
    assert first.codes == [200] * ok + first.codes[ok:]
    assert ok >= 6
    assert set(first.codes[ok:]) <= {503, 404}
    assert {error["code"] for error in first.errors} <= {"model_unavailable", "model_not_found"}
    assert live.ask("live-sd3").status_code == 404
    assert live.ask("live-flux").status_code == 200
    assert pids() == processes  # the same processes all the time
    assert not list((live.cache / "host").glob("live-sd3.*.bin"))
    assert list((live.cache / "host").glob("live-flux.*.bin"))
    assert not any("live-sd3" in held for held in live.health()["placement"].values())


def test_what_cannot_work_changes_nothing(live: Live) -> None:
    live.begin_with(FLUX)
    before = pids()
    for wrong, why in (
        ({"name": "other", "path": "/nowhere", "profile_as": "tiny-sd3"}, "path"),
        ({**SD3, "name": "unheard", "profile_as": "nowhere"}, "profile"),
        ({**SD3, "limits": {"min_side": 512, "max_side": 256}}, "limits"),
    ):
        live.deploy(FLUX, wrong)
        state = live.until(lambda state, why=why: any(why in line for line in state.get("problems", ())))  # type: ignore[misc]
        assert state["models"] == {"live-flux": "serving"}
        assert live.ask("live-flux").status_code == 200
    live.deploy(FLUX, max_retries=5)
    live.until(lambda state: any("max_retries: cannot change" in line for line in state.get("problems", ())))
    assert pids() == before
    live.deploy(FLUX)
    live.until(lambda state: state.get("problems") == [])


def test_a_model_that_drains_is_kept_and_can_be_opened_again(live: Live) -> None:
    live.deploy(FLUX, {**SD3, "drain": True})
    live.until(lambda state: state.get("models") == {"live-flux": "serving", "live-sd3": "draining"})
    live.until_listed("live-flux")
    assert live.ask("live-sd3").status_code in (404, 503)
    live.deploy(FLUX, SD3)
    live.until_listed("live-flux", "live-sd3")
    assert live.ask("live-sd3").status_code == 200


def test_a_worker_that_dies_meanwhile_comes_back_with_the_models_of_now(live: Live) -> None:
    live.begin_with(FLUX)
    stream = Stream(live, "live-flux")
    try:
        stream.until_more()
        live.deploy(FLUX, SD3)
        os.kill(min(pids() - live.others), signal.SIGKILL)
        live.until(lambda state: state.get("models") == {"live-flux": "serving", "live-sd3": "serving"})
        live.until_listed("live-flux", "live-sd3")
        stream.until_more()
        live.until(lambda state: state.get("status") == "ready")
        assert {live.ask("live-sd3", seed=i).status_code for i in range(4)} == {200}
    finally:
        stream.end()
    assert set(stream.codes) == {200}


def test_a_lora_comes_and_goes(live: Live, tmp_path: Path) -> None:
    """Clients see another image with it, the same as before without it, and a clear error when it is gone."""
    live.begin_with(SD3)
    folder = Path(shutil.copytree(live.cache / "tiny-sd3-v1", tmp_path / "sd3"))
    file, token = save_lora(folder, "ink", random_lora(folder)), {"Authorization": "Bearer secret"}
    loras = f"{live.url}/v1/models/live-sd3/loras"
    plain = live.ask("live-sd3", seed=1).json()["data"]
    assert live.ask("live-sd3", seed=1, lora="ink").status_code == 422
    added = http.post(loras, json={"name": "ink", "path": str(file)}, headers=token)
    assert added.status_code == 200, added.text
    wait_until(lambda: live.ask("live-sd3", seed=1, lora="ink").status_code == 200, "the LoRA is known")
    images = [
        live.ask("live-sd3", seed=1, loras=[{"name": "ink", "scale": scale}]).json()["data"] for scale in (1, 0.5, 0)
    ]
    assert images[2] == plain
    assert len({str(image) for image in images}) == 3
    again = http.post(loras, json={"name": "ink", "path": str(file)}, headers=token)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "lora_exists")
    file.write_bytes(file.read_bytes()[:-8])
    odd = http.post(loras, json={"name": "odd", "path": str(file)}, headers=token)
    assert (odd.status_code, odd.json()["error"]["param"]) == (422, "path")
    assert http.delete(f"{loras}/ink", headers=token).status_code == 200
    wait_until(lambda: live.ask("live-sd3", seed=1, lora="ink").status_code == 422, "the LoRA is not known any more")
    assert live.ask("live-sd3", seed=1).json()["data"] == plain
