"""Two workers' replica stores in one process: host copies, peers, eviction, memory. The weights are always the same."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from profiler.measure.memory import measure_peak_bytes
from tests.pipelines.models import make_inputs
from tests.support.waiting import until
from tridentserve.device.pinned_memory import PinnedMemory
from tridentserve.engine.live.messages import ModelSource, ReplicaLoad
from tridentserve.engine.live.transport.nixl_link import NixlLink
from tridentserve.engine.live.transport.nixl_memory import Memory
from tridentserve.engine.live.transport.parcel import ALIGNMENT_BYTES
from tridentserve.engine.live.weights import host_copies
from tridentserve.engine.live.weights import replica_store as replicas
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.peer_weights import PeerWeights, WeightOrder
from tridentserve.engine.live.weights.replica_store import MemoryBudget, ReplicaStore
from tridentserve.engine.live.weights.weights_loader import LoadedWeights, WeightsLoader, copy_blocks
from tridentserve.engine.options import Fetch
from tridentserve.errors import ConfigError, HandoffError, OutOfMemoryError, WorkerError
from tridentserve.models.lora_files import LoraFile
from tridentserve.models.number_formats import NumberFormats
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.lora.reading import LayerChange
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.pipelines.weights import named_tensors
from tridentserve.plans import Replica
from tridentserve.stages import Stage
from tridentserve.weights_share import WeightsShare

E, D, C = (Replica("flux", stage) for stage in Stage)
CPU = torch.device("cpu")
RESERVE = 1000
BLOCK = 100_000  # many blocks per replica
# Those of a model that makes videos of images.
COMPONENTS = ("text_encoder", "image_encoder", "transformer", "vae")
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def source(tiny_cache: Path) -> ModelSource:
    return ModelSource("flux", ensure_tiny("flux", tiny_cache))


@pytest.fixture(scope="module")
def host(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> HostCopies:
    copies = HostCopies(tmp_path_factory.mktemp("host"), {"flux": source}, CPU)
    copies.make_all([E, D, C])
    return copies


@functools.cache
def read_model_folder(folder: Path, stage: Stage) -> dict[str, torch.Tensor]:
    return named_tensors(load_adapter(folder, frozenset({stage})))


def assert_right(store: ReplicaStore, source: ModelSource, replica: Replica) -> None:
    """The tensors are the model folder's, bit for bit, and aligned as the stock pipeline's: matrix libraries choose
    their code by the alignment of their operands, and different code rounds differently."""
    expected, got = read_model_folder(source.folder, replica.stage), named_tensors(store.adapter(replica))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
        assert got[name].data_ptr() % ALIGNMENT_BYTES == tensor.data_ptr() % ALIGNMENT_BYTES, name


class DirectPeer:
    """A peer without an actor between."""

    node_id = "here"

    def __init__(self, link: NixlLink) -> None:
        self.link_name: str | None = link.address.name
        self.store: ReplicaStore

    async def count_readers(self, replica: Replica, shard: int) -> int | None:
        return self.store.count_readers(replica, shard)

    async def send_weights(self, order: WeightOrder) -> None:
        await self.store.send_weights(order)


async def at_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def make_store(
    host: HostCopies,
    fetch: Fetch = "host",
    memory_bytes: int = PLENTY,
    peers: PeerWeights | None = None,
    shares: Mapping[Replica, WeightsShare] = MappingProxyType({}),
    place: int = 0,
) -> ReplicaStore:
    loader = WeightsLoader(host, CPU, fetch, BLOCK, peers, shares, place)
    return ReplicaStore(host, CPU, MemoryBudget(memory_bytes, RESERVE, 0), at_once, loader, peers)


def size_of(host: HostCopies, *replicas: Replica) -> int:
    return sum(host.get(replica).layout.nbytes for replica in replicas)


async def loads_of(store: ReplicaStore, *needed: Replica, **more: Any) -> list[ReplicaLoad]:
    loads: list[ReplicaLoad] = []
    await store.prepare(needed, tell=loads.append, **more)
    return loads


# Host copies.


def test_a_copy_is_made_once_by_whoever_comes_first(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[frozenset[Stage]] = []

    def counted(folder: Path, stages: frozenset[Stage], **more: Any) -> Any:
        made.append(stages)
        return load_adapter(folder, stages, **more)

    monkeypatch.setattr(host_copies, "load_adapter", counted)
    workers = [HostCopies(tmp_path, {"flux": source}, CPU) for _ in range(3)]
    threads = [threading.Thread(target=worker.make_all, args=([E, C],)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made, key=sorted) == [{Stage.DECODE}, {Stage.ENCODE}]
    buffers = [worker.get(E).buffer for worker in workers]
    assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)
    buffers[0][:64] = 7
    assert not torch.equal(buffers[1], buffers[0]), "what one worker does to its mapping is its own"
    assert torch.equal(HostCopies(tmp_path, {"flux": source}, CPU).get(E).buffer, buffers[1])


def test_tied_tensors_are_kept_once(host: HostCopies, source: ModelSource) -> None:
    copy = host.get(E)
    tensors = read_model_folder(source.folder, Stage.ENCODE)
    assert len(copy.names) == len(tensors) > len(copy.layout.slots)
    assert copy.layout.nbytes < sum(tensor.nbytes for tensor in tensors.values())


def test_e_has_the_vae_where_requests_may_start_from_an_image(source: ModelSource, tmp_path: Path) -> None:
    plain, allowed = (
        HostCopies(tmp_path, {"flux": ModelSource("flux", source.folder, image_start=allowed)}, CPU).get(E)
        for allowed in (False, True)
    )
    vae = {name for name in allowed.names if name.startswith("vae.")}
    assert vae == allowed.names.keys() - plain.names.keys() != set()
    assert not plain.names.keys() - allowed.names.keys()


def test_the_copy_for_a_gpu_is_another_file_with_every_tensor_aligned_as_cuda_allocates(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PinnedMemory, "pin", lambda *_: False)
    sources = {"flux": ModelSource("flux", source.folder, NumberFormats.parse("float32"))}
    for_gpu, for_cpu = (HostCopies(tmp_path, sources, torch.device(kind)) for kind in ("cuda", "cpu"))
    slots = for_gpu.get(D).layout.slots
    assert slots != for_cpu.get(D).layout.slots
    assert [slot.offset % 512 for slot in slots] == [0] * len(slots)
    assert for_gpu.has(D), "the copy for the CPU does not replace it"
    expected, got = read_model_folder(source.folder, Stage.DIFFUSE), for_gpu.get(D).tensors(for_gpu.get(D).buffer)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", {"E": "float16", "D": "bfloat16", "C": "float32"}, ("float16", "float16", "bfloat16", "float32")),
        ("cuda", None, ("bfloat16", "float32", "bfloat16", "float32")),
    ],
    ids=["by stage", "published"],
)
def test_each_component_has_its_own_number_format(
    device: str,
    dtype: Any,
    expected: tuple[str, ...],
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PinnedMemory, "pin", lambda *_: False)
    source = ModelSource("m", ensure_tiny("wan_i2v", tiny_cache), NumberFormats.parse(dtype))
    copies = HostCopies(tmp_path, {"m": source}, torch.device(device))
    slots = [(stage, slot) for stage in Stage for slot in copies.get(Replica("m", stage)).layout.slots]
    for component, number_format in zip(COMPONENTS, expected, strict=True):
        # A few parts of the transformer stay in float32.
        found = Counter(slot.dtype for _, slot in slots if slot.name.startswith(f"{component}."))
        assert found.most_common(1)[0][0] == number_format, component
    assert {stage for stage, slot in slots if slot.name.startswith("vae.")} == {Stage.ENCODE, Stage.DECODE}


def test_no_room_for_a_copy(source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"no room for \d+ bytes of weights in .*host"):
        HostCopies(tmp_path / "host", {"flux": source}, CPU).make_all([C])
    assert not list((tmp_path / "host").glob("*.bin"))


# Loads.


@pytest.mark.parametrize("fetch", ["mapped", "host", "auto"])
async def test_loaded_from_the_host_copy(host: HostCopies, source: ModelSource, fetch: Fetch) -> None:
    store = make_store(host, fetch)
    with pytest.raises(WorkerError, match="not in memory"):
        store.adapter(E)
    loads = await loads_of(store, E, D)
    assert [(load.loaded, load.source, load.evicted) for load in loads] == [(E, "host", ()), (D, "host", ())]
    assert [load.num_bytes for load in loads] == [size_of(host, E), size_of(host, D)]
    assert_right(store, source, E)
    assert_right(store, source, D)
    mapped = host.get(D).tensors(host.get(D).buffer)
    shared = {tensor.data_ptr() == mapped[name].data_ptr() for name, tensor in named_tensors(store.adapter(D)).items()}
    assert shared == {fetch != "host"}, "pages are shared unless set otherwise"
    assert await loads_of(store, E, D) == []


async def test_the_first_load_makes_the_copy(source: ModelSource, tmp_path: Path) -> None:
    store = make_store(HostCopies(tmp_path, {"flux": source}, CPU))
    (load,) = await loads_of(store, C)
    assert load.source == "disk"
    assert_right(store, source, C)


async def test_a_load_takes_the_weights_and_less_than_a_block_of_memory(host: HostCopies) -> None:
    copy = host.get(D)
    target: list[torch.Tensor] = []

    def load() -> None:
        target.append(torch.empty(copy.layout.nbytes, dtype=torch.uint8))
        copy_blocks(target[0], copy.buffer, BLOCK)

    peak = measure_peak_bytes(load, {}, CPU)
    assert copy.layout.nbytes <= peak <= copy.layout.nbytes + BLOCK
    assert torch.equal(target[0], copy.buffer)


# Memory.


async def test_what_is_not_wanted_leaves_first_then_the_longest_unused(host: HostCopies, source: ModelSource) -> None:
    store = make_store(host, memory_bytes=size_of(host, E, D, C) + RESERVE)
    await store.load_placement(frozenset({E, D, C}))
    assert set(store.resident) == {E, D, C}
    store.wanted = frozenset({D, C})
    await store.prepare((C,), peak_bytes=1)
    assert set(store.resident) == {D, C}
    await store.prepare((C,), peak_bytes=size_of(host, E))
    assert set(store.resident) == {D, C}, "only as much as is needed"
    (load,) = await loads_of(store, E)
    assert (load.loaded, load.evicted) == (E, ()), "it is back: the scheduler never missed it"
    assert list(store.resident) == [D, C, E]
    await store.prepare((D,), peak_bytes=1)
    assert list(store.resident) == [C, D], "E is not wanted, so it goes before what has not been used for longer"
    store.wanted = frozenset({E, D, C})
    (load,) = await loads_of(store, E, peak_bytes=1)
    assert (load.evicted, list(store.resident)) == ((C,), [D, E]), "E that left meanwhile is back, and was not missed"
    assert_right(store, source, E)


async def test_loras_that_the_plan_does_not_need_leave_before_weights(host: HostCopies) -> None:
    store = make_store(host, memory_bytes=size_of(host, E, D) + RESERVE + 100)
    await store.load_placement(frozenset({E, D}))
    files = [LoraFile("flux", name, Path(name), "digest") for name in ("first", "second")]
    up, layer = torch.zeros(0, dtype=torch.uint8), torch.nn.Linear(1, 1)
    change = LayerChange(layer, torch.zeros(40, dtype=torch.uint8), up, 1.0)
    store.loras.hold(files, lambda file: (change,))
    await store.prepare((D,), peak_bytes=60, loras=files[1:])  # with the 40 of its own LoRA
    assert (store.loras.files, set(store.resident)) == (tuple(files), {E, D})
    await store.prepare((D,), peak_bytes=61, loras=files[1:])
    assert (store.loras.files, set(store.resident)) == (tuple(files[1:]), {E, D})
    await store.prepare((D,), peak_bytes=101, loras=files[1:])
    assert (store.loras.files, set(store.resident)) == (tuple(files[1:]), {D})
    await store.unload_model("flux")
    assert not store.loras.files


async def test_what_a_queued_plan_needs_stays_while_anything_else_may_go(host: HostCopies) -> None:
    store = make_store(host, memory_bytes=size_of(host, E, D, C) + RESERVE)
    await store.load_placement(frozenset({E, D, C}))
    store.wanted = frozenset({D})
    await store.prepare((C,), peak_bytes=1, queued={E})
    assert set(store.resident) == {E, C}


async def test_what_cannot_fit_is_refused_with_the_numbers_and_nothing_is_touched(host: HostCopies) -> None:
    memory = size_of(host, E, D) + RESERVE
    store = make_store(host, memory_bytes=memory)
    await store.load_placement(frozenset({E, D}))
    peak = size_of(host, D) + 1
    with pytest.raises(OutOfMemoryError) as refused:
        await store.prepare((E,), peak_bytes=peak)
    for number in (size_of(host, E) + peak + RESERVE, size_of(host, E), peak, RESERVE, memory):
        assert str(number) in str(refused.value)
    assert set(store.resident) == {E, D}
    await store.prepare((E,), peak_bytes=peak - 1)
    assert store.resident == (E,)


async def test_at_the_start_what_does_not_fit_stays_out(host: HostCopies) -> None:
    store = make_store(host, memory_bytes=size_of(host, D) + RESERVE)
    await store.load_placement(frozenset({D, E, C}))
    assert store.resident_bytes + RESERVE <= size_of(host, D) + RESERVE
    assert store.resident


# Peers.


class Two:
    """`a` has the weights, `b` asks for them."""

    def __init__(self, host: HostCopies, links: tuple[NixlLink, NixlLink]) -> None:
        self.links = links
        self.peers = {"a": DirectPeer(links[0]), "b": DirectPeer(links[1])}
        self.weights_of_a = PeerWeights(links[0], {"b": self.peers["b"]}, "here", BLOCK)
        weights_of_b = PeerWeights(links[1], {"a": self.peers["a"]}, "here", BLOCK)
        self.a = make_store(host, "host", peers=self.weights_of_a)
        self.b = make_store(host, "peer", peers=weights_of_b)
        self.peers["a"].store, self.peers["b"].store = self.a, self.b


@pytest.fixture
def links() -> Iterator[tuple[NixlLink, NixlLink]]:
    """Of one test: what a store of another test registered would count as registered where memory is used again."""
    pair = tuple(NixlLink(f"weights-{name}", torch.zeros(4096, dtype=torch.uint8)) for name in "ab")
    for one, other in (pair, pair[::-1]):
        one.add_peer(other.address).result()
    yield pair[0], pair[1]
    for link in pair:
        link.close()


@pytest.fixture
def two(host: HostCopies, links: tuple[NixlLink, NixlLink]) -> Two:
    return Two(host, links)


async def test_fetched_from_a_peer(two: Two, host: HostCopies, source: ModelSource) -> None:
    await two.a.prepare((D, C))
    loads = await loads_of(two.b, D, C, E)
    assert [(load.loaded, load.source) for load in loads] == [(D, "peer"), (C, "peer"), (E, "host")]
    for replica in (D, C, E):
        assert_right(two.b, source, replica)
    a, b = (named_tensors(store.adapter(D)) for store in (two.a, two.b))
    assert {tensor.data_ptr() for tensor in a.values()}.isdisjoint(tensor.data_ptr() for tensor in b.values())
    # `a` may lose its own now, and fetch it back from `b`'s memory or the host's.
    await two.a.prepare((E,), peak_bytes=PLENTY - RESERVE - size_of(host, E))
    assert two.a.resident == (E,)
    assert_right(two.b, source, D)


async def test_a_peer_on_another_node_or_without_a_link_is_not_asked(two: Two) -> None:
    await two.a.prepare((C,))
    two.peers["a"].node_id = "there"
    (load,) = await loads_of(two.b, C)
    assert load.source == "host"


async def test_a_peer_that_fails_costs_nothing_but_time(two: Two, source: ModelSource) -> None:
    await two.a.prepare((C,))

    async def fail(order: WeightOrder) -> None:
        raise HandoffError("it has left")

    two.peers["a"].send_weights = fail  # type: ignore[method-assign]
    (load,) = await loads_of(two.b, C)
    assert load.source == "host"
    assert_right(two.b, source, C)


async def test_memory_that_nixl_does_not_take_is_filled_from_the_host_copy(
    two: Two, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.a.prepare((C,))

    def refuse(memory: Memory) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(two.links[1]._memory, "hold", refuse)
    (load,) = await loads_of(two.b, C)
    assert load.source == "host"
    assert_right(two.b, source, C)


async def test_a_reader_that_does_not_end_holds_up_nobody(
    two: Two, host: HostCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.a.prepare((D,))
    released = list[int]()
    monkeypatch.setattr(replicas, "choose_timeout_s", lambda nbytes: 0.02)
    resident = two.a._resident[D]
    resident.readers, address = 1, resident.loaded.buffer.data_ptr()
    resident.unread.clear()

    async def release(buffer: torch.Tensor) -> None:
        released.append(buffer.data_ptr())

    monkeypatch.setattr(two.weights_of_a, "deregister", release)
    await two.a.prepare((E,), peak_bytes=PLENTY - RESERVE - size_of(host, E))
    assert two.a.resident == (E,)
    assert not released
    resident.unread.set()
    await until(lambda: released == [address])


async def test_a_replica_that_is_being_read_waits_with_leaving(two: Two, host: HostCopies, source: ModelSource) -> None:
    await two.a.prepare((D,))
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(order: WeightOrder, buffer: torch.Tensor) -> None:
        begun.set()
        await go_on.wait()
        await PeerWeights.write_weights(two.weights_of_a, order, buffer)

    two.weights_of_a.write_weights = slowly  # type: ignore[method-assign]
    fetching = asyncio.create_task(loads_of(two.b, D))
    await begun.wait()
    assert two.a.count_readers(D, 0) == 1
    leaving = asyncio.create_task(two.a.prepare((E,), peak_bytes=PLENTY - RESERVE - size_of(host, E)))
    await until(lambda: two.a.count_readers(D, 0) is None)  # nobody else is offered it
    await asyncio.sleep(0.05)
    assert not leaving.done()
    go_on.set()
    (load,) = await fetching
    await leaving
    assert load.source == "peer"
    assert_right(two.b, source, D)


async def test_loras_leave_with_the_modules_for_which_they_were_read(
    host: HostCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where weights could not be attached, modules are built anew. A LoRA of the former ones would change nothing."""
    store, file = make_store(host), LoraFile("flux", "ink", Path("ink"), "digest")
    await store.prepare((D,))
    layers = [vars(store.adapter(D))["pipe"].transformer.x_embedder]
    change = LayerChange(layers[0], torch.zeros(40, dtype=torch.uint8), torch.zeros(0), 1.0)
    store.loras.hold([file], lambda file: (change,))
    await store.evict_all_but(())
    assert store.loras.files == (file,)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(LoadedWeights, "attach", fail)
        with pytest.raises(MemoryError):
            await store.prepare((D,))
    await store.prepare((D,))
    assert vars(store.adapter(D))["pipe"].transformer.x_embedder is not layers[0]
    assert not store.loras.files


async def test_stages_run_on_fetched_weights(two: Two, source: ModelSource) -> None:
    await two.a.prepare((E,))
    await two.b.prepare((E,))
    inputs = make_inputs()
    expected = load_adapter(source.folder, frozenset({Stage.ENCODE})).encode(inputs)
    for store in (two.a, two.b):
        got = store.adapter(E).encode(inputs)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
