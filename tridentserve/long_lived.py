"""Keeps Python's cyclic garbage collector from looking through what stays for good."""

from __future__ import annotations

import gc


def spare_long_lived() -> None:
    """Call once everything that lives as long as the process has been made (modules, tables, classes).

    A full collection looks at every object there is, and stops all threads meanwhile: 40 to 60 ms with the libraries
    of the scheduler, in the middle of a tick that may take no longer itself. What exists now is collected once and
    never looked at again.
    """
    gc.collect()
    gc.freeze()
