"""Chooses the cell of a request: the one that is predicted to finish it first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tridentserve.cells.summary import CellModelLoad, CellSummary
from tridentserve.errors import OverloadedError
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.estimation.request_work import RequestWork

# Among more cells than these, two are drawn and the better one is taken: whoever asks all cells sends what arrives
# between two summaries to the same few, as do all others who ask.
MOST_COMPARED = 8
# Seconds between two summaries of a cell.
SUMMARY_PERIOD_S = 0.25


@dataclass(slots=True)
class _KnownCell:
    """The last summary of a cell, and the requests that were sent there and are not in it."""

    summary: CellSummary
    num_sent: int = 0
    """Number of requests that were sent there in all."""
    sent: deque[tuple[str, RequestWork]] = field(default_factory=deque)
    """The model and the work of those that are not in the summary, the latest at the end."""

    def find_load(self, model: str) -> tuple[float, float] | None:
        """The idle workers of a model and the seconds of work of each worker, with what was sent since; None where the
        cell has none."""
        load: CellModelLoad | None = self.summary.models.get(model)
        if load is None:
            return None
        sent = [work for of_model, work in self.sent if of_model == model]
        work_s = load.work_s + sum(work.gpu_seconds for work in sent) / load.num_workers
        return load.num_idle - sum(work.degree for work in sent), work_s


class CellRouter:
    """Knows the summaries of cells and what it has sent to each. It has no clock: those of two machines differ."""

    def __init__(self, estimate: Callable[[RequestSpec], RequestWork], seed: int) -> None:
        """`estimate` gives the work of a request; `seed` is that of the draws among many cells."""
        self._estimate = estimate
        self._random = Random(seed)
        self._cells: dict[int, _KnownCell] = {}

    def update(self, cell: int, summary: CellSummary, num_received: int = 0) -> None:
        """A cell has published a summary, after the ones before. `num_received` is the number of this router's requests
        that the cell had taken in when it was made, since the cell became known."""
        known = self._cells.setdefault(cell, _KnownCell(summary))
        known.summary = summary
        while known.sent and known.num_sent - len(known.sent) < num_received:
            known.sent.popleft()

    def lose(self, cell: int) -> None:
        """A cell is gone, until it publishes again."""
        self._cells.pop(cell, None)

    def count_sent(self, cell: int) -> int:
        """The number of requests that were sent to a cell since it became known."""
        return self._cells[cell].num_sent if cell in self._cells else 0

    def choose(self, spec: RequestSpec) -> int:
        """The cell of a request, which counts as sent there. Raises `OverloadedError` when no cell serves its model at
        the moment."""
        serving = self._list_serving(spec.model)
        if len(serving) > MOST_COMPARED:
            serving = self._random.sample(serving, 2)
        work = self._estimate(spec)
        chosen = min(serving, key=lambda cell: self._quote(cell, spec.model, work))
        known = self._cells[chosen]
        known.sent.append((spec.model, work))
        known.num_sent += 1
        return chosen

    def find_best(self, spec: RequestSpec) -> int:
        """The cell that is predicted to finish a request first, to which nothing is sent. Raises as `choose` does."""
        work = self._estimate(spec)
        return min(self._list_serving(spec.model), key=lambda cell: self._quote(cell, spec.model, work))

    def _list_serving(self, model: str) -> list[int]:
        """The cells that serve a model; at least one. Raises `OverloadedError`."""
        serving = [cell for cell, known in self._cells.items() if model in known.summary.models]
        if not serving:
            raise OverloadedError(f"no cell serves {model} at the moment; ask again later")
        return serving

    def _quote(self, cell: int, model: str, work: RequestWork) -> tuple[float, float]:
        """Seconds until the cell would have finished the request, and the work of each of its workers."""
        load = self._cells[cell].find_load(model)
        assert load is not None
        num_idle, work_s = load
        wait_s = 0.0 if num_idle >= work.degree else work_s
        return wait_s + work.seconds, work_s
