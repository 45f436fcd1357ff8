"""Parcels in memory that two workers of a node share, where NIXL cannot be used or has no room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tests.device.recording import RecordingDevice
from tests.engine.live.handoff.test_handoff import KEY, DirectPeer, assert_same, parcel_of
from tridentserve.engine.live.handoff import shared_parcels
from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.shared_parcels import SharedParcels
from tridentserve.errors import HandoffError

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of that of the machine's shared memory."""
    monkeypatch.setattr(shared_parcels, "_SHARED_DIR", tmp_path)
    return tmp_path


@pytest.fixture
def peers() -> dict[str, DirectPeer]:
    """Producer `a` and consumer `b` without NIXL, on one node."""
    peers = {name: DirectPeer(None, shares_memory=True) for name in "ab"}
    for name, peer in peers.items():
        peer.buffer = HandoffBuffer(name, peers, torch.zeros(64, dtype=torch.uint8), None)
    return peers


async def hand_over(peers: dict[str, DirectPeer]) -> None:
    peers["a"].buffer.keep_output(KEY, parcel_of())
    await peers["a"].buffer.push_output(KEY, "b")
    assert_same(await peers["b"].buffer.fetch_parcel(KEY, "a"), parcel_of())


async def test_a_parcel_comes_in_a_file_and_leaves_none(
    peers: dict[str, DirectPeer], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    stock = SharedParcels.open_file

    def open_file(self: SharedParcels, path: Path, nbytes: int) -> torch.Tensor:
        opened.append(path)
        return stock(self, path, nbytes)

    monkeypatch.setattr(SharedParcels, "open_file", open_file)
    await hand_over(peers)
    assert [path.parent for path in opened] == [directory]
    assert list_files(directory) == []


async def test_a_parcel_for_which_no_memory_is_left_goes_through_rays_store(
    peers: dict[str, DirectPeer], directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    await hand_over(peers)
    assert "No space left on device" in caplog.text
    assert list_files(directory) == []


async def test_a_parcel_that_the_peer_cannot_map_goes_through_rays_store(
    peers: dict[str, DirectPeer], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> torch.Tensor:
        raise FileNotFoundError("another container")

    monkeypatch.setattr(SharedParcels, "open_file", refuse)
    with pytest.raises(HandoffError, match="b cannot map"):
        await peers["b"].buffer.deliver_file(KEY, parcel_of().layout(), directory / "file")
    await hand_over(peers)
    assert list_files(directory) == []


def test_memory_is_page_locked_as_long_as_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    device = RecordingDevice()
    monkeypatch.setattr(shared_parcels, "find_device", lambda _: device)
    parcels = SharedParcels(HOST)
    path, made = parcels.make_file(4096)
    opened = parcels.open_file(path, 4096)
    made[:8] = torch.arange(8, dtype=torch.uint8)
    assert opened[:8].tolist() == list(range(8))
    path.unlink()
    view = opened[16:32].view(torch.float32)
    assert device.registered == {made.data_ptr(): 4096, opened.data_ptr(): 4096}
    del made, opened
    assert list(device.registered.values()) == [4096], "a view still uses the second mapping"
    del view
    assert not device.registered


def test_what_a_killed_worker_has_left_is_removed(directory: Path) -> None:
    left = directory / f"tridentserve-parcel-{2**22 + 1}-0"  # no process has this id
    own = directory / f"tridentserve-parcel-{os.getpid()}-7"
    for path in (left, own):
        path.touch()
    SharedParcels(HOST)
    assert list_files(directory) == [own]


def test_what_another_user_has_left_stays(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    left = directory / f"tridentserve-parcel-{2**22 + 1}-0"
    left.touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        SharedParcels(HOST)
    assert list_files(directory) == [left]


def list_files(directory: Path) -> list[Path]:
    return list(directory.iterdir())
