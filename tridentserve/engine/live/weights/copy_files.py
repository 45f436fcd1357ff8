"""The files of host copies, which the processes of a node share: who makes one, who uses one, and which can go.

A copy is two files with one stem: its bytes, and an index that is there when the bytes are complete. Who makes or
removes it holds a lock beside them; who uses it holds a shared lock on the bytes, for as long as the process lives.
Both are locks of the kernel, which a killed process does not keep.
"""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)


class CopyFiles:
    """The copies in one directory, as one process uses them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[Path, int] = {}  # descriptors with a shared lock, by stem
        weakref.finalize(self, _close_all, self._held)

    def hold(self, stem: Path) -> bool:
        """Use a copy: no process removes it before this one has released it or has ended. False where there is none."""
        if stem in self._held:
            return True
        try:
            descriptor = os.open(find_data(stem), os.O_RDONLY)
        except FileNotFoundError:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a process that is removing it
        if not find_index(stem).exists() or not _is_at(descriptor, find_data(stem)):
            os.close(descriptor)
            return False
        self._held[stem] = descriptor
        return True

    def release(self, stem: Path) -> None:
        """Use it no longer. What has been mapped stays."""
        if (descriptor := self._held.pop(stem, None)) is not None:
            os.close(descriptor)

    @contextmanager
    def lock(self, stem: Path, wait: bool) -> Iterator[bool]:
        """Make or remove a copy, alone among the processes of this node. False when another one does and `wait` is not
        set."""
        path = _find_lock(stem)
        while True:  # until the file that is locked is the one that is there: who had it may have removed it
            with path.open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield False
                    return
                if _is_at(file.fileno(), path):
                    yield True
                    return

    def remove(self, stem: Path, wait: bool) -> bool:
        """Remove a copy that no process makes or uses. False where one does (with `wait`, one that makes or removes it
        has its time), or where this user may not."""
        with suppress(PermissionError), self.lock(stem, wait) as locked:
            if not locked:
                return False
            with _claim(find_data(stem)) as unused:
                if not unused:
                    return False
                # The index first: a process that sees it may map the bytes. The lock last.
                for path in (find_index(stem), find_data(stem), find_unfinished(stem), _find_lock(stem)):
                    path.unlink(missing_ok=True)
                return True
        return False

    def remove_others(self, stem: Path) -> None:
        """Remove all copies whose stems are this one but for its last part, as `remove` does."""
        replica, _, _ = stem.name.rpartition(".")
        names = {path.name.rpartition(".")[0] for path in self.folder.glob(f"{replica}.*.*")} - {stem.name}
        for name in sorted(names):
            if self.remove(stem.with_name(name), wait=False):
                logger.info("removed the host copy %s, which no process uses and other files have replaced", name)


def find_data(stem: Path) -> Path:
    """The file with the bytes of a copy."""
    return stem.with_name(stem.name + ".bin")


def find_index(stem: Path) -> Path:
    """The file that says what is where in the bytes."""
    return stem.with_name(stem.name + ".json")


def find_unfinished(stem: Path) -> Path:
    """The bytes while they are being written."""
    return stem.with_name(stem.name + ".unfinished")


def _find_lock(stem: Path) -> Path:
    return stem.with_name(stem.name + ".lock")


@contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Keep others from beginning to use these bytes; False where some process uses them."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            yield False
            return
        yield True


def _is_at(descriptor: int, path: Path) -> bool:
    """True when an open file is still the one of this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _close_all(held: dict[Path, int]) -> None:
    while held:
        os.close(held.popitem()[1])
