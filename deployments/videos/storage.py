"""The MP4 files of video jobs: in a folder of this machine, or wherever an fsspec URL points."""

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

from deployments.schemas.image import REQUEST_ID

_SUFFIX, _PART_SUFFIX = ".mp4", ".part"
# A file that is being written, as `_replace` names it.
_PART = re.compile(rf"\.{REQUEST_ID.pattern}-[0-9]+-[0-9]+\.mp4\.[a-z0-9_]{{8}}\.part")


class VideoResults:
    """One file per video, `<name>-<index>.mp4`. Calls block. Raises `OSError` and what the file system raises.

    The folder may hold files of others: only files that a caller names are touched, and what `sweep_parts` says."""

    def __init__(self, url: str) -> None:
        """`url` is a folder, or a URL with a protocol that fsspec knows (`s3://` needs the package s3fs, and so on)."""
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")
        self._url = url
        self._fs.makedirs(self._root, exist_ok=True)

    def write(self, name: str, videos: Iterable[bytes]) -> None:
        """All videos of a job. A file is there whole or not at all."""
        for index, content in enumerate(videos):
            path = self._path(name, index)
            if isinstance(self._fs, LocalFileSystem):
                _replace(Path(path), content)
            else:
                self._fs.pipe_file(path, content)

    def local_file(self, name: str, index: int) -> Path | None:
        """As the function of this name."""
        return local_file(self._url, name, index)

    def read(self, name: str, index: int) -> bytes:
        """Raises `FileNotFoundError`."""
        content: bytes = self._fs.cat_file(self._path(name, index))
        return content

    def delete(self, name: str, count: int) -> None:
        """Those of the videos that there are."""
        for index in range(count):
            path = self._path(name, index)
            if self._fs.exists(path):
                with suppress(FileNotFoundError):  # someone else has just done it
                    self._fs.rm_file(path)

    def sweep_parts(self, before_s: float) -> None:
        """Remove what processes that died while they wrote have left since before a time of the Unix clock."""
        if not isinstance(self._fs, LocalFileSystem):
            return
        for path in Path(self._root).iterdir():
            if _PART.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < before_s:
                        path.unlink()

    def _path(self, name: str, index: int) -> str:
        return f"{self._root}/{_file_name(name, index)}"


def local_file(url: str, name: str, index: int) -> Path | None:
    """Where a video lies on this machine; None where it does not, or cannot be read here. Makes nothing."""
    if get_protocol(url) not in ("file", "local"):
        return None
    path = Path(LocalFileSystem._strip_protocol(url)) / _file_name(name, index)
    try:
        return path if path.is_file() and os.access(path, os.R_OK) else None
    except PermissionError:  # of a folder above it
        return None


def _file_name(name: str, index: int) -> str:
    return f"{name}-{index}{_SUFFIX}"


def _replace(path: Path, content: bytes) -> None:
    """The file, on the disk when this returns: its job is told to be completed then."""
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
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A file's name is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
