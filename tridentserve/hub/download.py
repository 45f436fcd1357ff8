"""Downloads one file of the hub so that it can be continued, and compares it with its hash before it gets its name.

huggingface_hub compares sizes, but no hashes of what comes over HTTP, and it keeps nothing of a file that was cut when
its process ends. Here the first part of a file stays under another name, and the next try goes on from there.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from tridentserve.errors import ModelFolderError

# A download is given up after so many tries in a row of which none brought a byte.
_MAX_FAILED_TRIES = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_CHUNK_BYTES = 4 << 20
_PARTIAL = ".partial"
_DIGITS = 12
"""Digits of a file's hash in the name of what has come of it."""
# The statuses of a hub that has too much to do at the moment.
_TRY_AGAIN = (408, 429, 500, 502, 503, 504)
_SHA256_DIGITS = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository at one commit."""

    name: str
    """The path in the repository."""
    size_bytes: int
    digest: str
    """SHA-256 of a large file (LFS); of any other the SHA-1 by which git knows it."""


def download(url: str, file: HubFile, target: Path, note: Callable[[int], None]) -> None:
    """Bring a file to `target`, from where an earlier try has ended. `note` hears how many bytes have come. Raises
    `ModelFolderError` when the bytes are not those that the hub has announced, or when the connection fails too often,
    and huggingface_hub's `HfHubHTTPError` when the hub refuses the file."""
    # Named after its hash: what has come of the file of another revision is not the beginning of this one.
    partial = target.with_name(f"{target.name}.{file.digest[:_DIGITS]}{_PARTIAL}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    for other in partial.parent.glob(f"{glob.escape(target.name)}.{'?' * _DIGITS}{_PARTIAL}"):
        if other != partial:
            other.unlink(missing_ok=True)
    partial.touch()
    note(partial.stat().st_size)
    _receive_all(url, file, partial, note)
    actual = compute_digest(partial, file.digest)
    if actual != file.digest:
        partial.unlink()
        raise ModelFolderError(
            f"{file.name} from {url} has the hash {actual}, but the hub announces {file.digest}; what came was removed "
            "and is not used. Try again; if that does not help, the hub's copy or something on the way to it (a proxy, "
            "the mirror of HF_ENDPOINT) is damaged"
        )
    partial.replace(target)


def compute_digest(path: Path, like: str) -> str:
    """The hash of a file, of the kind that `like` is."""
    with path.open("rb") as file:
        if len(like) == _SHA256_DIGITS:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return digest.hexdigest()


def _receive_all(url: str, file: HubFile, partial: Path, note: Callable[[int], None]) -> None:
    failed_tries = 0
    while (began_at := partial.stat().st_size) != file.size_bytes:
        if began_at > file.size_bytes:  # the rest of something else
            os.truncate(partial, 0)
            note(-began_at)
            continue
        try:
            _receive(url, began_at, partial, note)
            reason = "the answer was too short"
        except httpx2.TransportError as error:
            reason = f"{type(error).__name__}: {error}"
        except HfHubHTTPError as error:
            if error.response.status_code not in _TRY_AGAIN:
                raise
            reason = f"status {error.response.status_code}"
        came = partial.stat().st_size
        if came == file.size_bytes:
            return
        failed_tries = 1 if came > began_at else failed_tries + 1
        if failed_tries >= _MAX_FAILED_TRIES:
            raise ModelFolderError(
                f"{file.name} could not be fetched from {url}: after {came} of {file.size_bytes} bytes {reason}, "
                f"{failed_tries} times in a row; try again, it goes on from there"
            )
        logger.warning("%s: cut after %d of %d bytes (%s); going on", file.name, came, file.size_bytes, reason)
        time.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failed_tries - 1)))


def _receive(url: str, offset: int, partial: Path, note: Callable[[int], None]) -> None:
    """Append what comes from `offset` on. A server that does not know ranges sends all again."""
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
    # The session follows redirects, and sends the token to no other host.
    with get_session().stream("GET", url, headers=headers, timeout=timeout_s) as response:
        hf_raise_for_status(response)
        goes_on = response.status_code == httpx2.codes.PARTIAL_CONTENT
        if offset and not goes_on:
            note(-offset)
        with partial.open("ab" if goes_on else "wb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
                note(len(chunk))
