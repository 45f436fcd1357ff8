"""An event that many streams send: put into bytes once, and compressed once for all that take gzip.

A stream that is compressed by itself has a state of its own, and costs its server milliseconds for each event of each
client. Here each event is compressed from nothing to a whole number of bytes, so that the same bytes fit into every
stream, at whatever place (RFC 1951: blocks that refer to nothing before them; RFC 1952: one header before, and a
trailer that a stream without an end never needs).
"""

from __future__ import annotations

import zlib
from functools import cached_property

# The header of a gzip stream: deflate, no name, no time, unknown system.
GZIP_HEADER = bytes((0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 255))
# Nearly all of the gain at a third of the time: an event is made about once a second.
_LEVEL = 1


class SharedEvent:
    """The bytes of one server-sent event."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain

    @cached_property
    def packed(self) -> bytes:
        """A part of a gzip stream, which a client can read when it has come."""
        compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        return compressor.compress(self.plain) + compressor.flush(zlib.Z_SYNC_FLUSH)


def accepts_gzip(accept_encoding: str) -> bool:
    """True for the `Accept-Encoding` of a client that takes gzip."""
    offers = (offer.replace(" ", "").lower().partition(";q=") for offer in accept_encoding.split(","))
    return any(name == "gzip" and weight.strip("0.") != "" if weight else name == "gzip" for name, _, weight in offers)
