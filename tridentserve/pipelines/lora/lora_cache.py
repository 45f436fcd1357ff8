"""The LoRAs that a worker keeps on its device between plans, so that each is read once and not for every plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tridentserve.models.lora_files import LoraFile
from tridentserve.pipelines.lora.reading import LayerChange

# The size and the time of a file, by which another one at its path is noticed.
_Mark = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HeldLora:
    """A LoRA on the device."""

    changes: tuple[LayerChange, ...]
    num_bytes: int
    mark: _Mark | None
    """The mark of the file when it was read. None: its content cannot change, since its digest is known."""


class LoraCache:
    """The LoRAs of all models of one worker, the longest unused first. No two threads use it at a time."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Between plans at most `capacity_bytes` are held; None: any number."""
        self._capacity_bytes = capacity_bytes
        self._held: dict[LoraFile, HeldLora] = {}
        self._told: tuple[str, ...] = ()
        self.num_bytes = 0
        """Bytes of all LoRAs that are held."""

    @property
    def files(self) -> tuple[LoraFile, ...]:
        """The LoRAs that are held, the longest unused first."""
        return tuple(self._held)

    def find_bytes(self, file: LoraFile) -> int | None:
        """Bytes of a LoRA; None for one that is not held."""
        held = self._held.get(file)
        return None if held is None else held.num_bytes

    def count_others(self, needed: Collection[LoraFile]) -> int:
        """Bytes of the LoRAs that are held beside these. A thread may ask this while another one has LoRAs read: then
        some of those that are needed may count too."""
        return self.num_bytes - sum(self.find_bytes(file) or 0 for file in needed)

    def get(self, file: LoraFile) -> tuple[LayerChange, ...]:
        """The changes of a LoRA that `hold` has been called for."""
        return self._held[file].changes

    def hold(self, files: Sequence[LoraFile], read: Callable[[LoraFile], tuple[LayerChange, ...]]) -> None:
        """Have these LoRAs, of one plan, on the device; `read` is called for those that are not held. Others make room
        for them, the longest unused first."""
        for file in files:
            if (held := self._held.get(file)) is None:
                continue
            if held.mark is None or held.mark == _read_mark(file.path):
                self._held[file] = self._held.pop(file)  # used now
            else:
                self._drop(file)
        for file in files:
            if file not in self._held:
                mark = None if file.digest else _read_mark(file.path)
                changes = read(file)
                held = HeldLora(changes, sum(change.num_bytes for change in changes), mark)
                self.num_bytes += held.num_bytes  # first, see `count_others`
                self._held[file] = held
                self.trim(keep=files)

    def trim(self, keep: Collection[LoraFile] = ()) -> None:
        """Drop LoRAs, but for those of `keep`, until the others are no more than may be held."""
        if self._capacity_bytes is not None:
            self.free(self.num_bytes - self._capacity_bytes, keep)

    def free(self, num_bytes: int, keep: Collection[LoraFile] = ()) -> int:
        """Drop LoRAs, but for those of `keep`, until this number of bytes is free. Returns the bytes that were
        freed."""
        freed = 0
        for file in [file for file in self._held if file not in keep]:
            if freed >= num_bytes:
                break
            freed += self._drop(file)
        return freed

    def make_room(self, excess_bytes: int, needed: Collection[LoraFile]) -> int:
        """Drop LoRAs that a plan does not need, where it and the weights lack `excess_bytes` in addition to theirs.
        Returns the bytes that they take after that."""
        others_bytes = self.count_others(needed)
        return others_bytes - self.free(excess_bytes + others_bytes, needed)

    def drop_model(self, model: str) -> None:
        """Drop all LoRAs of a model, which no plan needs any more."""
        for file in [file for file in self._held if file.model == model]:
            self._drop(file)

    def take_news(self) -> tuple[str, ...] | None:
        """The keys of all LoRAs that are held, sorted; None when they are those of the call before."""
        keys = tuple(sorted(file.key for file in self._held))
        if keys == self._told:
            return None
        self._told = keys
        return keys

    def _drop(self, file: LoraFile) -> int:
        """Returns the bytes that this frees."""
        num_bytes = self._held.pop(file).num_bytes
        self.num_bytes -= num_bytes
        return num_bytes


def _read_mark(path: Path) -> _Mark | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
