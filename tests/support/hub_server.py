"""A server on this machine that speaks the protocol of the Hugging Face hub, as far as huggingface_hub 2.4 asks for
models: their commit, the list of their files, and the files, large ones (LFS) behind a redirect to another host, with
ranges. It can cut connections, send other bytes, and ask for a token."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LFS_SUFFIXES = (".safetensors", ".bin", ".onnx")


@dataclass
class HubServer:
    """What the server has, does wrong on purpose, and was asked."""

    model_id: str
    files: dict[str, bytes]
    """The content of the repository, by the paths in it."""
    token: str | None = None
    """Requests without this token are refused."""
    cuts: dict[str, int] = field(default_factory=dict)
    """The connection of the next download of a file is closed after so many bytes."""
    wrong: set[str] = field(default_factory=set)
    """Files whose first byte is sent with another value."""
    requests: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    url: str = ""

    def downloads_of(self, name: str) -> list[str]:
        """The requests for the bytes of a file, by their ranges."""
        path = f"GET /bytes/{name} "
        return [line.removeprefix(path) for line in self.requests if line.startswith(path)]


def read_repository(folder: Path) -> dict[str, bytes]:
    """The files of a model folder as a repository has them."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@contextmanager
def run_hub_server(hub: HubServer) -> Iterator[HubServer]:
    handler = type("HubHandlerOfOne", (_HubHandler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[HubServer]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}")
        if path.startswith("/bytes/"):  # as a CDN, which must not see the token
            assert self.headers.get("Authorization") is None
            self._send_range(path.removeprefix("/bytes/"))
        elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, "GatedRepo")
        elif path.startswith(api := f"/api/models/{hub.model_id}/"):
            self._answer_api(*path.removeprefix(api).split("/", 1))
        elif path.startswith(files := f"/{hub.model_id}/resolve/"):
            self._resolve(*path.removeprefix(files).split("/", 1))
        else:
            self._refuse(404, "RepoNotFound")

    def _answer_api(self, kind: str, revision: str) -> None:
        if revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif kind == "tree":
            self._send_json([_describe(name, content) for name, content in self.hub.files.items()])
        else:
            self._send_json({"id": self.hub.model_id, "sha": COMMIT, "siblings": []})

    def _resolve(self, revision: str, name: str) -> None:
        if revision != COMMIT or name not in self.hub.files:
            self._refuse(404, "EntryNotFound")
            return
        about = _describe(name, self.hub.files[name])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{about["oid"]}"'}
        if lfs := about.get("lfs"):
            other_host = self.hub.url.replace("127.0.0.1", "localhost")
            linked = {"X-Linked-Etag": f'"{lfs["oid"]}"', "X-Linked-Size": str(lfs["size"])}
            self._send(302, b"", {**headers, **linked, "Location": f"{other_host}/bytes/{name}"})
        elif self.command == "HEAD":
            self._send(200, self.hub.files[name], headers)
        else:
            self.hub.requests.append(f"GET /bytes/{name} ")
            self._send(200, self._spoil(name), headers)

    def _send_range(self, name: str) -> None:
        content = self._spoil(name)
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        part = content[begin:]
        headers = {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"} if begin else {}
        cut = self.hub.cuts.pop(name, None)
        self._send(206 if begin else 200, part, headers, cut)
        if cut is not None:
            self.close_connection = True

    def _spoil(self, name: str) -> bytes:
        content = self.hub.files[name]
        return bytes([content[0] ^ 1]) + content[1:] if name in self.hub.wrong else content

    def _send_json(self, answer: Any) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])


def _describe(name: str, content: bytes) -> dict[str, Any]:
    """An entry of the list of files."""
    sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": sha1}
    if name.endswith(_LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
