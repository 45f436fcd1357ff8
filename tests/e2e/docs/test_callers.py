"""A service as `make serve` starts it, and callers of its Python handles with Ray's token, and without."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.test_paths import ROOT
from tests.e2e.docs.handle_scripts import PAGES_WITH_HANDLES, check_handle_script, write_handle_script
from tests.support import processes
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

# The settings of the tests' own Ray, which a user does not have.
_OF_TESTS = ("RAY_AUTH_MODE", "RAY_ADDRESS")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, tiny_cache: Path) -> Iterator[dict[str, str]]:
    """The environment of a user in whose home a token lies, with the address that a started service has printed."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    config = yaml.safe_load((ROOT / "deployments" / "quickstart.yaml").read_text())
    config["http_options"]["port"] = free_port()
    file = home / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    of_user = {name: value for name, value in os.environ.items() if name not in _OF_TESTS}
    of_user |= {"HOME": str(home), "TRIDENTSERVE_CACHE": str(tiny_cache)}
    with processes.started([sys.executable, "scripts/serve.py", str(file)], ROOT, of_user) as service:
        assert service.stdout is not None
        address = next(line for line in service.stdout if "RAY_ADDRESS=" in line).split("RAY_ADDRESS=")[1].split()[0]
        yield {**of_user, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
        service.send_signal(signal.SIGINT)
        _, said = service.communicate(timeout=PATIENCE_S)
    assert "infinite retries" not in said
    assert "CALL " not in said


@pytest.mark.parametrize("page", PAGES_WITH_HANDLES)
def test_a_caller_with_the_token_of_its_home(page: str, environment: dict[str, str], tmp_path: Path) -> None:
    check_handle_script(page, tmp_path, environment)


def test_a_caller_that_takes_no_token_gets_an_error(environment: dict[str, str], tmp_path: Path) -> None:
    script = write_handle_script("README.md", tmp_path)
    without = {**environment, "RAY_AUTH_MODE": "disabled"}
    ended = processes.run([sys.executable, str(script)], tmp_path, without)
    assert "Failed to connect to Ray cluster" in ended.stderr
