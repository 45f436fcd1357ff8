"""Stands where Ray would start the interpreter of a CPU worker: has the process forked by a server that has imported
torch and diffusers before (`fork_server`), which saves each worker ten seconds of one core.

Ray runs this file as a script, with the path of its own script and the arguments of that. The process that Ray started
stays until the forked one has ended. Where no server can be had, it becomes the worker itself, as without this module.
Nothing is imported here but what starts in milliseconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# The folder from which the server imports this package, where nothing else leads to it.
_ROOT = str(Path(__file__).parents[4])
_START_SERVER = """\
import sys
sys.path.insert(0, sys.argv[1])
from tridentserve.engine.live.spawning.fork_server import serve
sys.path.remove(sys.argv[1])
serve(int(sys.argv[2]), int(sys.argv[3]))
"""
# Differs between workers that one server may fork; it is given to each.
_JOB = "RAY_JOB_ID"
# The answer of a server that has forked.
FORKED = b"forked"
_BACKLOG = 1024


def main(arguments: list[str]) -> None:
    """Returns when the process forked for `arguments` has ended."""
    try:
        server = connect()
        request = json.dumps({"arguments": arguments, "variables": {_JOB: os.environ.get(_JOB, "")}})
        socket.send_fds(server, [request.encode()], [0, 1, 2])
        answer = server.recv(len(FORKED))
    except OSError as error:
        sys.stderr.write(f"forked_start: no fork server, the worker imports all by itself: {error}\n")
        answer = b""
    if answer != FORKED:
        os.execv(sys.executable, [sys.executable, *arguments])
    # The forked process holds the other end while it lives, and sends nothing more.
    server.recv(1)


def connect() -> socket.socket:
    """A connection to the server whose environment is that of this process; it is started if there is none. Raises
    `OSError`."""
    folder = _make_folder()
    path = folder / f"{_hash_environment()}.sock"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
            _start_server(path)
            connection.connect(str(path))
    return connection


def _start_server(path: Path) -> None:
    """It takes connections at once, and answers them when it has imported all."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        number = listener.fileno()
        subprocess.Popen(
            [sys.executable, "-P", "-c", _START_SERVER, _ROOT, str(number), str(os.getppid())],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _make_folder() -> Path:
    """The folder of the sockets, which nobody else may enter."""
    folder = Path(tempfile.gettempdir()) / f"tridentserve-fork-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's own: remove it, or give it mode 700")
    return folder


def _hash_environment() -> str:
    """Processes with the same are alike when they have imported the same: Ray's node, the interpreter, the folder, the
    niceness, all variables, and the code, which may be another when a service is deployed again."""
    variables = sorted((name, value) for name, value in os.environ.items() if name != _JOB)
    code = sorted((str(path), path.stat().st_mtime_ns) for path in Path(_ROOT, "tridentserve").rglob("*.py"))
    alike = [os.getppid(), sys.executable, str(Path.cwd()), os.nice(0), variables, code]
    return hashlib.sha256(json.dumps(alike).encode()).hexdigest()[:24]


if __name__ == "__main__":
    main(sys.argv[1:])
