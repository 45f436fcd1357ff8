"""The router sends a request to the cell that is predicted to finish it first."""

from __future__ import annotations

from collections import Counter

import pytest

from tridentserve.cells.router import MOST_COMPARED, CellRouter
from tridentserve.cells.summary import CellModelLoad, CellSummary
from tridentserve.errors import OverloadedError
from tridentserve.scheduling.estimation.request_work import RequestWork, estimate_work
from tridentserve.testing import MODEL, FixedTimes, make_request


def make_router() -> CellRouter:
    return CellRouter(lambda spec: RequestWork(degree=2, seconds=3.0, gpu_seconds=6.0), seed=0)


def summary(model: str = MODEL, workers: int = 4, idle: int = 0, work_s: float = 0.0) -> CellSummary:
    return CellSummary({model: CellModelLoad(workers, idle, work_s)})


def test_idle_workers_come_first_then_less_work() -> None:
    router, spec = make_router(), make_request("r")
    router.update(0, summary(work_s=1.0))
    router.update(1, summary(idle=2, work_s=5.0))
    router.update(2, summary(idle=1, work_s=0.5))
    assert router.choose(spec) == 1
    # Its idle workers are taken now; one that is idle is not enough for two, but there is least work.
    assert router.choose(spec) == 2
    # 6 GPU-seconds on 4 workers.
    assert router.choose(spec) == 0


def test_a_summary_holds_what_the_cell_had_received_and_no_more() -> None:
    router, spec = make_router(), make_request("r")
    router.update(0, summary(work_s=0.0))
    router.update(1, summary(work_s=2.0))
    assert [router.choose(spec), router.choose(spec), router.choose(spec)] == [0, 0, 1]
    router.update(0, summary(work_s=0.0), num_received=0)  # made before the requests came there
    assert router.choose(spec) == 0  # 3.0 against 3.5 seconds
    router.update(0, summary(work_s=1.6), num_received=2)  # the third is still on its way: 3.1 against 3.5
    assert router.choose(spec) == 0
    router.update(1, summary(work_s=0.0), num_received=1)
    assert router.choose(spec) == 1


def test_a_cell_that_comes_back_is_counted_anew() -> None:
    router, spec = make_router(), make_request("r")
    router.update(0, summary())
    router.choose(spec)
    router.lose(0)
    router.update(0, summary())
    router.update(1, summary(work_s=1.0))
    assert router.choose(spec) == 0
    router.update(0, summary(work_s=9.0), num_received=1)
    assert router.choose(spec) == 1


def test_only_cells_with_the_model_are_asked_and_lost_ones_are_not() -> None:
    router, spec = make_router(), make_request("r")
    with pytest.raises(OverloadedError, match="no cell serves"):
        router.choose(spec)
    router.update(0, summary(model="another"))
    with pytest.raises(OverloadedError):
        router.choose(spec)
    router.update(1, summary(work_s=9.0))
    router.update(2, summary())
    router.lose(2)
    assert router.choose(spec) == 1
    router.update(2, summary())
    assert router.choose(spec) == 2


def test_among_many_cells_two_are_drawn_and_the_better_one_is_taken() -> None:
    router, spec = make_router(), make_request("r")
    count = 2 * MOST_COMPARED
    for cell in range(count):
        router.update(cell, summary(work_s=float(cell)))
    chosen: Counter[int] = Counter()
    for _ in range(400):
        cell = router.choose(spec)
        chosen[cell] += 1
        router.update(cell, summary(work_s=float(cell)), num_received=chosen[cell])
    assert set(chosen) == set(range(count - 1)), "the worst of all never wins"
    assert chosen[0] > 400 / count, "the best one always does"


def test_the_work_of_a_request_is_that_at_its_optimal_degrees() -> None:
    # E and C on one worker, D on four, which scales perfectly.
    assert estimate_work(FixedTimes(), make_request("r", steps=4)) == RequestWork(4, 0.5 + 1.0 + 2.0, 0.5 + 4.0 + 2.0)
