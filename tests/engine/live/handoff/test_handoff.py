"""Two handoff buffers in one process, joined by real NIXL agents: slots, overflow, failures, the end of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from tests.support.waiting import until
from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.peer import CompletedTransfer, HandoffKey
from tridentserve.engine.live.transport.nixl_link import NixlLink, TransferStuckError
from tridentserve.engine.live.transport.parcel import Parcel, ParcelLayout
from tridentserve.errors import HandoffError

CAPACITY = 1 << 20
KEY = HandoffKey("request", 3)


class DirectPeer:
    """A peer without an actor between: calls go straight to the other buffer."""

    def __init__(self, link: NixlLink | None, shares_memory: bool = False) -> None:
        self._link = link
        self.shares_memory = shares_memory
        self.buffer: HandoffBuffer

    @property
    def link_name(self) -> str | None:
        return self._link.address.name if self._link is not None else None

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self.buffer, name)


class Pair:
    """Producer `a` and consumer `b`."""

    def __init__(self, link_a: NixlLink | None, link_b: NixlLink | None, slab_a: torch.Tensor, slab_b: torch.Tensor):
        self.transfers: list[CompletedTransfer] = []
        peers = {"a": DirectPeer(link_a), "b": DirectPeer(link_b)}
        self.a = HandoffBuffer("a", peers, slab_a, link_a, self.transfers.append)
        self.b = HandoffBuffer("b", peers, slab_b, link_b, self.transfers.append)
        peers["a"].buffer, peers["b"].buffer = self.a, self.b

    @property
    def paths(self) -> list[str]:
        return [transfer.path for transfer in self.transfers]


def parcel_of(nbytes: int = 4096) -> Parcel:
    generator = torch.Generator().manual_seed(nbytes)
    floats = torch.randn(nbytes // 4, generator=generator)
    return Parcel({"x": floats.reshape(2, -1), "half": floats[:7].to(torch.bfloat16)}, {"step": 4, "shift": 0.5})


def empty(nbytes: int) -> ParcelLayout:
    """A layout of `nbytes` bytes that hold nothing."""
    return ParcelLayout((), nbytes, {})


def assert_same(got: Parcel, expected: Parcel) -> None:
    assert got.values == expected.values
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor)


@pytest.fixture(scope="module")
def links() -> Iterator[tuple[NixlLink, NixlLink, torch.Tensor, torch.Tensor]]:
    slabs = [torch.zeros(CAPACITY, dtype=torch.uint8) for _ in range(2)]
    link_a, link_b = NixlLink("test-a", slabs[0]), NixlLink("test-b", slabs[1])

    for one, other in ((link_a, link_b), (link_b, link_a)):
        one.add_peer(other.address).result()
    yield link_a, link_b, slabs[0], slabs[1]
    for link in (link_a, link_b):
        link.close()


@pytest.fixture
def pair(links: tuple[NixlLink, NixlLink, torch.Tensor, torch.Tensor]) -> Pair:
    return Pair(*links)


@pytest.fixture
def host_pair() -> Pair:
    return Pair(None, None, torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8))


async def test_pushed_through_nixl_and_the_slot_is_free_again(pair: Pair) -> None:
    pair.a.keep_output(KEY, parcel_of())
    await pair.a.push_output(KEY, "b")
    assert pair.b.used_bytes > 0
    assert_same(await pair.b.fetch_parcel(KEY, "a"), parcel_of())
    assert pair.paths == ["nixl"]
    assert (pair.a.used_bytes, pair.b.used_bytes, pair.b.num_parcels) == (0, 0, 0)


async def test_not_pushed_yet_is_asked_for(pair: Pair) -> None:
    pair.a.keep_output(KEY, parcel_of())
    assert_same(await pair.b.fetch_parcel(KEY, "a"), parcel_of())
    assert pair.paths == ["nixl"]


async def test_asking_joins_the_push_under_way(pair: Pair) -> None:
    pair.a.keep_output(KEY, parcel_of())
    push = pair.a.push_output(KEY, "b")
    assert_same(await pair.b.fetch_parcel(KEY, "a"), parcel_of())
    await push
    assert pair.paths == ["nixl"]


async def test_what_has_arrived_is_not_sent_again(pair: Pair) -> None:
    """A consumer that is slow to notice asks for what was pushed while it asked."""
    pair.a.keep_output(KEY, parcel_of())
    await pair.a.push_output(KEY, "b")
    await pair.a.send_output(KEY, "b")
    assert pair.paths == ["nixl"]
    assert_same(await pair.b.fetch_parcel(KEY, "a"), parcel_of())
    assert (pair.a.used_bytes, pair.b.used_bytes, pair.b.num_parcels) == (0, 0, 0)


@pytest.mark.parametrize("full", ["producer", "consumer"])
async def test_a_full_buffer_goes_through_host_memory(pair: Pair, full: str) -> None:
    blocked = HandoffKey("other", 1)
    buffer = pair.a if full == "producer" else pair.b
    assert await buffer.reserve_slot(blocked, "x", empty(CAPACITY)) == 0
    pair.a.keep_output(KEY, parcel_of())
    await pair.a.push_output(KEY, "b")
    assert pair.paths == ["host"]
    assert_same(await pair.b.fetch_parcel(KEY, "a"), parcel_of())
    await buffer.release_slot(blocked)
    assert (pair.a.used_bytes, pair.b.used_bytes, pair.b.num_parcels) == (0, 0, 0)


async def test_larger_than_the_slab_goes_through_host_memory(pair: Pair) -> None:
    pair.a.keep_output(KEY, parcel_of(2 * CAPACITY))
    await pair.a.push_output(KEY, "b")
    assert pair.paths == ["host"]
    assert_same(await pair.b.fetch_parcel(KEY, "a"), parcel_of(2 * CAPACITY))


async def test_many_bytes_go_from_where_they_are(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room in the producer's slab is needed, and the same tensors may be on several ways at once."""
    monkeypatch.setattr("tridentserve.engine.live.handoff.outgoing.MANY_BYTES", 1 << 14)
    parcel = parcel_of(1 << 16)
    parcel.tensors |= {"again": parcel.tensors["x"], "nothing": torch.zeros(0, 3), "more": torch.arange(5000)}
    newer = HandoffKey("request", 9)
    assert await pair.a.reserve_slot(HandoffKey("other", 1), "x", empty(CAPACITY)) == 0
    for key in (KEY, newer):
        pair.a.keep_output(key, parcel)
    await asyncio.gather(pair.a.push_output(KEY, "b"), pair.a.push_output(newer, "b"))
    for key in (KEY, newer):
        assert_same(await pair.b.fetch_parcel(key, "a"), parcel)
    assert pair.paths == ["nixl", "nixl"]
    await pair.a.release_slot(HandoffKey("other", 1))
    assert (pair.a.used_bytes, pair.b.used_bytes) == (0, 0)


async def test_many_bytes_are_used_where_they_are(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slots are free when the tensors are dropped; half of the slab stays for others."""
    monkeypatch.setattr("tridentserve.engine.live.handoff.inbox.MANY_BYTES", 1 << 14)
    sent, newer = parcel_of(CAPACITY // 4), HandoffKey("request", 9)
    for key in (KEY, newer):
        pair.a.keep_output(key, sent)
        await pair.a.push_output(key, "b")
    copied = await pair.b.fetch_parcel(KEY, "a")
    one_slot = pair.b.used_bytes
    assert one_slot == sent.layout().nbytes
    used = (await pair.b.fetch_parcel(newer, "a")).tensors
    assert pair.b.used_bytes == one_slot
    pair.b.forget_request("request", 9)
    pair.a.keep_output(HandoffKey("other", 1), parcel_of(CAPACITY // 8))
    await pair.a.push_output(HandoffKey("other", 1), "b")
    assert_same(copied, sent)
    assert_same(Parcel(used, sent.values), sent)
    first_row = used["x"][0]
    del used
    await asyncio.sleep(0.01)
    assert pair.b.used_bytes > one_slot, "a view is left"
    assert torch.equal(first_row, sent.tensors["x"][0])
    del first_row
    pair.b.forget_request("other", 1)
    await until(lambda: pair.b.used_bytes == 0)


async def test_without_nixl(host_pair: Pair) -> None:
    host_pair.a.keep_output(KEY, parcel_of())
    assert_same(await host_pair.b.fetch_parcel(KEY, "a"), parcel_of())
    assert host_pair.paths == ["host"]


async def test_nixl_fails_and_host_memory_serves(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> tuple[Future[None], Future[None]]:
        failed: Future[None] = Future()
        failed.set_exception(HandoffError("the link is down"))
        return failed, Future()

    link = pair.a._link
    assert link is not None
    monkeypatch.setattr(link, "write", refuse)
    pair.a.keep_output(KEY, parcel_of())
    assert_same(await pair.b.fetch_parcel(KEY, "a"), parcel_of())
    assert pair.paths == ["host"]
    assert (pair.a.used_bytes, pair.b.used_bytes) == (0, 0)


async def test_the_same_worker_needs_no_transfer(pair: Pair) -> None:
    pair.a.keep_output(KEY, parcel_of())
    assert_same(await pair.a.fetch_parcel(KEY, "a"), parcel_of())
    assert pair.paths == ["local"]


async def test_forget_drops_old_plans_only_and_what_comes_late(pair: Pair) -> None:
    newer = HandoffKey("request", 9)
    pair.a.keep_output(KEY, parcel_of())
    pair.a.keep_output(newer, parcel_of(8192))
    await pair.a.push_output(KEY, "b")
    for buffer in (pair.a, pair.b):
        buffer.forget_request("request", 3)
    await until(lambda: pair.b.used_bytes == 0)  # b may hear of the bytes later than a
    assert (pair.a.num_parcels, pair.b.num_parcels) == (1, 0)
    with pytest.raises(HandoffError, match="dropped"):
        await pair.b.fetch_parcel(KEY, "a")
    pair.a.keep_output(KEY, parcel_of())
    assert await pair.b.reserve_slot(KEY, "a", empty(64)) is None
    layout = parcel_of().layout()
    await pair.b.deliver_parcel(KEY, layout, parcel_of().pack(layout))
    assert (pair.a.num_parcels, pair.b.num_parcels) == (1, 0)
    assert_same(await pair.b.fetch_parcel(newer, "a"), parcel_of(8192))


async def test_a_slot_that_is_being_written_is_freed_only_afterwards(pair: Pair) -> None:
    assert await pair.b.reserve_slot(KEY, "a", empty(64)) is not None
    pair.b.forget_request("request", 3)
    assert pair.b.used_bytes > 0  # the writer may still write
    await pair.b.release_slot(KEY)
    assert pair.b.used_bytes == 0


async def test_slots_of_a_lost_peer_are_freed(pair: Pair) -> None:
    await pair.b.reserve_slot(KEY, "a", empty(64))
    pair.b.drop_peer("c")
    assert pair.b.used_bytes > 0
    pair.b.drop_peer("a")
    assert pair.b.used_bytes == 0


async def test_a_write_that_takes_too_long_keeps_its_memory_until_it_has_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: Future[None] = Future()
    settled: Future[None] = Future()
    link = pair.a._link
    assert link is not None
    monkeypatch.setattr(link, "write", lambda *args: (ended, settled))
    ended.set_exception(TransferStuckError("stuck"))
    pair.a.keep_output(KEY, parcel_of())
    assert_same(await pair.b.fetch_parcel(KEY, "a"), parcel_of())
    assert pair.paths == ["host"]
    assert min(pair.a.used_bytes, pair.b.used_bytes) > 0
    settled.set_result(None)
    await until(lambda: (pair.a.used_bytes, pair.b.used_bytes) == (0, 0))


async def test_a_producer_that_dies_while_it_writes_leaves_nobody_waiting(pair: Pair) -> None:
    await pair.b.reserve_slot(KEY, "a", empty(64))
    taken = asyncio.create_task(pair.b.fetch_parcel(KEY, "a"))
    await asyncio.sleep(0.01)
    pair.b.drop_peer("a")
    with pytest.raises(HandoffError, match="holds no output"):
        await taken
    assert pair.b.used_bytes == 0


COPY = HandoffKey("request", 3, step=5)


@pytest.mark.parametrize("transport", ["nixl", "host"])
async def test_a_copy_of_a_state_is_kept_until_its_request_ends(pair: Pair, host_pair: Pair, transport: str) -> None:
    used = pair if transport == "nixl" else host_pair
    await used.a.send_checkpoint(COPY, parcel_of(), "b")
    assert used.paths == [transport]
    assert (used.a.num_parcels, used.b.num_parcels, len(used.b.checkpoints), used.b.used_bytes) == (0, 1, 1, 0)
    used.b.drop_peer("a")
    assert_same(await used.a.fetch_parcel(COPY, "b"), parcel_of())
    assert_same(await used.b.fetch_parcel(COPY, "b"), parcel_of())
    assert used.b.checkpoints.nbytes == parcel_of().nbytes, "the worker that resumes from it may be lost, too"
    used.b.forget_request("request", 4, with_checkpoints=False)
    assert_same(await used.a.fetch_parcel(COPY, "b"), parcel_of())
    for buffer in (used.a, used.b):
        buffer.forget_request("request", 4)
    assert (used.a.num_parcels, used.b.num_parcels) == (0, 0)
    with pytest.raises(HandoffError, match="dropped"):
        await used.a.fetch_parcel(COPY, "b")


async def test_the_two_newest_copies_are_kept(pair: Pair) -> None:
    keys = [HandoffKey("request", plan_id, step) for plan_id, step in ((3, 9), (4, 11), (4, 12))]
    for key in keys:
        await pair.a.send_checkpoint(key, parcel_of(), "b")
    assert [pair.b.checkpoints.get(key) is not None for key in keys] == [False, True, True]
    pair.b.forget_request("request", 4)
    assert pair.b.num_parcels == 0


async def test_a_copy_that_comes_after_the_end_is_dropped(pair: Pair) -> None:
    pair.b.forget_request("request", 3)
    await pair.a.send_checkpoint(COPY, parcel_of(), "b")
    assert (pair.a.num_parcels, pair.b.num_parcels, pair.b.used_bytes) == (0, 0, 0)


async def test_a_copy_that_cannot_be_made_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*args: object) -> None:
        raise HandoffError("a peer did not answer")

    for method in ("reserve_slot", "deliver_parcel"):
        monkeypatch.setattr(pair.b, method, refuse)
    with pytest.raises(HandoffError, match="did not answer"):
        await pair.a.send_checkpoint(COPY, parcel_of(), "b")
    assert (pair.a.num_parcels, pair.a.used_bytes, pair.b.num_parcels) == (0, 0, 0)
