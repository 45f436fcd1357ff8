"""docs/api.md tells of every field, route and error there is, and the tables name nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from deployments.http.app import create_api
from deployments.schemas.edit import EditRequest
from deployments.schemas.image import ImageRequest
from tests.deployments.fake_backend import MODELS, FakeBackend

TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_field_is_told_of() -> None:
    section = TEXT.partition("## POST /v1/images/generations")[2].partition("### Streaming")[0]
    assert all(f"`{name}" in section for name in ImageRequest.model_fields)
    rows = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \|", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall("[a-z_]+", row)}
    assert named <= set(ImageRequest.model_fields)


def test_every_field_of_an_edit_is_told_of() -> None:
    section = TEXT.partition("## POST /v1/images/edits")[2].partition("### Input images")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
    assert set(rows) == (EditRequest.model_fields.keys() - ImageRequest.model_fields.keys()) | {"model", "size"}


def test_every_route_is_told_of() -> None:
    paths = create_api(FakeBackend(), MODELS).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert all(f"`{route}`" in TEXT for route in routes)
    assert routes | {"GET /openapi.json"} == set(re.findall(r"`((?:GET|POST|DELETE) /\S*)`", TEXT))
