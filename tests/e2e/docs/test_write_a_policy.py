"""docs/write-a-policy.md: its policy, in a file outside the repository, decides in a service as the page says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support import http
from tests.support.policy_page import POLICY, ROOT, blocks, settings, write_policy
from tests.support.ports import free_port
from tests.support.processes import started
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # a service of its own: a minute


def test_the_policy_of_the_page_serves(tmp_path: Path, tiny_cache: Path) -> None:
    folder, log = tmp_path / "my-policies", tmp_path / "decisions.jsonl"
    folder.mkdir()
    write_policy(folder)
    config = yaml.safe_load((ROOT / "deployments" / "tiny.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    config["applications"][0]["args"] |= settings() | {"decision_log": str(log), "cache_dir": str(tiny_cache)}
    (tmp_path / "my_service.yaml").write_text(yaml.safe_dump(config))
    command = blocks("sh")[1].splitlines()[1].split()
    assert command == ["python", "scripts/serve.py", "my_service.yaml"]
    # A cluster of its own, beside that of the other tests.
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "RAY_ADDRESS": "local"}
    with started([sys.executable, command[1], str(tmp_path / command[2])], ROOT, {**os.environ, **path}) as process:

        def is_ready() -> bool:
            assert process.poll() is None, process.communicate()
            try:
                return bool(http.get(f"http://127.0.0.1:{port}/health", timeout=60.0).json()["status"] == "ready")
            except (httpx.HTTPError, ValueError, KeyError):
                return False

        wait_until(is_ready, "the service is ready", every_s=0.5)
        body = {"prompt": "a lighthouse at dawn", "size": "256x256", "num_inference_steps": 8}
        answer = http.post(f"http://127.0.0.1:{port}/v1/images/generations", json=body)
        assert answer.status_code == 200, answer.text
    assert "shortest first, " in log.read_text()
    assert f"policy: {POLICY}" in (tmp_path / "my_service.yaml").read_text()
