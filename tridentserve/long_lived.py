"""Keeps Python's cyclic garbage collector from examining objects that live as long as the process."""

from __future__ import annotations

import gc


def spare_long_lived() -> None:
    """Collect once, and exempt all objects that exist now from later collections. To be called when everything that
    lives as long as the process exists (modules, tables, classes).

    A full collection examines every object and stops all threads meanwhile: 40 to 60 ms with the libraries of the
    scheduler, in the middle of a tick that may take no longer itself.
    """
    gc.collect()
    gc.freeze()
