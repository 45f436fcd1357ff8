"""Runs a function that cannot be left and entered again, such as the call of a stock pipeline, piece by piece."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from tridentserve.device import ComputeDevice

Result = TypeVar("Result")


class _Ended(BaseException):
    """Leaves the function from inside. No handler of a library takes it for an error."""


class SteppedCall(Generic[Result]):
    """The call runs in a thread of its own, and only while `run_until` waits for it: never beside its caller."""

    def __init__(self, function: Callable[[Callable[[float], None]], Result], device: ComputeDevice) -> None:
        """`function` gets a function that it calls with the share of its work that is done, from 0 to 1; it works on
        `device`."""
        self._function = function
        self._device = device
        self._thread: threading.Thread | None = None
        self._resume, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._wanted = 0.0
        self._done = 0.0
        self._is_ending = False
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run_until(self, share: float) -> None:
        """Go on until this share of the work is done; at 1 the call returns. Raises what the call raises."""
        self._wanted = share
        if self._results or (self._done >= share and share < 1):
            return
        if self._thread is None:
            context = contextvars.copy_context()
            # A process that ends does not wait for it.
            self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)
            self._thread.start()
        else:
            self._resume.release()
        self._pause.acquire()
        if self._error is not None:
            raise self._error

    @property
    def result(self) -> Result:
        """The value that the call has returned; there is one when all of its work is done."""
        return self._results[0]

    def end(self) -> None:
        """Leave the call where it is, for good."""
        if self._thread is not None and self._thread.is_alive():
            self._is_ending = True
            self._resume.release()
            self._thread.join()

    def _run(self) -> None:
        try:
            self._device.enter_thread()  # a new thread begins on the first one
            self._results.append(self._function(self._note))
        except _Ended:
            return
        except BaseException as error:  # the caller's thread raises it
            self._error = error
        self._pause.release()

    def _note(self, share: float) -> None:
        self._done = share
        if share < self._wanted or self._wanted >= 1:
            return
        self._pause.release()
        self._resume.acquire()
        if self._is_ending:
            raise _Ended
