"""State checkpoints that a worker keeps in its host memory for requests that run on other workers."""

from __future__ import annotations

from collections.abc import Callable

from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.transport.parcel import Parcel

# Per request: the latest, and the one before, because the scheduler may not know of the latest when it asks for one.
_KEPT = 2


class CheckpointStore:
    """Checkpoints by request. An older one is dropped when there are newer ones; all are dropped with their request."""

    def __init__(self) -> None:
        self._checkpoints: dict[str, dict[HandoffKey, Parcel]] = {}

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._checkpoints.values())

    @property
    def nbytes(self) -> int:
        """Host memory that the checkpoints take."""
        return sum(parcel.nbytes for kept in self._checkpoints.values() for parcel in kept.values())

    def get(self, key: HandoffKey) -> Parcel | None:
        return self._checkpoints.get(key.request_id, {}).get(key)

    def add(self, key: HandoffKey, parcel: Parcel) -> None:
        """Add the newest checkpoint of a request."""
        kept = self._checkpoints.setdefault(key.request_id, {})
        kept[key] = parcel
        for old in sorted(kept, key=lambda other: (other.plan_id, other.step or 0))[:-_KEPT]:
            del kept[old]

    def drop_old(self, request_id: str, is_old: Callable[[HandoffKey], bool]) -> None:
        """Drop the checkpoints of a request that are of no use any more."""
        left = {key: parcel for key, parcel in self._checkpoints.pop(request_id, {}).items() if not is_old(key)}
        if left:
            self._checkpoints[request_id] = left
