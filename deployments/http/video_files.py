"""MP4 files as answers, also ranges of them."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from tridentserve.errors import RequestNotFoundError

MP4 = "video/mp4"


class VideoFileResponse(FileResponse):
    """A file of this machine. Raises `RequestNotFoundError`, before anything is sent, when it has just been removed."""

    def __init__(self, path: Path, name: str) -> None:
        """`name` is the file name that clients get."""
        super().__init__(path, media_type=MP4, filename=name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None

        async def send_after_open(message: Message) -> None:
            """Hold the head of the answer back until its body begins, because then the file has been opened."""
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                head, start = start, None
                await send(head)
            await send(message)

        try:
            await super().__call__(scope, receive, send_after_open)
        except (FileNotFoundError, RuntimeError):  # starlette raises RuntimeError when the file does not exist
            if await asyncio.to_thread(Path(self.path).exists):
                raise
            raise RequestNotFoundError("the file of this video has been removed") from None


class VideoBytesResponse(VideoFileResponse):
    """A file in memory. It is written to a temporary file, because starlette answers ranges of files only."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(Path(), name)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with tempfile.NamedTemporaryFile(prefix="tridentserve-", suffix=".mp4") as file:
            await asyncio.to_thread(file.write, self._content)
            file.flush()
            self.path = file.name
            await super().__call__(scope, receive, send)
