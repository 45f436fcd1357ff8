"""How the event loop of a worker stops and pauses a plan that runs in the device thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

from tridentserve.engine.live.worker.checkpoint_writer import Checkpoint


class StepCommand(IntEnum):
    """What a plan does at a step boundary."""

    CONTINUE = 0
    PAUSE = 1
    STOP = 2


class StepControl:
    """Through this the event loop asks the device thread to stop or to pause a plan, and learns of its steps."""

    def __init__(self, on_step: Callable[[str, int], None] = lambda request_id, steps_done: None) -> None:
        self._stop = threading.Event()
        self._pause = threading.Event()
        self.on_step = on_step
        # Called on the leader with each state checkpoint that the plan asks for.
        self.on_checkpoint: Callable[[Checkpoint], object] = lambda checkpoint: None

    def ask_to_stop(self) -> None:
        """Have the plan stop before the next step, or before the next stage, without outputs."""
        self._stop.set()

    def ask_to_pause(self) -> None:
        """Have the plan stop before the next denoising step and keep its states. Stages after D are not held up."""
        self._pause.set()

    @property
    def command(self) -> StepCommand:
        """The command for the next step boundary."""
        if self._stop.is_set():
            return StepCommand.STOP
        return StepCommand.PAUSE if self._pause.is_set() else StepCommand.CONTINUE

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()
