"""Tells the log how far a fetch of many files has come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError

from tridentserve.hub.download import HubFile

_EVERY_S = 10.0
# Fewer bytes come in a moment, and the log says nothing of them.
_QUIET_BYTES = 50_000_000
_GB = 1e9

logger = logging.getLogger(__name__)


class FetchProgress:
    """Files come in several threads. One line at the beginning, one every few seconds, and one at the end; of little,
    none."""

    def __init__(self, what: str, files: Sequence[HubFile]) -> None:
        self._what = what
        self._total_bytes = sum(file.size_bytes for file in files)
        self._num_files = len(files)
        self._came_bytes = self._num_ended = 0
        self._lock = threading.Lock()
        self._is_stopped = False
        self._began_s = self._told_s = time.monotonic()
        self._is_quiet = self._total_bytes < _QUIET_BYTES
        if not self._is_quiet:
            logger.info("fetching %s: %.2f GB, number of files: %d", what, self._total_bytes / _GB, len(files))

    def note(self, num_bytes: int) -> None:
        """So many bytes have come; less than zero when some have to come again. Raises `CancelledError` once the fetch
        has been stopped, so that the download ends."""
        with self._lock:
            if self._is_stopped:
                raise CancelledError
            self._came_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._told_s < _EVERY_S:
                return
            self._told_s = now_s
            self._tell(now_s)

    def stop(self) -> None:
        """End the downloads under way when their next bytes come."""
        self._is_stopped = True

    def end_file(self) -> None:
        """One more file is complete and verified."""
        with self._lock:
            self._num_ended += 1
            if self._num_ended == self._num_files:
                self._tell(time.monotonic())

    def _tell(self, now_s: float) -> None:
        if self._is_quiet:
            return
        logger.info(
            "%s: %d of %d files, %.2f of %.2f GB after %.0f s",
            self._what,
            self._num_ended,
            self._num_files,
            self._came_bytes / _GB,
            self._total_bytes / _GB,
            now_s - self._began_s,
        )
