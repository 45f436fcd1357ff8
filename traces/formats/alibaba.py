"""Alibaba's GenAI request trace: images of a Stable Diffusion service, with their steps but without their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traces.formats.text import list_csv_fields, make_line_error, parse_number, parse_unix_seconds
from traces.requests import REQUIRED
from traces.workloads.arrivals import Arrival
from tridentserve.errors import TraceError

NAME = "Alibaba GenAI requests"
# The columns that are needed; a file also has exec_time_seconds, groupId and others.
_TIME, _STEPS, _IMAGES = _COLUMNS = ("gmt_create", "num_inference_steps", "num_images_per_prompt")
FIRST_ROW = ",".join(_COLUMNS) + ", ..."
# Columns that may be missing, with what they hold in rows that are no text-to-image requests, or were not carried out.
_LEFT_OUT = {"predict_type": ("IMG_2_IMG", "INPAINTING"), "predict_status": ("FAILED", "PENDING")}
_NOT_GIVEN = ("", "null", "none", "nan")
_MOST_IMAGES = 1000


def recognises(cells: Sequence[str]) -> bool:
    """True when this is the first row of such a file."""
    return {cell.strip() for cell in cells} >= set(_COLUMNS)


def read(text: str, path: str | Path, seed: int = 0) -> list[Arrival]:
    """The arrivals, ascending, from 0; a request for n images is n arrivals at its time.

    Requests that start from an image, or that failed or were still waiting there, are left out: their times and steps
    are not those of images that were made. Nothing is drawn, so `seed` is not used. `TraceError` with the line number,
    and for a file in which nothing but such requests is.
    """
    rows: list[tuple[float, int | None]] = []
    line, left_out = 1, 0
    for line, row in list_csv_fields(text, path):
        if any(row.get(name, "").upper() in values for name, values in _LEFT_OUT.items()):
            left_out += 1
            continue
        try:
            images = _parse_whole(_IMAGES, row[_IMAGES], most=_MOST_IMAGES) or 1
            rows += [(parse_unix_seconds(_TIME, row[_TIME]), _parse_steps(row[_STEPS]))] * images
        except TraceError as error:
            raise make_line_error(path, line, str(error)) from None
    if left_out and not rows:
        raise make_line_error(path, line, f"each of the {left_out} requests failed, waited, or starts from an image")
    rows.sort(key=lambda row: row[0])
    return [Arrival(time_s - rows[0][0], steps) for time_s, steps in rows]


def _parse_steps(cell: str) -> int | None:
    steps = _parse_whole(_STEPS, cell, most=10_000)
    return None if steps is None else int(REQUIRED[_STEPS].check(_STEPS, steps))


def _parse_whole(name: str, cell: str, most: int) -> int | None:
    if cell.lower() in _NOT_GIVEN:
        return None
    value = parse_number(name, cell)
    if value != int(value) or value > most:
        raise TraceError(f"{name} must be a whole number of at most {most}, not {cell}")
    return int(value)
