"""The class by which workers are started has the methods of those that do the work, and brings no torch along."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from tests.processes import output_of
from tridentserve.engine.live.worker.worker import StageWorker
from tridentserve.engine.live.worker.worker_actor import actor_class


def kinds(of: type[Any]) -> dict[str, bool]:
    """Public methods, and whether they yield."""
    methods = inspect.getmembers(of, inspect.isfunction)
    return {name: inspect.isasyncgenfunction(one) for name, one in methods if not name.startswith("_")}


def test_it_has_the_methods_of_the_worker() -> None:
    assert kinds(actor_class()) == kinds(StageWorker)
    assert kinds(StageWorker)["run"]


def test_it_needs_no_torch() -> None:
    code = "import sys, tridentserve.engine.live.fleet as fleet; fleet.actor_class(); print('torch' in sys.modules)"
    assert output_of([sys.executable, "-c", code]).strip() == "False"
