"""Services as `make serve` starts them, with Ray's token and without, and callers of their Python handles with the
settings that a user's shell may have."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import yaml

from deployments.serve.ingress import list_ingress_settings
from tests.docs.test_paths import ROOT
from tests.e2e.docs.handle_scripts import PAGES_WITH_HANDLES, check_handle_script, write_handle_script
from tests.support import processes
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

# The settings of the tests' own Ray, which a user does not have; both services would listen on the same ports by them.
_OF_TESTS = ("RAY_AUTH_MODE", "RAY_ADDRESS", *list_ingress_settings())


class _TwoServices(NamedTuple):
    home: Path
    of_user: dict[str, str]
    """The environment of a user in whose home a token lies, without any setting of Ray's."""

    with_token: str
    without_token: str


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, tiny_cache: Path) -> Iterator[_TwoServices]:
    """One that takes the token of its user's home, and one of `RAY_AUTH_MODE=disabled`, on one machine."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    of_user = {name: value for name, value in os.environ.items() if name not in _OF_TESTS}
    of_user |= {"HOME": str(home), "TRIDENTSERVE_CACHE": str(tiny_cache)}
    with _serve(home, of_user) as one, _serve(home, {**of_user, "RAY_AUTH_MODE": "disabled"}) as other:
        yield _TwoServices(home, of_user, one, other)


@contextmanager
def _serve(home: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a service that is ready."""
    config = yaml.safe_load((ROOT / "deployments" / "quickstart.yaml").read_text())
    config["http_options"]["port"] = port = free_port()
    config["applications"][0]["args"]["videos"] = {"data_dir": str(home / f"videos-{port}")}
    file = home / f"{port}.yaml"
    file.write_text(yaml.safe_dump(config))
    with processes.started([sys.executable, "scripts/serve.py", str(file)], ROOT, environment) as service:
        assert service.stdout is not None
        assert any("Ctrl-C ends it" in line for line in service.stdout), service.communicate()
        yield f"http://127.0.0.1:{port}"
        service.send_signal(signal.SIGINT)
        _, said = service.communicate(timeout=PATIENCE_S)
    assert "infinite retries" not in said
    assert "CALL " not in said


@pytest.mark.parametrize("page", PAGES_WITH_HANDLES)
@pytest.mark.parametrize("settings", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token"}], ids=str)
@pytest.mark.parametrize("takes_token", [True, False])
def test_a_caller_reaches_the_service_that_it_names(
    page: str, settings: dict[str, str], takes_token: bool, two: _TwoServices, tmp_path: Path
) -> None:
    named, other = (two.with_token, two.without_token) if takes_token else (two.without_token, two.with_token)
    at_other = httpx.get(f"{other}/v1/handle").json()["ray_address"]
    environment = {**two.of_user, **settings, "RAY_ADDRESS": at_other}
    request_id = check_handle_script(page, tmp_path, environment, named)
    assert httpx.get(f"{named}/v1/requests/{request_id}/explain").status_code == 200
    assert httpx.get(f"{other}/v1/requests/{request_id}/explain").status_code == 404


def test_a_caller_without_the_token_hears_what_to_do(two: _TwoServices, tmp_path: Path) -> None:
    script = write_handle_script("README.md", tmp_path, two.with_token)
    ended = processes.run([sys.executable, str(script)], tmp_path, {**two.of_user, "HOME": str(tmp_path)})
    assert ended.returncode != 0
    assert "no authentication token was found" in ended.stderr
    assert "RAY_AUTH_TOKEN" in ended.stderr
