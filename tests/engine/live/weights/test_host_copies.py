"""Which host copies stay, and which go: of other revisions, formats and processes. Locks of two open files exclude each
other in one process as in two."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.pipelines.variants import edit_json
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.models.number_formats import NumberFormats
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import Replica
from tridentserve.stages import Stage

C = Replica("flux", Stage.DECODE)
CPU = torch.device("cpu")
# Uses the copy of stage C until it is killed.
_USER = """
import sys, torch
from pathlib import Path
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.plans import Replica
from tridentserve.stages import Stage

copies = HostCopies(Path(sys.argv[1]), {"flux": ModelSource("flux", Path(sys.argv[2]))}, torch.device("cpu"))
copies.make_all([Replica("flux", Stage.DECODE)])
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tiny_cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ensure_tiny("flux", tiny_cache), tmp_path / "snapshots" / "a1"))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "host"


def open_copies(host: Path, folder: Path, dtype: str | None = None) -> HostCopies:
    return HostCopies(host, {"flux": ModelSource("flux", folder, NumberFormats.parse(dtype))}, CPU)


def list_stems(host: Path) -> set[str]:
    """All that is there belongs to one of these copies."""
    assert {path.suffix for path in host.iterdir()} <= {".bin", ".json", ".lock"}
    return {path.stem for path in host.iterdir()}


def test_another_revision_takes_the_place_of_the_one_before(folder: Path, host: Path) -> None:
    open_copies(host, folder).make_all([C])
    (before,) = list_stems(host)
    other = Path(shutil.copytree(folder, folder.with_name("b2")))
    open_copies(host, other).make_all([C])
    (after,) = list_stems(host)
    assert after != before


def test_another_format_takes_the_place_of_the_one_before(folder: Path, host: Path) -> None:
    open_copies(host, folder).make_all([C])
    (before,) = list_stems(host)
    half = open_copies(host, folder, "bfloat16")
    assert not half.has(C)
    half.make_all([C])
    (after,) = list_stems(host)
    assert after != before


def test_changed_files_take_the_place_of_those_before(folder: Path, host: Path) -> None:
    open_copies(host, folder).make_all([C])
    (before,) = list_stems(host)
    edit_json(folder / "vae" / "config.json", scaling_factor=0.25)
    open_copies(host, folder).make_all([C])
    (after,) = list_stems(host)
    assert after != before


def test_files_that_two_revisions_share_have_one_copy(folder: Path, host: Path) -> None:
    """As in the hub's cache, where the files of a snapshot are links to those of the repository."""
    for revision in ("x", "y"):
        shutil.copytree(
            folder, folder.with_name(revision), copy_function=lambda source, to: Path(to).symlink_to(source)
        )
    open_copies(host, folder.with_name("x")).make_all([C])
    assert open_copies(host, folder.with_name("y")).has(C)


def test_a_copy_that_is_used_stays_until_it_is_not(folder: Path, host: Path) -> None:
    first = open_copies(host, folder)
    first.make_all([C])
    half = open_copies(host, folder, "bfloat16")
    assert half.get(C).layout.nbytes < first.get(C).layout.nbytes
    assert len(list_stems(host)) == 2
    first.drop_model("flux")
    (left,) = list_stems(host)
    assert half.has(C)
    open_copies(host, folder, "bfloat16").make_all([C])
    assert list_stems(host) == {left}


def test_another_process_keeps_what_it_uses_and_a_killed_one_keeps_nothing(folder: Path, host: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _USER, str(host), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        try:
            assert user.stdout is not None
            assert user.stdout.readline() == "made\n"
            (used,) = list_stems(host)
            open_copies(host, folder, "bfloat16").make_all([C])
            assert used in list_stems(host)
            open_copies(host, folder).drop_model("flux")
            assert used in list_stems(host)
        finally:
            user.send_signal(signal.SIGKILL)
    open_copies(host, folder, "bfloat16").make_all([C])
    assert used not in list_stems(host)
    assert len(list_stems(host)) == 1


def test_the_last_worker_that_drops_a_model_removes_its_copies(folder: Path, host: Path) -> None:
    workers = [open_copies(host, folder) for _ in range(2)]
    for worker in workers:
        worker.make_all([C])
    workers[0].drop_model("flux")
    assert len(list_stems(host)) == 1
    workers[1].drop_model("flux")
    assert not list_stems(host)


def test_the_copies_of_a_model_that_is_added_stay(folder: Path, host: Path) -> None:
    source = ModelSource("flux", folder)
    open_copies(host, folder).make_all([C])
    worker = HostCopies(host, {}, CPU)
    worker.add_model(source)
    open_copies(host, folder).drop_model("flux")
    assert worker.has(C)


def test_what_a_killed_process_has_left_unfinished_goes_with_the_rest(folder: Path, host: Path) -> None:
    open_copies(host, folder).make_all([C])
    (stem,) = list_stems(host)
    (host / f"{stem.rpartition('.')[0]}.0123456789abcdef.unfinished").write_bytes(b"half")
    open_copies(host, folder).make_all([C])
    assert list_stems(host) == {stem}


def test_another_model_or_stage_stays(folder: Path, host: Path) -> None:
    others = HostCopies(host, {"flux-1": ModelSource("flux-1", folder), "flux": ModelSource("flux", folder)}, CPU)
    others.make_all([Replica("flux-1", Stage.DECODE), Replica("flux", Stage.ENCODE)])
    stems = list_stems(host)
    del others
    open_copies(host, folder, "bfloat16").make_all([C])
    assert stems < list_stems(host)
