"""The MP4 files of video jobs, in a directory of this machine or at an fsspec URL."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from deployments.schemas.common.generation_request import REQUEST_ID

_SUFFIX, _PART_SUFFIX = ".mp4", ".part"
# The name of a file while `_write_atomically` writes it.
_PART = re.compile(rf"\.{REQUEST_ID.pattern}-[0-9]+-[0-9]+\.mp4\.[a-z0-9_]{{8}}\.part")


class VideoStorage:
    """Holds one file per video, `<name>-<index>.mp4`. Calls block, and raise `OSError` and the file system's errors.

    The directory may hold files of others: only files that a caller names are touched, and those of `sweep_parts`."""

    def __init__(self, url: str) -> None:
        """`url` is a directory, or a URL with a protocol that fsspec knows (for `s3://` the package s3fs is needed)."""
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")
        self._url = url
        self._fs.makedirs(self._root, exist_ok=True)

    def write(self, name: str, videos: Iterable[bytes]) -> None:
        """Write all videos of a job. A file exists whole or not at all."""
        for index, content in enumerate(videos):
            path = self._make_path(name, index)
            if isinstance(self._fs, LocalFileSystem):
                _write_atomically(Path(path), content)
            else:
                self._fs.pipe_file(path, content)

    def find_local_file(self, name: str, index: int) -> Path | None:
        """Call the function of this name with the URL of this storage."""
        return find_local_file(self._url, name, index)

    def read(self, name: str, index: int) -> bytes:
        """The content of a video. Raises `FileNotFoundError`."""
        content: bytes = self._fs.cat_file(self._make_path(name, index))
        return content

    def delete(self, name: str, count: int) -> None:
        """Delete the videos of a job that exist."""
        for index in range(count):
            path = self._make_path(name, index)
            if self._fs.exists(path):
                with suppress(FileNotFoundError):  # another process has just deleted it
                    self._fs.rm_file(path)

    def sweep_parts(self, before_s: float) -> None:
        """Remove unfinished files of dead processes, last written before `before_s` (seconds of the Unix clock)."""
        if not isinstance(self._fs, LocalFileSystem):
            return
        for path in Path(self._root).iterdir():
            if _PART.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < before_s:
                        path.unlink()

    def _make_path(self, name: str, index: int) -> str:
        return f"{self._root}/{_make_file_name(name, index)}"


def find_local_file(url: str, name: str, index: int) -> Path | None:
    """The path of a video on this machine; None when it is elsewhere or cannot be read here. Creates nothing."""
    if get_protocol(url) not in ("file", "local"):
        return None
    path = Path(LocalFileSystem._strip_protocol(url)) / _make_file_name(name, index)
    try:
        return path if path.is_file() and os.access(path, os.R_OK) else None
    except PermissionError:  # a directory above it cannot be read
        return None


def _make_file_name(name: str, index: int) -> str:
    return f"{name}-{index}{_SUFFIX}"


def _write_atomically(path: Path, content: bytes) -> None:
    """Write a file. It is on the disk when this returns, because its job is reported as completed then."""
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", suffix=_PART_SUFFIX, delete=False
    ) as file:
        part = Path(file.name)
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Bring the names of a directory's files to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
