"""The NIXL link when things go wrong: no caller hangs, and memory is free only when nothing is written there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from nixl._api import nixl_agent_config

from tests.engine.live.handoff.test_handoff import DirectPeer
from tests.support.waiting import PATIENCE_S, until
from tridentserve.device.cpu_device import CpuDevice
from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.transport import nixl_link
from tridentserve.engine.live.transport.nixl_link import NixlLink, TransferStuckError
from tridentserve.engine.live.transport.nixl_memory import locate_memory
from tridentserve.engine.live.transport.parcel import Parcel, ParcelLayout
from tridentserve.errors import HandoffError

NBYTES = 4096
KEY = HandoffKey("request", 3)


@pytest.fixture
def slabs() -> list[torch.Tensor]:
    return [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(2)]


@pytest.fixture
def links(slabs: list[torch.Tensor]) -> Iterator[tuple[NixlLink, NixlLink]]:
    first, second = NixlLink("going-wrong-a", slabs[0]), NixlLink("going-wrong-b", slabs[1])
    for one, other in ((first, second), (second, first)):
        one.add_peer(other.address).result()
    yield first, second
    for link in (first, second):
        link.close()


def test_its_thread_has_the_context_of_the_slabs_device_before_nixl_starts(
    monkeypatch: pytest.MonkeyPatch, slabs: list[torch.Tensor]
) -> None:
    seen: list[tuple[str, int]] = []
    start = NixlLink._start

    def start_agent(name: str) -> Any:
        seen.append(("start", threading.get_ident()))
        return start(name)

    monkeypatch.setattr(CpuDevice, "enter_thread", lambda device: seen.append((device.kind, threading.get_ident())))
    monkeypatch.setattr(NixlLink, "_start", staticmethod(start_agent))
    NixlLink("with-context", slabs[0]).close()
    assert [what for what, _ in seen] == ["cpu", "start"]
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


def test_an_idle_link_looks_for_nothing(
    links: tuple[NixlLink, NixlLink], slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, progress = list[NixlLink](), NixlLink._progress

    def look(link: NixlLink) -> None:
        looks.append(link)
        progress(link)

    monkeypatch.setattr(NixlLink, "_progress", look)
    _, arrived = links[1].expect(b"note")
    _, written = links[0].write(links[1].address.name, [(locate_memory(slabs[0]), 0)], 0, b"note")
    for settled in (arrived, written):
        settled.result(timeout=PATIENCE_S)
    assert set(looks) == set(links)
    looks.clear()
    for link in (*links, *links):  # Each call wakes the link's thread, which then waits again.
        link._call(lambda: None).result(timeout=PATIENCE_S)
        assert link._choose_pause_s() is None
    assert not looks


def test_nixl_has_no_thread_of_its_own(slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look for news all the time, and take a whole core."""
    configured = list[bool]()

    def configure(enable_prog_thread: bool, **others: Any) -> Any:
        configured.append(enable_prog_thread)
        return nixl_agent_config(enable_prog_thread=enable_prog_thread, **others)

    monkeypatch.setattr("nixl._api.nixl_agent_config", configure)
    NixlLink("idle", slabs[0]).close()
    assert configured == [False]


def test_it_always_hears_that_nothing_came(links: tuple[NixlLink, NixlLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """However short its waits are: CPython's `SimpleQueue` would wait without end now and then."""
    monkeypatch.setattr(nixl_link, "_POLL_S", 1e-6)
    for index in range(6000):
        note = f"{index}".encode()
        nothing, settled = links[0].expect(note, timeout_s=0.0)
        assert isinstance(nothing.exception(timeout=PATIENCE_S), HandoffError)
        links[0].stop_expecting(note)
        settled.result(timeout=PATIENCE_S)


def test_a_cancelled_wait_does_not_end_the_thread(links: tuple[NixlLink, NixlLink]) -> None:
    held = threading.Event()
    links[0]._call(held.wait)
    given_up = links[0].learn(b"not needed any more")
    assert given_up.cancel()
    held.set()
    assert links[0]._call(lambda: "alive").result(timeout=PATIENCE_S) == "alive"


def test_memory_stays_taken_while_bytes_may_move_although_nixl_tells_nothing(
    links: tuple[NixlLink, NixlLink], slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, agent = links[0], links[0]._agent
    silent = threading.Event()

    def fail() -> dict[str, list[bytes]]:
        silent.set()
        raise RuntimeError("no news")

    with monkeypatch.context() as patch:
        patch.setattr(agent, "get_new_notifs", fail)
        ended, settled = link.write(links[1].address.name, [(locate_memory(slabs[0]), 0)], 0, b"note")
        with pytest.raises(TransferStuckError, match="no news"):
            ended.result(timeout=PATIENCE_S)
        assert silent.is_set()
        assert not settled.done()
    links[1].expect(b"note")  # the first write needs progress on both sides
    settled.result(timeout=PATIENCE_S)


async def test_a_slot_whose_bytes_come_too_late_is_free_then(
    links: tuple[NixlLink, NixlLink], slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links[1], "expect", partial(links[1].expect, timeout_s=0.0))
    buffer = HandoffBuffer("b", {"a": DirectPeer(links[0])}, slabs[1], links[1])
    assert await buffer.reserve_slot(KEY, "a", ParcelLayout((), 64, {})) == 0
    with pytest.raises(HandoffError):
        await buffer._inbox.copy_out(KEY, torch.device("cpu"))
    await asyncio.wait({buffer._inbox._slots[KEY].arrived})
    buffer.forget_request(KEY.request_id, KEY.plan_id)
    assert buffer.used_bytes == 64  # it may still be written into
    links[0].write(links[1].address.name, [(locate_memory(slabs[0][:64]), 0)], 0, KEY.to_note())
    await until(lambda: buffer.used_bytes == 0)
    assert buffer.num_parcels == 0


async def test_a_slot_is_given_back_when_the_parcel_cannot_be_packed(
    links: tuple[NixlLink, NixlLink], slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = DirectPeer(links[1])
    peer.buffer = HandoffBuffer("b", {}, slabs[1], links[1])
    producer = HandoffBuffer("a", {"b": peer}, slabs[0], links[0])
    producer.keep_output(KEY, Parcel({"x": torch.ones(8)}))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Parcel, "pack_into", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            await producer.push_output(KEY, "b")
    assert (producer.used_bytes, peer.buffer.used_bytes) == (0, 0)
