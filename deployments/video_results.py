"""The MP4 files of video jobs: in a folder of this machine, or wherever an fsspec URL points."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

_SUFFIX = ".mp4"


class VideoResults:
    """One file per video, `<name>-<index>.mp4`. Calls block. Raises `OSError` and what the file system raises."""

    def __init__(self, url: str) -> None:
        """`url` is a folder, or a URL with a protocol that fsspec knows (`s3://` needs the package s3fs, and so on)."""
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")
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
        """Where a video lies on this machine; None where it does not."""
        path = Path(self._path(name, index))
        return path if isinstance(self._fs, LocalFileSystem) and path.is_file() else None

    def read(self, name: str, index: int) -> bytes:
        """Raises `FileNotFoundError`."""
        content: bytes = self._fs.cat_file(self._path(name, index))
        return content

    def delete(self, name: str, count: int) -> None:
        for index in range(count):
            path = self._path(name, index)
            if self._fs.exists(path):
                self._fs.rm_file(path)

    def files(self) -> dict[str, int]:
        """The names that have files, with how many."""
        found: dict[str, int] = {}
        self._fs.invalidate_cache()
        for entry in self._fs.ls(self._root, detail=False):
            name, dash, rest = str(entry).rpartition("/")[2].rpartition("-")
            index = rest.removesuffix(_SUFFIX)
            if dash and rest.endswith(_SUFFIX) and index.isdigit():
                found[name] = max(found.get(name, 0), int(index) + 1)
        return found

    def _path(self, name: str, index: int) -> str:
        return f"{self._root}/{name}-{index}{_SUFFIX}"


def _replace(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(content)
            file.flush()
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
