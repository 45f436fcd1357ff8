"""The dispatcher's views of what runs, put together when they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

from tridentserve.protocols import RunningRequest


@dataclass(slots=True)
class LazyViews(Sequence[RunningRequest]):
    """The running requests. They are put together only for a policy that looks at them."""

    make: Callable[[], list[RunningRequest]]
    _views: list[RunningRequest] | None = field(default=None)

    def _make_all(self) -> list[RunningRequest]:
        if self._views is None:
            self._views = self.make()
        return self._views

    @overload
    def __getitem__(self, index: int) -> RunningRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RunningRequest]: ...
    def __getitem__(self, index: int | slice) -> RunningRequest | Sequence[RunningRequest]:
        return self._make_all()[index]

    def __len__(self) -> int:
        return len(self._make_all())
