"""One copy of each stage's weights per node, in a file that all workers of the node map.

The copy is made once, from the model folder, by whichever worker of the node comes first; the others wait at a file
lock or make another one meanwhile. It holds every tensor of the stage's models in the number format that is served,
packed as `parcel` packs (the files of model folders have other names and formats, so they cannot be mapped themselves).
Each tensor in it is aligned as the stock pipeline's tensor is in memory (see `_layout`): matrix libraries choose their
code by the alignment of their operands, and different code rounds differently.
A worker on a CPU uses the mapped pages as its weights; a GPU is filled from them, block by block, and pins them where
CUDA allows it (`tridentserve.device.pinned_memory`): put the directory on a tmpfs such as /dev/shm then.

A copy is named after the model, and then after the files of the model folder, their sizes and times, and the number
formats: the next start of a service finds it. Where another revision of the model or another format is served under the
same name, the copies of before are removed, unless a process still uses them (`copy_files`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tridentserve.device import find_device
from tridentserve.device.pinned_memory import PinnedMemory
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.transport.parcel import Parcel, ParcelLayout, TensorSlot
from tridentserve.engine.live.weights.copy_files import CopyFiles, find_data, find_index, find_unfinished
from tridentserve.errors import ConfigError, ModelFolderError
from tridentserve.models.model_folder import MODEL_INDEX, read_family
from tridentserve.models.number_formats import NumberFormat, find_formats
from tridentserve.pipelines.loading import load_adapter
from tridentserve.pipelines.weights import named_tensors
from tridentserve.plans import Replica
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)

# Another version of these may build other tensors from the same files.
_LIBRARIES = ("torch", "diffusers", "transformers")


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The packed weights of one replica."""

    layout: ParcelLayout
    names: Mapping[str, str]
    """The slot of the layout in which each tensor of the models is; tied tensors share one."""
    buffer: torch.Tensor
    """The mapped bytes, uint8."""

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors as views of `buffer`, which holds the same bytes as the copy, on whatever device."""
        views = Parcel.views(buffer, self.layout).tensors
        return {name: views[slot] for name, slot in self.names.items()}


class HostCopies:
    """The copies of one node, in one directory. Workers of all processes of the node may use the directory together."""

    def __init__(self, folder: Path, sources: Mapping[str, ModelSource], device: torch.device) -> None:
        self._folder = folder
        self._files = CopyFiles(folder)
        self._sources = dict(sources)
        self._device = find_device(device)
        self._stems: dict[Replica, Path] = {}  # of the copies that this process uses
        self._open: dict[Replica, HostCopy] = {}
        self._mapping = threading.Lock()  # of `_open`
        self._pinned = PinnedMemory(self._device)

    def formats(self, replica: Replica) -> Mapping[str, NumberFormat]:
        """The number formats in which the components of a replica's model are served."""
        source = self.source(replica)
        return find_formats(read_family(source.folder), source.formats, self._device.kind)

    def source(self, replica: Replica) -> ModelSource:
        source = self._sources.get(replica.model)
        if source is None:
            raise ModelFolderError(f"no model named {replica.model!r}; this worker knows {sorted(self._sources)}")
        return source

    def add_model(self, source: ModelSource) -> None:
        """A model can be asked for from now on. Those of its copies that are there already stay for this process."""
        self._sources[source.name] = source
        for replica in (Replica(source.name, stage) for stage in Stage):
            self._hold(replica, self._make_stem(replica))

    def drop_model(self, model: str) -> None:
        """Remove a model, and its copies of all stages unless another process uses them. A worker that has mapped one
        keeps it."""
        if model not in self._sources:
            return
        for replica in (Replica(model, stage) for stage in Stage):
            with self._mapping:
                if (copy := self._open.pop(replica, None)) is not None:
                    self._pinned.unpin(copy.buffer)
            stem = self._stems.pop(replica, None) or self._make_stem(replica)
            self._files.release(stem)
            if self._folder.exists():
                self._files.remove(stem, wait=True)
        del self._sources[model]

    def make_all(self, replicas: Iterable[Replica]) -> None:
        """Make the copies that are not there. Workers that start together share the work. Copies of other revisions and
        formats of the same models go, unless another process uses them."""
        wanted = sorted(replicas)
        for replica in wanted:
            self._files.remove_others(self._make_stem(replica))
        held_up = [replica for replica in wanted if not self._make(replica, wait=False)]
        for replica in held_up:
            self._make(replica)

    def get(self, replica: Replica) -> HostCopy:
        """The copy, mapped; made first when it is not there. Raises `ModelFolderError` for a damaged model folder."""
        if replica not in self._open:
            self._make(replica)
        return self._map_once(replica)

    def find(self, replica: Replica) -> HostCopy | None:
        """The copy, mapped, in whatever thread; None where it has not been made."""
        if replica not in self._open and not self._hold(replica, self._make_stem(replica)):
            return None
        return self._map_once(replica)

    def has(self, replica: Replica) -> bool:
        """True when the copy exists already."""
        return replica in self._open or find_index(self._make_stem(replica)).exists()

    def _make_stem(self, replica: Replica) -> Path:
        """The path of a copy, without the endings of its files. All but the last part of its name is that of every copy
        of this stage of the model for this kind of device, whatever it was made of."""
        source = self.source(replica)
        files, formats = [source.folder / MODEL_INDEX], self.formats(replica)
        for component in read_family(source.folder, source.image_start).components[replica.stage]:
            files += sorted(path for path in (source.folder / component).glob("*") if path.is_file())
        # Resolved: files that two revisions of the hub share are the same ones, and so are copies of these alone.
        facts = [
            (str(path.relative_to(source.folder)), str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
            for path in files
            if path.exists()
        ]
        libraries = (*_LIBRARIES, "torchao") if "int8" in formats.values() else _LIBRARIES
        versions = [importlib.metadata.version(library) for library in libraries]
        content = hashlib.sha256(repr((facts, versions, sorted(formats.items()))).encode()).hexdigest()[:16]
        place = hashlib.sha256(f"{source.name} {self._device.kind}".encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9]+", "-", source.name)
        return self._folder / f"{name}.{replica.stage.value}.{place}.{content}"

    def _make(self, replica: Replica, wait: bool = True) -> bool:
        """Make a copy where it is not there, and keep it for this process. False when another process makes it now and
        `wait` is not set."""
        stem = self._make_stem(replica)
        if self._hold(replica, stem):
            return True
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._files.lock(stem, wait) as locked:
            if not locked:
                return False
            if not self._hold(replica, stem):
                self._write(replica, stem)
                self._hold(replica, stem)
        return True

    def _hold(self, replica: Replica, stem: Path) -> bool:
        """Keep a copy from being removed while this process lives; False where it is not there."""
        if not self._files.hold(stem):
            return False
        former = self._stems.pop(replica, stem)
        if former != stem:
            self._files.release(former)
        self._stems[replica] = stem
        return True

    def _write(self, replica: Replica, stem: Path) -> None:
        logger.info("making the host copy of %s of %s in %s", replica.stage.value, replica.model, self._folder)
        source, formats = self.source(replica), self.formats(replica)
        stages = frozenset({replica.stage})
        adapter = load_adapter(source.folder, stages, formats=formats, image_start=source.image_start)
        names: dict[str, str] = {}
        slots: dict[tuple[int, torch.Size, torch.dtype], str] = {}
        distinct: dict[str, torch.Tensor] = {}
        for name, tensor in named_tensors(adapter).items():
            slot = slots.setdefault((tensor.data_ptr(), tensor.shape, tensor.dtype), name)
            names[name] = slot
            distinct[slot] = tensor
        parcel = Parcel(distinct)
        layout = self._make_layout(parcel)
        self._files.remove_others(stem)  # first: there may be room for one copy only
        unfinished = find_unfinished(stem)
        _reserve(unfinished, layout.nbytes)
        parcel.pack_into(_map_file(unfinished, layout.nbytes, shared=True), layout)
        unfinished.rename(find_data(stem))
        index = {"slots": [dataclasses.asdict(slot) for slot in layout.slots], "nbytes": layout.nbytes, "names": names}
        unfinished.write_text(json.dumps(index))
        unfinished.rename(find_index(stem))  # last: a worker that sees it may map the data

    def _make_layout(self, weights: Parcel) -> ParcelLayout:
        """The layout of `weights`, which the stock pipeline's loader has just put into host memory, with each tensor
        aligned as the stock pipeline has it on this copy's device: on a CPU as the loader leaves it (most tensors are
        views of the mapped files of the model folder, at any alignment), on a GPU each in an allocation of its own."""
        alignment_bytes = self._device.alignment_bytes
        return weights.layout(as_in_memory=True) if alignment_bytes is None else weights.layout(alignment_bytes)

    def _map_once(self, replica: Replica) -> HostCopy:
        """The copy, which this process holds, mapped once for all threads."""
        with self._mapping:
            if replica not in self._open:
                self._open[replica] = self._map(self._stems[replica])
            return self._open[replica]

    def _map(self, stem: Path) -> HostCopy:
        index = json.loads(find_index(stem).read_text())
        slots = [TensorSlot(**{**slot, "shape": tuple(slot["shape"])}) for slot in index["slots"]]
        layout = ParcelLayout(tuple(slots), index["nbytes"], {})
        # On the CPU these pages are the weights: a private mapping, so that no mistake of one worker is written back.
        # A private one cannot be pinned without being copied.
        buffer = _map_file(find_data(stem), layout.nbytes, shared=not self._device.is_host)
        self._pinned.pin(buffer, find_data(stem))
        return HostCopy(layout, index["names"], buffer)


def _map_file(path: Path, nbytes: int, shared: bool) -> torch.Tensor:
    return torch.from_file(str(path), shared=shared, size=nbytes, dtype=torch.uint8)


def _reserve(path: Path, nbytes: int) -> None:
    """Make a file of this size, with all its blocks: writing into a mapping on a full disk would kill the process."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"no room for {nbytes} bytes of weights in {path.parent} ({error}); free some, or name another directory"
        ) from error
