"""`serve run deployments/mixed.yaml`: images and videos on the same workers; jobs outlive a kill of it all."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import pytest
import yaml

from tests.support import http
from tests.support.decision_log import read_lines
from tests.support.ports import free_port
from tests.support.processes import run, started
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Mixed:
    """The service of mixed.yaml as processes of its own, on another port and with folders of the test."""

    def __init__(self, folder: Path, cache: Path) -> None:
        config = yaml.safe_load((ROOT / "deployments" / "mixed.yaml").read_text())
        port = config["http_options"]["port"] = free_port()
        self.logs = folder / "logs"
        self.logs.mkdir()
        config["applications"][0]["args"] |= {
            "cache_dir": str(cache),
            "decision_log": str(self.logs / "decisions.jsonl"),
            # Two at a time: when the service is killed, some jobs are done, some run and some wait.
            "videos": {"data_dir": str(folder / "videos"), "lease_s": 2, "max_in_flight": 2},
        }
        self.config = folder / "mixed.yaml"
        self.config.write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{port}"
        self._processes = ExitStack()

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("serve")), "run", str(self.config)]
        # A cluster of its own, beside that of the other tests.
        local = {**os.environ, "RAY_ADDRESS": "local"}
        process = self._processes.enter_context(started(command, ROOT, local, is_heard=False))
        wait_until(lambda: self.is_ready(process), "the service is ready")

    def is_ready(self, process: Popen[str]) -> bool:
        assert process.poll() is None, "serve run has ended"
        try:
            answer = http.get(f"{self.url}/health", timeout=60.0)
            return answer.status_code == 200 and bool(answer.json()["status"] == "ready")
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """Every process of it, at once."""
        self._processes.close()

    def jobs(self, ids: list[str]) -> list[dict[str, Any]]:
        return [http.get(f"{self.url}/v1/videos/{video_id}").json() for video_id in ids]

    def finished(self) -> list[Counter[str]]:
        """The number of times that each request was brought to its end, in each run of the service (oldest first)."""
        counts = []
        for log in sorted(self.logs.iterdir(), key=lambda path: path.stat().st_mtime):
            decisions = (json.loads(line) for line in read_lines(log))
            effects = (effect for decision in decisions for effect in decision["effects"])
            counts.append(Counter(one["request_id"].split("~")[0] for one in effects if one["kind"] == "finish"))
        return counts


@pytest.fixture(scope="module")
def mixed(tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    service = Mixed(tmp_path_factory.mktemp("mixed"), tiny_cache)
    try:
        service.start()
        yield service
    finally:
        service.kill()


def test_a_trace_of_images_and_videos_is_replayed_and_the_models_share_workers(mixed: Mixed, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/replay_trace.py", "traces/data/samples/mixed.txt", "--url", mixed.url]
    # So fast that requests overlap: one at a time finds a worker that only its own model uses.
    done = run([*command, "--speed", "8", "--out", str(tmp_path)], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert (figures["completed_requests"], figures["failed_requests"]) == (30, 0)
    ran: dict[str, set[str]] = defaultdict(set)
    with (tmp_path / "requests.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for stage in ("encode", "diffuse", "decode"):
                for worker in row[f"{stage}_workers"].replace("+", " ").split():
                    ran[worker].add(row["model"])
    assert any(models == {"tiny-sd3", "tiny-wan"} for models in ran.values()), ran


def test_ten_jobs_survive_a_kill_of_the_service_and_none_ends_twice(mixed: Mixed) -> None:
    ids = [f"job-{index}" for index in range(10)]
    for index, video_id in enumerate(ids):
        body = {"prompt": f"number {index}", "size": "128x128", "num_frames": 5, "num_inference_steps": 100}
        answer = http.post(f"{mixed.url}/v1/videos", json={**body, "request_id": video_id, "seed": index})
        assert answer.status_code == 200, answer.text

    wait_until(lambda: mixed.jobs(ids[1:2])[0]["status"] == "completed", "the second of ten is done")
    before = {job["id"]: job for job in mixed.jobs(ids) if job["status"] == "completed"}
    mixed.kill()
    assert len(before) < 10, "the kill came too late to show anything"
    mixed.start()

    def all_have_ended() -> bool:
        return all(job["status"] in ("completed", "failed") for job in mixed.jobs(ids))

    wait_until(all_have_ended, "all ten have ended")
    after = {job["id"]: job for job in mixed.jobs(ids)}
    assert {job["status"] for job in after.values()} == {"completed"}, after
    listed = http.get(f"{mixed.url}/v1/videos", params={"limit": 100}).json()["data"]
    assert sorted(job["id"] for job in listed) == sorted(ids)
    assert all(http.get(job["url"]).content[4:8] == b"ftyp" for job in after.values())
    # Jobs that had ended were left alone; each of the others was brought to its end once.
    assert {video_id: after[video_id] for video_id in before} == before
    first, second = mixed.finished()
    for video_id in ids:
        assert (video_id in before) <= (first[video_id] == 1 and second[video_id] == 0)
        assert (video_id not in before) <= (second[video_id] == 1 or first[video_id] == 1)
        assert second[video_id] <= 1
