"""Keeps Python's cyclic garbage collector from examining objects that live as long as the process, or a tick."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def spare_long_lived() -> None:
    """Collect once, and exempt all objects that exist now from later collections. To be called when everything that
    lives as long as the process exists (modules, tables, classes).

    A full collection examines every object and stops all threads meanwhile: 40 to 60 ms with the libraries of the
    scheduler, in the middle of a tick that may take no longer itself.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def defer_collections() -> Iterator[None]:
    """Let no collection begin by itself until the block ends. For blocks of milliseconds, one at a time in a process.

    Most of what a tick makes lives until its end, and reference counts free it then: a collection in between examines
    all of it for next to nothing, again and again, for a tenth of the tick.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
