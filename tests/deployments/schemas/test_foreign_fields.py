"""Fields of other servers are taken and named; a name that nobody has is refused, with the one that is meant."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.schemas.common.foreign_fields import FOREIGN_FIELDS, GRANTED_FIELDS, log_ignored
from deployments.schemas.common.generation_request import GenerationRequest
from deployments.schemas.common.parsing import parse_as
from deployments.schemas.edit import EditRequest
from deployments.schemas.image import ImageRequest
from deployments.schemas.video import VideoRequest
from tridentserve.errors import InvalidRequestError

KINDS = (ImageRequest, VideoRequest, EditRequest)
FOREIGN = [
    (kind, name)
    for kind in KINDS
    for name in sorted(FOREIGN_FIELDS | GRANTED_FIELDS)
    if name not in kind.model_fields  # some kinds give it a meaning
]


def make_body(kind: type[GenerationRequest], **fields: Any) -> dict[str, Any]:
    return {"prompt": "a cat", **({"image": b"x"} if kind is EditRequest else {}), **fields}


@pytest.mark.parametrize(("kind", "name"), FOREIGN)
def test_a_field_of_another_server_is_taken_and_named(kind: type[GenerationRequest], name: str) -> None:
    expected = () if name in GRANTED_FIELDS else (name,)
    assert parse_as(kind, make_body(kind, **{name: 7})).ignored == expected
    assert parse_as(kind, make_body(kind, extra_body={name: {"a": 1}})).ignored == expected
    assert parse_as(kind, make_body(kind, **{name: None})).ignored == (), "a client that sends null asks for nothing"
    with pytest.raises(InvalidRequestError, match=f"unknown field {name}"):
        parse_as(kind, make_body(kind, **{name: 7}), lenient=False)


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_taken_for_what_nobody_knows(kind: type[GenerationRequest]) -> None:
    body = make_body(kind, zzz_of_the_future=None)
    assert parse_as(kind, body).ignored == ()
    for wrong, lenient in ((body, False), (body | {"zzz_of_the_future": 1}, True)):
        with pytest.raises(InvalidRequestError, match="unknown field zzz_of_the_future; there are"):
            parse_as(kind, wrong, lenient=lenient)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_inference_step", "num_inference_steps"),
        ("guidance_scal", "guidance_scale"),
        ("negativ_prompt", "negative_prompt"),
        ("prompt ", "prompt"),
        ("flow_shfit", "flow_shift"),
        ("guidence", "guidance_scale"),
        ("num_steps", "num_inference_steps"),
        ("stepps", "num_inference_steps"),
        ("cfg_scale", "guidance_scale"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_field_is_refused_with_the_one_that_is_meant(
    kind: type[GenerationRequest], name: str, meant: str
) -> None:
    for value in (3, None):
        with pytest.raises(InvalidRequestError, match=rf"unknown field {name}; did you mean {meant}\?"):
            parse_as(kind, make_body(kind, **{name: value}))


@pytest.mark.parametrize("kind", [ImageRequest, EditRequest])
def test_a_field_of_edits_is_suggested_where_images_are_asked_for_too(kind: type[GenerationRequest]) -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown field strenght; did you mean strength\?"):
        parse_as(kind, make_body(kind, strenght=0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_taken_for_a_field_of_another_route(kind: type[GenerationRequest]) -> None:
    names = {*kind.elsewhere, *kind.other_names, "mask", "stream", "response_format", "background", "guidance_rescale"}
    for name in sorted(names):
        assert parse_as(kind, make_body(kind, **{name: None})).ignored == ()
        assert parse_as(kind, make_body(kind, extra_body={name: None})).ignored == ()


def test_null_beside_a_value_is_none() -> None:
    for body in ({"seed": 7, "extra_body": {"seed": None}}, {"seed": None, "extra_body": {"seed": 7}}):
        assert parse_as(ImageRequest, make_body(ImageRequest, **body)).seed == 7


def test_the_log_names_a_field_once(caplog: pytest.LogCaptureFixture) -> None:
    log_ignored.cache_clear()
    with caplog.at_level("WARNING"):
        for _ in range(3):
            parse_as(ImageRequest, make_body(ImageRequest, style="vivid", moderation="low"))
    assert sorted(record.getMessage().split(",")[0] for record in caplog.records) == [
        "clients send the field moderation",
        "clients send the field style",
    ]


def test_both_names_of_the_number_of_outputs_count() -> None:
    assert parse_as(ImageRequest, make_body(ImageRequest, num_outputs_per_prompt=3)).num_outputs == 3
    assert parse_as(ImageRequest, make_body(ImageRequest, num_outputs_per_prompt=2, n=2)).num_outputs == 2
    with pytest.raises(InvalidRequestError, match="differs from n"):
        _ = parse_as(ImageRequest, make_body(ImageRequest, num_outputs_per_prompt=2, n=3)).num_outputs


def test_a_name_like_no_other_is_refused_with_the_fields_that_have_a_meaning() -> None:
    with pytest.raises(InvalidRequestError, match="unknown field colour; there are background, ") as caught:
        parse_as(ImageRequest, make_body(ImageRequest, colour="red"))
    assert "enable_teacache" not in str(caught.value)
