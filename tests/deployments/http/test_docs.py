"""docs/api.md documents every field and every route, and its tables name nothing else; schemas describe each field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from deployments.http.app import create_api
from deployments.schemas.edit import EditRequest
from deployments.schemas.image import ImageRequest
from deployments.schemas.quote import QuoteRequest
from deployments.schemas.video import HandleVideoRequest, VideoRequest
from tests.deployments.fake_backend import MODELS, FakeBackend

TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_field_is_documented() -> None:
    section = TEXT.partition("## POST /v1/images/generations")[2].partition("### Streaming")[0]
    assert all(f"`{name}" in section for name in ImageRequest.model_fields)
    rows = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \|", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall("[a-z_]+", row)}
    assert named <= set(ImageRequest.model_fields)


def test_every_field_of_an_edit_is_documented() -> None:
    section = TEXT.partition("## POST /v1/images/edits")[2].partition("### Input images")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
    assert set(rows) == (EditRequest.model_fields.keys() - ImageRequest.model_fields.keys()) | {"model", "size"}


def test_every_list_of_a_quote_is_documented() -> None:
    section = TEXT.partition("## POST /v1/quotes")[2].partition("## The other routes")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
    assert set(rows) == QuoteRequest.model_fields.keys() - {*VideoRequest.model_fields, *ImageRequest.model_fields}


def test_every_route_is_documented() -> None:
    paths = create_api(FakeBackend(), MODELS).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert all(f"`{route}`" in TEXT for route in routes)
    assert routes | {"GET /openapi.json"} == set(re.findall(r"`((?:GET|POST|DELETE) /\S*)`", TEXT))


@pytest.mark.parametrize("schema", [ImageRequest, EditRequest, VideoRequest, HandleVideoRequest, QuoteRequest])
def test_every_field_has_a_description_in_openapi(schema: type[BaseModel]) -> None:
    for name, field in schema.model_json_schema()["properties"].items():
        described = [form["description"] for form in (field, *field.get("anyOf", ())) if "description" in form]
        assert described, name
        assert all(text.endswith(".") for text in described), name
