"""Weights that come while another plan computes: whole, divided and streamed ones, host copies, budgets, errors."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.device.recording import RecordingDevice, use_recording_device
from tests.engine.live.weights.test_replica_shares import peers
from tests.engine.live.weights.test_replica_store import (
    BLOCK,
    CPU,
    PLENTY,
    RESERVE,
    C,
    D,
    E,
    assert_right,
    host,
    links,
    loads_of,
    make_store,
    size_of,
    source,
)
from tests.pipelines.models import load_stage, make_inputs
from tests.support.waiting import until
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights import layered_weights, weights_loader
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.layer_supplies import HostSupply
from tridentserve.engine.live.weights.layered_weights import LayeredLayout
from tridentserve.engine.live.weights.replica_store import MemoryBudget, ReplicaStore
from tridentserve.engine.live.weights.weights_loader import WeightsLoader
from tridentserve.engine.options import Fetch
from tridentserve.errors import ModelFolderError, OutOfMemoryError
from tridentserve.models.lora_files import LoraFile
from tridentserve.pipelines import loading
from tridentserve.pipelines.lora.reading import LayerChange
from tridentserve.plans import Replica
from tridentserve.stages import Stage
from tridentserve.weights_share import WHOLE, WeightsShare

__all__ = ["host", "links", "peers", "source"]
STREAMED, HALF = WeightsShare(streamed=True), WeightsShare(unit=2)


async def load_all_ahead(
    store: ReplicaStore, *needed: Replica, peak_bytes: int = 0, loras: Sequence[LoraFile] = ()
) -> None:
    """Begin, and wait for what is on its way."""
    store.load_ahead(needed, peak_bytes, loras)
    assert store._ahead._loading is not None
    await asyncio.wait({store._ahead._loading})


def list_layer_threads() -> set[threading.Thread]:
    """The threads that bring layers from host copies."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("layers")}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of bytes that are copied from host copies, in their order."""
    found: list[int] = []
    copy_blocks = weights_loader.copy_blocks

    def copy(target: torch.Tensor, source: torch.Tensor, block_bytes: int) -> None:
        found.append(source.numel())
        copy_blocks(target, source, block_bytes)

    monkeypatch.setattr(weights_loader, "copy_blocks", copy)
    return found


@pytest.mark.parametrize("share", [WHOLE, HALF, STREAMED], ids=["whole", "divided", "streamed"])
async def test_what_came_ahead_is_not_read_again(
    host: HostCopies, source: ModelSource, reads: list[int], share: WeightsShare
) -> None:
    """The plan's turn only attaches it."""
    replica = E if share.streamed else D
    store = make_store(host, shares={replica: share}, place=1)
    await load_all_ahead(store, replica)
    layout = None if share.is_whole else LayeredLayout(host.get(replica), share, 1 % share.unit)
    assert store.ahead_bytes == (size_of(host, replica) if layout is None else layout.num_bytes)
    assert store.resident == ()
    reads.clear()
    (load,) = await loads_of(store, replica)
    assert (reads, load.num_bytes, store.ahead_bytes) == ([], store.resident_bytes, 0)
    if layout is None:
        assert_right(store, source, replica)
        return
    alone = make_store(host, shares={replica: share}, place=1)
    await alone.prepare((replica,))
    kept, expected = (each._resident[replica].loaded.buffer for each in (store, alone))
    for rest, offset in zip(layout.rest, layout._rest_offsets, strict=True):
        assert torch.equal(*(buffer[offset : offset + rest.num_bytes] for buffer in (kept, expected)))
    for layer in () if share.streamed else layout.layers:
        size = min(layout._count_shard_bytes(layer), layer.num_bytes - layout._count_shard_bytes(layer))
        assert torch.equal(*(layout.find_shard(buffer, layer)[:size] for buffer in (kept, expected)))


async def test_streamed_weights_begin_with_their_first_layers(
    host: HostCopies, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(host, shares={E: STREAMED})
    started = list[str | None]()
    start = HostSupply.start

    def note_start(self: Any, layer: Any, slot: torch.Tensor) -> Callable[[], None]:
        started.append(layer.path)
        return start(self, layer, slot)

    monkeypatch.setattr(HostSupply, "start", note_start)
    await load_all_ahead(store, E)
    first = [layer.path for layer in LayeredLayout(host.get(E), STREAMED, 0).layers[:2]]
    assert started == first, "before the plan has the worker"
    await store.prepare((E,))
    inputs = make_inputs(variant="flux")
    with store.use(E, None) as adapter:
        condition = adapter.encode(inputs)
    assert started.count(first[0]) == started[2:].count(first[0]) + 1
    expected = load_stage(source.folder, Stage.ENCODE).encode(inputs)
    assert all(torch.equal(condition[name], tensor) for name, tensor in expected.items())


async def test_everything_comes_beside_what_computes(source: ModelSource, tmp_path: Path) -> None:
    """Also the slots of layers, and the mapping of a host copy. The thread that computes has other things to do."""

    async def refuse(function: Callable[..., Any], *args: Any) -> Any:
        raise AssertionError(f"{function.__name__} in the thread that computes")

    shares: Mapping[Replica, WeightsShare] = {E: STREAMED, D: HALF}
    with use_recording_device(RecordingDevice()) as device:
        HostCopies(tmp_path, {"flux": source}, CPU).make_all([E, D, C])
        copies = HostCopies(tmp_path, {"flux": source}, CPU)  # of a process that has mapped nothing
        loader = WeightsLoader(copies, CPU, "host", BLOCK, None, shares, 0)
        store = ReplicaStore(copies, CPU, MemoryBudget(PLENTY, RESERVE, 0), refuse, loader, None)
        device.held.clear()
        store.load_ahead((E, D, C), 0)
        await asyncio.sleep(0.01)
        assert device.registered == {}
        device.held.set()
        await until(lambda: store._ahead._loading is not None and store._ahead._loading.done())
    assert set(store._ahead._loaded) == {E, D, C}
    # Each of them: opened, allocated, filled; then the slots of those in layers.
    new_memory = ["hand over 1", "wait for work"]
    calls = [call for call in device.calls if call != "wait for work"]
    assert calls == [
        *("copy", "copy", "hand over 1", "copy", "copy", "hand over 1", "hand over 1"),
        *("copy", "copy", "hand over 1", "copy", "copy", "hand over 1", "hand over 1"),
        *("copy", "copy", "hand over 1", "copy"),
    ]
    pairs = list(zip(device.calls, device.calls[1:], strict=False))
    assert [list(pair) for pair in pairs if pair[0] == "hand over 1"] == [new_memory] * 7


# Host copies.


async def test_a_copy_is_mapped_ahead_where_there_is_no_room_for_the_weights(
    source: ModelSource, host: HostCopies, reads: list[int]
) -> None:
    copies = HostCopies(host._folder, {"flux": source}, CPU)
    store = make_store(copies, memory_bytes=size_of(host, D) + RESERVE + 99)
    await load_all_ahead(store, D, peak_bytes=100)
    assert (list(copies._open), reads, store.ahead_bytes) == ([D], [], 0)
    await load_all_ahead(store, D, peak_bytes=99)
    assert store.ahead_bytes == size_of(host, D)


async def test_loras_of_other_plans_take_room(host: HostCopies) -> None:
    """Those of the plan that computes are in its peak."""
    own, other = (LoraFile("flux", name, Path(name), "digest") for name in ("own", "other"))
    change = LayerChange(torch.nn.Linear(1, 1), torch.zeros(40, dtype=torch.uint8), torch.zeros(0), 1.0)
    for files, spare_bytes in (([own], 0), ([own, other], 40)):
        for short_bytes in (0, 1):
            store = make_store(host, memory_bytes=size_of(host, D) + RESERVE + 60 + spare_bytes - short_bytes)
            store.loras.hold(files, lambda file: (change,))
            await load_all_ahead(store, D, peak_bytes=60, loras=[own])
            assert store.ahead_bytes == (0 if short_bytes else size_of(host, D)), (files, short_bytes)


@pytest.mark.parametrize("fetch", ["mapped", "auto"])
async def test_pages_that_are_the_weights_are_mapped_and_nothing_else(
    source: ModelSource, host: HostCopies, fetch: Fetch
) -> None:
    copies = HostCopies(host._folder, {"flux": source}, CPU)
    store = make_store(copies, fetch)
    await load_all_ahead(store, D)
    assert (list(copies._open), store.ahead_bytes) == ([D], 0)
    await store.prepare((D,))
    assert_right(store, source, D)


async def test_a_copy_that_is_not_there_is_made_in_the_plans_turn(source: ModelSource, tmp_path: Path) -> None:
    copies = HostCopies(tmp_path, {"flux": source}, CPU)
    store = make_store(copies)
    await load_all_ahead(store, C)
    assert not copies.has(C)
    (load,) = await loads_of(store, C)
    assert load.source == "disk"


@pytest.mark.parametrize("weights", [True, False], ids=["reading", "building"])
def test_libraries_change_the_whole_process_while_they_load(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    """The reason for which neither is done ahead: if this fails, the libraries no longer do so."""
    seen = set[torch.dtype]()
    build = torch.nn.Linear.__init__

    def note(self: Any, *args: Any, **more: Any) -> None:
        def look() -> None:
            seen.add(torch.get_default_dtype())

        beside = threading.Thread(target=look)  # as one that computes meanwhile
        beside.start()
        beside.join()
        build(self, *args, **more)

    monkeypatch.setattr(torch.nn.Linear, "__init__", note)
    loading.load_adapter(
        source.folder,
        frozenset({Stage.ENCODE}),
        formats=dict.fromkeys(("text_encoder", "text_encoder_2", "transformer", "vae"), "bfloat16"),
        weights=weights,
    )
    assert torch.bfloat16 in seen


def test_two_threads_map_a_copy_once(host: HostCopies, source: ModelSource) -> None:
    """A mapping that nobody knows of any more would stay page-locked."""
    copies = HostCopies(host._folder, {"flux": source}, CPU)
    mapped, found, both_map = list[Path](), list[Any](), threading.Event()
    map_copy = copies._map

    def map_slowly(stem: Path) -> Any:
        mapped.append(stem)
        both_map.wait(0.2) if len(mapped) == 1 else both_map.set()
        return map_copy(stem)

    copies._map = map_slowly  # type: ignore[method-assign]
    threads = [threading.Thread(target=lambda get=get: found.append(get(C))) for get in (copies.find, copies.get)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(mapped) == 1
    assert found[0] is found[1] is not None


# Memory, plans that do not come, errors.


@pytest.fixture(scope="module")
def built(host: HostCopies) -> ReplicaStore:
    """A store that has built the modules of all replicas."""
    store = make_store(host)

    async def build() -> None:
        await store.prepare((E, D, C))
        await store.evict_all_but(())

    asyncio.run(build())
    return store


PLANS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([E, D, C]), min_size=1, max_size=3, unique=True),  # what it needs
        st.integers(0, 200_000),  # bytes of its activations
        st.booleans(),  # stopped before it runs
        st.booleans(),  # what came ahead for it is there before
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shares=st.sampled_from([{}, {E: STREAMED}, {D: HALF}, {E: STREAMED, D: HALF}]),
    spare_bytes=st.integers(0, 1_500_000),
    plans=PLANS,
)
def test_the_budget_is_never_exceeded(
    host: HostCopies, built: ReplicaStore, shares: Mapping[Replica, WeightsShare], spare_bytes: int, plans: Any
) -> None:
    """Whatever plans come, and whichever of them are stopped before they run."""
    budget_bytes = size_of(host, D) + spare_bytes
    store = make_store(host, memory_bytes=budget_bytes + RESERVE, shares=shares)
    store._adapters, store._memos = dict(built._adapters), dict(built._memos)

    async def run() -> None:
        peak_bytes = 0
        for needed, next_peak_bytes, is_stopped, is_waited_for in plans:
            store.load_ahead(needed, peak_bytes)
            if is_waited_for and store._ahead._loading is not None:
                await asyncio.wait({store._ahead._loading})
            else:
                await asyncio.sleep(0)
            assert not store.ahead_bytes or store.resident_bytes + store.ahead_bytes + peak_bytes <= budget_bytes
            if is_stopped:
                continue
            try:
                await store.prepare(needed, next_peak_bytes)
                peak_bytes = next_peak_bytes
            except OutOfMemoryError:
                await store.evict_all_but(())
                peak_bytes = 0
            assert (store.ahead_bytes, store.resident_bytes + peak_bytes <= budget_bytes) == (0, True)
        await store.evict_all_but(())
        assert (store.ahead_bytes, store.resident_bytes) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("share", [WHOLE, STREAMED], ids=["whole", "streamed"])
async def test_what_came_for_a_plan_that_never_runs_leaves(host: HostCopies, share: WeightsShare) -> None:
    """When the weights of another one are to come, and when another one is run."""
    store, before = (
        make_store(host, memory_bytes=size_of(host, E, D) + RESERVE, shares={E: share}),
        list_layer_threads(),
    )
    await load_all_ahead(store, E)
    assert list(store._ahead._loaded) == [E]
    await load_all_ahead(store, D, peak_bytes=size_of(host, E))
    assert list(store._ahead._loaded) == [D], "for which there is no room beside E"
    await store.prepare((C,))
    assert (store.ahead_bytes, store.resident) == (0, (C,))
    assert list_layer_threads() <= before


async def test_a_load_ahead_that_fails_is_left_to_the_plan(
    host: HostCopies, source: ModelSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(host)

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(weights_loader, "copy_blocks", fail)
        await load_all_ahead(store, D, C)
        assert "weights were not loaded ahead: MemoryError('no memory')" in caplog.text
        assert (store.ahead_bytes, store.resident) == (0, ())
        with pytest.raises(MemoryError):
            await store.prepare((D,))
    await store.prepare((D,))
    assert_right(store, source, D)


async def test_a_damaged_copy_is_the_error_of_the_plan_itself(source: ModelSource, tmp_path: Path) -> None:
    store = make_store(HostCopies(tmp_path, {}, CPU))  # of a model that has left
    await load_all_ahead(store, C)
    with pytest.raises(ModelFolderError, match="no model named 'flux'"):
        await store.prepare((C,))


@pytest.mark.parametrize("how", ["unloaded", "evicted", "another plan"])
async def test_what_is_on_its_way_is_waited_for(host: HostCopies, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It is in nobody's books before it is there."""
    store = make_store(host)
    goes_on, copy_blocks = threading.Event(), weights_loader.copy_blocks

    def copy(*args: Any) -> None:
        assert goes_on.wait(10)
        copy_blocks(*args)

    monkeypatch.setattr(weights_loader, "copy_blocks", copy)
    store.load_ahead((D, E), 0)
    await until(lambda: store.ahead_bytes == size_of(host, D))
    calls = {"unloaded": store.unload_model("flux"), "evicted": store.evict_all_but(()), "another plan": None}
    ending = asyncio.ensure_future(calls.pop(how) or store.prepare((C,)))
    for call in calls.values():
        if call is not None:
            call.close()
    await asyncio.wait({ending}, timeout=0.05)
    assert not ending.done()
    goes_on.set()
    await ending
    assert (store.ahead_bytes, store.resident) == (0, (C,) if how == "another plan" else ())


# Loads that fail.


async def test_shards_of_a_peer_that_cannot_be_used_are_let_go(host: HostCopies, peers: Any) -> None:
    """NIXL would write into memory that is another's by then."""
    peer, weights_of_a, weights_of_b = peers
    peer.store = make_store(host, "host", PLENTY, weights_of_a, {D: HALF}, 0)
    await peer.store.prepare((D,))
    b = make_store(host, "peer", PLENTY, weights_of_b, {D: HALF}, 2)
    allocate, registered = b.loader._allocate_buffer, list[int]()

    def refuse_slots(nbytes: int) -> torch.Tensor:
        registered.append(len(weights_of_b._link._lasting))
        if len(registered) > 1:
            raise MemoryError
        return allocate(nbytes)

    b.loader._allocate_buffer = refuse_slots  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        await b.prepare((D,))
    assert registered == [0, 1]
    assert weights_of_b._link._lasting == {}


async def test_streamed_weights_that_cannot_be_attached_leave_no_thread(
    host: HostCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, before = make_store(host, shares={E: STREAMED}), list_layer_threads()
    seen = list[int]()

    def fail(*_: object) -> None:
        seen.append(len(list_layer_threads() - before))
        raise MemoryError

    monkeypatch.setattr(layered_weights.LayeredWeights, "attach", fail)
    with pytest.raises(MemoryError):
        await store.prepare((E,))
    assert seen == [1]
    assert list_layer_threads() <= before
