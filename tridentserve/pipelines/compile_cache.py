"""One folder for the code that torch.compile makes on a node. It outlives the workers, so that one of them compiles and
the others, and later ones, find the code.

torch writes shared libraries where they are found later: a worker that is killed while the linker runs leaves one
without its beginning ("invalid ELF header"), which torch would load and fail again and again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import struct
import time
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

logger = logging.getLogger(__name__)

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_CPU_INFO = Path("/proc/cpuinfo")
# What was written less than this ago may be under way.
_SETTLED_S = 10.0
# The header of a 64-bit ELF file up to the number of its sections, whose table is its end.
_ELF_HEADER = struct.Struct("<4s36xQ10xHH")
_ELF_MAGIC = b"\x7fELF"


def open_compile_cache(folder: Path) -> None:
    """Have torch keep what it compiles in this process, and Triton too, in a part of `folder` for machines like this
    one: compiled code may need all that its CPU can do. A folder that whoever started this process has named in the
    environment stays, and a `folder` that cannot be used is left alone."""
    if os.environ.get(_VARIABLE) not in (None, default_cache_dir()):  # torch itself writes its default there
        return
    own = folder / _describe_machine()
    try:
        for path in (folder, own):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            state = path.stat()
            if state.st_uid != os.getuid() or state.st_mode & 0o022:
                raise PermissionError(f"{path} is not this user's own: remove it, or give it mode 700")
    except OSError as error:
        logger.warning("compiled code is kept in %s: %s", cache_dir(), error)
        return
    os.environ[_VARIABLE] = str(own.absolute())
    remove_damaged()


def remove_damaged() -> int:
    """Remove the shared libraries of the folder that were not written to their end; returns how many there were."""
    damaged = [path for path in Path(cache_dir()).rglob("*.so") if _is_damaged(path)]
    for path in damaged:
        logger.warning("%s is damaged, it is removed", path)
        path.unlink(missing_ok=True)
    return len(damaged)


def _is_damaged(path: Path) -> bool:
    try:
        state = path.stat()
        with path.open("rb") as file:
            header = file.read(_ELF_HEADER.size)
    except OSError:  # another worker has removed it, or may do so
        return False
    if time.time() - state.st_mtime < _SETTLED_S:
        return False
    if len(header) < _ELF_HEADER.size:
        return True
    magic, table_offset, entry_bytes, num_entries = _ELF_HEADER.unpack(header)
    return bool(magic != _ELF_MAGIC or state.st_size < table_offset + entry_bytes * num_entries)


def _describe_machine() -> str:
    """A short name for the kind of this machine's CPU."""
    features = ""
    if _CPU_INFO.is_file():
        lines = _CPU_INFO.read_text(errors="replace").splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
