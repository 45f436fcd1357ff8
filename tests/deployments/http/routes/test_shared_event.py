"""Events that are compressed once for all streams: each stream is a gzip stream that can be read event by event."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.console.shared_event import GZIP_HEADER, SharedEvent, accepts_gzip


@given(st.lists(st.binary(max_size=2000), max_size=6), st.data())
def test_any_choice_of_events_makes_a_stream(contents: list[bytes], data: st.DataObject) -> None:
    events = [SharedEvent(content) for content in contents]
    sent = data.draw(st.lists(st.sampled_from(events), max_size=8)) if events else []
    reader = zlib.decompressobj(zlib.MAX_WBITS | 16)
    assert reader.decompress(GZIP_HEADER) == b""
    for event in sent:
        assert reader.decompress(event.packed) == event.plain, "all of it is there when the event has come"
    assert not reader.unused_data


def test_it_is_smaller() -> None:
    event = SharedEvent(b'event: change\ndata: {"workers": [' + b'{"worker": "n0w0", "runs": null},' * 100 + b"]}\n\n")
    assert len(event.packed) < len(event.plain) / 10


@pytest.mark.parametrize(
    ("sent", "accepts"),
    [
        ("", False),
        ("gzip, deflate, br, zstd", True),
        ("br;q=1.0, GZIP ; q=0.5", True),
        ("gzip;q=0", False),
        ("gzip;q=0.0, identity", False),
        ("identity", False),
        ("x-gzip", False),
    ],
)
def test_the_header_decides(sent: str, accepts: bool) -> None:
    assert accepts_gzip(sent) is accepts
