"""Reads a body: merges `extra_body`, refuses unknown fields by name, leaves out those of other servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from deployments.schemas.common.fields import read_json_text, show_name
from deployments.schemas.common.foreign_fields import (
    FOREIGN_FIELDS,
    GRANTED_FIELDS,
    find_own_name,
    log_ignored,
    suggest_names,
)
from deployments.schemas.common.generation_request import GenerationRequest
from tridentserve.errors import InvalidRequestError

Parsed = TypeVar("Parsed", bound=GenerationRequest)


def parse_as(
    kind: type[Parsed], body: Any, strict: bool = True, lenient: bool = True, others: Iterable[str] = ()
) -> Parsed:
    """The body with `extra_body` merged in. Unless `strict`, a number may come as a text, as it does in forms. If
    `lenient`, fields of other servers are left out, and `ignored` names them. `others` are fields that the caller has
    taken out of the body; one of them may be meant by an unknown one.
    Raises `InvalidRequestError`, which never repeats a value of the body."""
    if not isinstance(body, Mapping):
        raise InvalidRequestError('the body must be an object of named fields, such as {"prompt": "a cat"}')
    merged = _merge_extra_body(kind, body)
    known = {*kind.model_fields, "extra_body"}
    foreign = (FOREIGN_FIELDS | GRANTED_FIELDS | kind.without_effect) - known - set(kind.elsewhere)
    if not lenient:
        foreign = frozenset()
    for name, value in merged.items():
        if name in known or name in foreign:
            continue
        # A client that sends null asks for nothing, unless it is a misspelt wish.
        if not lenient or value is not None or (name not in kind.elsewhere and find_own_name(str(name), known)):
            raise _make_unknown_field_error(kind, name, others)
    fields = {name: value for name, value in merged.items() if value is not None}
    try:
        parsed = kind.model_validate({name: fields[name] for name in fields if name in known}, strict=strict)
    except ValidationError as error:
        raise _describe_first_problem(error) from None
    parsed.note_ignored(foreign.intersection(fields) - GRANTED_FIELDS)
    for name in parsed.ignored:
        log_ignored(name)
    return parsed


def _make_unknown_field_error(
    kind: type[GenerationRequest], name: object, others: Iterable[str]
) -> InvalidRequestError:
    shown = show_name(name)
    hint = kind.elsewhere.get(name) if isinstance(name, str) else None
    hint = hint or suggest_names(shown, [*kind.model_fields, "extra_body"], {*others, *kind.elsewhere})
    return InvalidRequestError(f"unknown field {shown}; {hint}", shown)


def _merge_extra_body(kind: type[GenerationRequest], body: Mapping[Any, Any]) -> dict[Any, Any]:
    """The fields of the body and of its `extra_body`, by their names in the schema."""
    extra = body.get("extra_body")
    if extra is not None and not isinstance(extra, Mapping):
        raise InvalidRequestError("extra_body: must be an object of named fields", "extra_body")
    fields: dict[Any, Any] = {}
    for sent in ({name: value for name, value in body.items() if name != "extra_body"}, extra or {}):
        for name, value in _open_groups(kind, sent):
            own = kind.other_names.get(name, name)
            is_there = fields.get(own) is not None
            if own == "extra_body" or (is_there and value is not None):
                shown = show_name(name)
                raise InvalidRequestError(f"{shown}: must not be given twice (see extra_body)", shown)
            if not is_there:
                fields[own] = value
    return fields


def _open_groups(kind: type[GenerationRequest], sent: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The fields, with those of an object that some clients put others into. One beside the object goes before."""
    for name, value in sent.items():
        if name not in kind.groups:
            yield name, value
            continue
        group = read_json_text(value) or {}
        if not isinstance(group, Mapping):
            raise InvalidRequestError(f"{name}: must be an object of named fields", name)
        for inner, inner_value in group.items():
            if inner not in kind.groups[name]:
                raise InvalidRequestError(f"{name}: has {', '.join(kind.groups[name])}, and no other field", name)
            if inner_value is not None and sent.get(inner) is None:
                yield inner, inner_value


def _describe_first_problem(error: ValidationError) -> InvalidRequestError:
    detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = str(detail["loc"][0])
    message = "is required" if detail["type"] == "missing" else detail["msg"]
    return InvalidRequestError(f"{name}: {message}", name)
