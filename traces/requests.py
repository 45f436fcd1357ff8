"""One request of a trace, and the rules its fields obey whatever file they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from tridentserve.errors import ConfigError, TraceError
from tridentserve.requests import MAX_PRIORITY, OnLate, Quality


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One row of a trace. `timestamp_s` counts seconds from the start of the trace; sizes are pixels.

    None means that the row does not say: the service then uses its default (its SLO rule, a seed of its own, ...).
    """

    request_id: str
    timestamp_s: float
    height: int
    width: int
    num_frames: int
    prompt: str
    negative_prompt: str
    num_inference_steps: int
    slo_ms: float | None = None
    seed: int | None = None
    fps: float | None = None
    model: str | None = None
    guidance_scale: float | None = None
    quality: Quality | None = None
    on_late: OnLate | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A text field. A blank one is an error unless `may_be_blank`."""

    may_be_blank: bool = False

    def check(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise TraceError(f"{name} must be a text, not {quote(value)}")
        if not value.strip() and not self.may_be_blank:
            raise TraceError(f"{name} is empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TraceError(f"{name} holds half a surrogate pair, which no request can carry") from None
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A number between two finite bounds, so NaN and infinity fall out."""

    low: float
    """The lower bound, which is left out when `above`."""
    high: float
    """The upper bound."""
    whole: bool = False
    """True: the number is an integer."""
    above: bool = False
    """True: the number must be above `low`."""
    hint: str = ""

    def check(self, name: str, value: object) -> float | int:
        # bool is an int in Python: `height=True` is a mistake, not a size of 1.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TraceError(f"{name} must be a number, not {quote(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise TraceError(f"{name} must be finite, not {value}")
        if not self.low <= value <= self.high or (self.above and value == self.low):
            lowest = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
            raise TraceError(f"{name} must be {lowest} and at most {self.high:g}{self.hint}, not {quote(value)}")
        if not self.whole:
            return float(value)
        # pandas writes 42 as 42.0 where another row of the column is empty: take whole floats.
        if value != int(value):
            raise TraceError(f"{name} must be a whole number, not {value}")
        return int(value)


@dataclass(frozen=True, slots=True)
class ChoiceOfTexts:
    """One of some texts."""

    choices: tuple[str, ...]

    def check(self, name: str, value: object) -> str:
        if value not in self.choices:
            raise TraceError(f"{name} must be one of {', '.join(self.choices)}, not {quote(value)}")
        return str(value)


class RequestId(Text):
    """A text, or a whole number as in the published traces."""

    def check(self, name: str, value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(Number(0, 2**63, whole=True).check(name, value))
        return super().check(name, value)


_SIZE = Number(1, 65536, whole=True)
_UNIX_HINT = " (seconds from the start of the trace, not a date)"

# The order is that of the published traces; it is the order of the columns that we write.
REQUIRED: dict[str, Text | Number | ChoiceOfTexts] = {
    "request_id": RequestId(),
    "timestamp": Number(0, 1e9, hint=_UNIX_HINT),
    "height": _SIZE,
    "width": _SIZE,
    "num_frames": _SIZE,
    "prompt": Text(),
    "negative_prompt": Text(may_be_blank=True),
    "num_inference_steps": Number(1, 10_000, whole=True),
}
OPTIONAL: dict[str, Text | Number | ChoiceOfTexts] = {
    "slo_ms": Number(0, 1e12, above=True),
    "seed": Number(0, 2**63 - 1, whole=True),
    "fps": Number(0, 1e6, above=True),
    "model": Text(),
    "guidance_scale": Number(0, 1e6),
    "quality": ChoiceOfTexts(get_args(Quality)),
    "on_late": ChoiceOfTexts(get_args(OnLate)),
    "priority": Number(-MAX_PRIORITY, MAX_PRIORITY, whole=True),
}
FIELDS = REQUIRED | OPTIONAL


def quote(value: object) -> str:
    """A value as an error message shows it: short, and safe for integers that Python refuses to print."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_names(names: Mapping[str, object]) -> None:
    """Raises `TraceError` for unknown and for missing fields, and lists the known ones."""
    known = f"required: {', '.join(REQUIRED)}; optional: {', '.join(OPTIONAL)}"
    unknown = [name for name in names if name not in FIELDS]
    if unknown:
        raise TraceError(f"unknown field {', '.join(map(quote, unknown[:5]))} ({known})")
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise TraceError(f"missing field {', '.join(missing)} ({known})")


def from_fields(fields: Mapping[str, object]) -> TraceRequest:
    """A checked request from values as a file holds them (None: not given). Raises `TraceError`, without the place."""
    check_names(fields)
    values: dict[str, Any] = {}
    for name, rule in FIELDS.items():
        value = fields.get(name)
        if value is None and name in OPTIONAL:
            continue
        values["timestamp_s" if name == "timestamp" else name] = rule.check(name, value)
    return TraceRequest(**values)


def to_fields(request: TraceRequest) -> dict[str, object]:
    """The reverse of `from_fields`: all fields in the order of the columns, absent ones as None.

    An id that is a plain number becomes one, as in the published traces.
    """
    fields = {name: getattr(request, "timestamp_s" if name == "timestamp" else name) for name in FIELDS}
    identifier = request.request_id
    if identifier.isascii() and identifier.isdecimal() and len(identifier) < 19 and str(int(identifier)) == identifier:
        fields["request_id"] = int(identifier)
    return fields


def scale_pixels(request: TraceRequest, factor: float, multiple: int = 16) -> TraceRequest:
    """The request with `factor` times its pixels (each side by the root), so that small machines replay large traces.

    Sides are rounded to the nearest multiple and are at least one. Raises `ConfigError` for a factor or a multiple that
    is not a positive finite number.
    """
    if not (math.isfinite(factor) and factor > 0 and multiple > 0):
        raise ConfigError(f"the pixel factor and the multiple must be above 0, not {factor} and {multiple}")

    def scaled(side: int) -> int:
        return max(1, math.floor(side * math.sqrt(factor) / multiple + 0.5)) * multiple

    return replace(request, height=scaled(request.height), width=scaled(request.width))
