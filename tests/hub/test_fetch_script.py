"""`scripts/fetch_model.py` and `scripts/serve.py` as processes: the environment says where the hub is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml

from tests.hub.conftest import MODEL_ID
from tests.support.hub_server import COMMIT, HubServer, run_hub_server
from tests.support.ports import free_port
from tests.support.processes import output_of, run

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "fetch_model.py"), MODEL_ID]


def make_environment(hub: HubServer, home: Path, offline: bool = False) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}


def test_a_folder_for_a_machine_without_a_connection(repository: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "to, and {fro}"
    with run_hub_server(HubServer(MODEL_ID, repository)) as hub:
        said = output_of([*SCRIPT, "--to", str(folder)], ROOT, make_environment(hub, tmp_path / "home"))
    (line,) = (line for line in said.splitlines() if "path:" in line)
    assert line.endswith(f"# {MODEL_ID}@{COMMIT}")
    assert yaml.safe_load(line) == [{"name": "tiny-sd3", "path": str(folder)}]
    assert (folder / "model_index.json").is_file()


def test_a_service_that_lacks_its_model_offline_says_how_to_bring_it(
    repository: dict[str, bytes], tmp_path: Path
) -> None:
    args = {
        "models": [{"name": "m", "path": MODEL_ID, "profile_as": "tiny-sd3", "limits": {"max_side": 512}}],
        "profiles": ["tiny-cpu"],
        "cluster": {"workers_per_node": 1, "memory_mb": 512},
        "placement": ["EDC"],
    }
    config = tmp_path / "config.yaml"
    app = {"name": "ours", "route_prefix": "/", "import_path": "deployments.app:build_app", "args": args}
    config.write_text(yaml.safe_dump({"http_options": {"port": free_port()}, "applications": [app]}))
    with run_hub_server(HubServer(MODEL_ID, repository)) as hub:
        environment = make_environment(hub, tmp_path / "home", offline=True)
        ended = run([sys.executable, str(ROOT / "scripts" / "serve.py"), str(config)], ROOT, environment)
        assert not hub.requests
    assert ended.returncode == 1
    assert f"fetch_model.py {MODEL_ID} --to FOLDER" in ended.stderr
