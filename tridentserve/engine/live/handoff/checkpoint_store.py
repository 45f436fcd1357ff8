"""Copies of denoising states that a worker keeps in its host memory for requests that run elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.transport.parcel import Parcel

# Per request: the latest, and the one before, as the scheduler may not have heard of the latest when it asks for one.
_KEPT = 2


class StateCopies:
    """By request. An older copy goes when there are newer ones, all go with the request."""

    def __init__(self) -> None:
        self._copies: dict[str, dict[HandoffKey, Parcel]] = {}

    def __len__(self) -> int:
        return sum(len(copies) for copies in self._copies.values())

    @property
    def nbytes(self) -> int:
        """Host memory that they take."""
        return sum(parcel.nbytes for copies in self._copies.values() for parcel in copies.values())

    def get(self, key: HandoffKey) -> Parcel | None:
        return self._copies.get(key.request_id, {}).get(key)

    def add(self, key: HandoffKey, parcel: Parcel) -> None:
        """The newest copy of a request's state."""
        copies = self._copies.setdefault(key.request_id, {})
        copies[key] = parcel
        for old in sorted(copies, key=lambda other: (other.plan_id, other.step or 0))[:-_KEPT]:
            del copies[old]

    def drop(self, request_id: str, is_old: Callable[[HandoffKey], bool]) -> None:
        """Drop those of a request that are of no use any more."""
        left = {key: parcel for key, parcel in self._copies.pop(request_id, {}).items() if not is_old(key)}
        if left:
            self._copies[request_id] = left
