"""Runs cells on several cores. Ctrl-C and SIGTERM stop all of them at once; finished cells are kept by whoever took
them."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from types import FrameType
from typing import NoReturn

from lib.evaluate.cells import Cell, Settings
from lib.evaluate.rows import CellResult
from lib.evaluate.scenes import run_cell
from tridentserve.errors import TridentServeError

RunCell = Callable[[Cell, Settings], CellResult]
# A cell with its result, or with what kept it from having one.
CellOutcome = tuple[Cell, CellResult | str]


def run_cells(cells: Sequence[Cell], settings: Settings, jobs: int, run: RunCell = run_cell) -> Iterator[CellOutcome]:
    """Yields cells as they finish. One that fails stops no other.

    One job runs in this process; more run in processes of their own (`run` must be importable there).
    """
    if jobs == 1:
        for cell in cells:
            yield _run_guarded(run, cell, settings)
        return
    context = multiprocessing.get_context("spawn")
    # By default SIGTERM would end this process alone, and leave the others to finish their cells.
    before_term = signal.signal(signal.SIGTERM, _exit)
    pool = ProcessPoolExecutor(min(jobs, max(1, len(cells))), context)
    try:
        # Ctrl-C reaches the whole group of processes, and only this one acts on it. The others, which begin here, have
        # it blocked from their first moment: a handler of theirs would come too late while they import.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = [pool.submit(_run_guarded, run, cell, settings) for cell in cells]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in as_completed(futures):
            yield future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, before_term)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _run_guarded(run: RunCell, cell: Cell, settings: Settings) -> CellOutcome:
    try:
        return cell, run(cell, settings)
    except TridentServeError as error:
        return cell, str(error)
    except Exception:  # a fault of one policy must not cost the others' hours
        return cell, traceback.format_exc()
