"""Makes pickles of small frozen data classes in half the time: a channel carries a dozen of them for each request."""

from __future__ import annotations

import copyreg
from dataclasses import fields
from operator import attrgetter
from typing import Any


def pickle_by_fields(*kinds: type[Any]) -> None:
    """From now on, have objects of these data classes pickled as calls of the class with all fields in their order.

    A data class with slots that is frozen is pickled by Python functions, which list its fields anew each time; these
    take longer than all the rest of a message. Raises `TypeError` for a class with fields that `__init__` lacks."""
    for kind in kinds:
        names = [field.name for field in fields(kind) if field.init and not field.kw_only]
        if len(names) < len(fields(kind)):
            raise TypeError(f"{kind.__name__} cannot be made of its fields in their order")
        copyreg.pickle(kind, _make_reducer(kind, names))


def _make_reducer(kind: type[Any], names: list[str]) -> Any:
    if len(names) == 1:  # `attrgetter` gives the value alone then
        (name,) = names
        return lambda item: (kind, (getattr(item, name),))
    get_values = attrgetter(*names)
    return lambda item: (kind, get_values(item))
