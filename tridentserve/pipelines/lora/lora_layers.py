"""LoRAs of a denoising model, any number per request: low-rank changes that are added while a batch is denoised.

The layers stay as they are. A hook adds `scale * B(A(input))` to a layer's output with the same operations as PEFT, so
that the result is that of diffusers' `load_lora_weights`. The hooks never write weights, which several processes share,
and they work on the tokens that the layer gets, so LoRAs are exact under sequence parallelism too. Where requests of a
batch have different LoRAs, each change is added to the rows of its requests only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tridentserve.errors import LoraFileError
from tridentserve.models.lora_files import LoraFile, LoraUse, collect_files, compute_digest
from tridentserve.pipelines.lora.lora_cache import LoraCache
from tridentserve.pipelines.lora.reading import LayerChange, read_changes


@dataclass(frozen=True, slots=True)
class _AddedChange:
    """A change with the requests that have it."""

    change: LayerChange
    scale: float
    members: frozenset[int] | None
    """The requests, by their places in the batch; None for all of them."""


class _BatchRows:
    """The rows of each request in one call of the model: those of its outputs, for each pass of the call."""

    def __init__(self) -> None:
        self._owners: list[int] = []
        self._found: dict[Collection[int], list[tuple[int, int]]] = {}

    def lay_out(self, sizes: Sequence[int], passes: int) -> None:
        """Each pass has `sizes[i]` rows of the request i, in this order."""
        self._owners = [index for index, size in enumerate(sizes) for _ in range(size)] * passes
        self._found = {}

    def find(self, members: frozenset[int]) -> list[tuple[int, int]]:
        """The ranges of rows of some requests."""
        if members not in self._found:
            ranges: list[tuple[int, int]] = []
            for row, owner in enumerate(self._owners):
                if owner in members:
                    start = ranges.pop()[0] if ranges and ranges[-1][1] == row else row
                    ranges.append((start, row + 1))
            self._found[members] = ranges
        return self._found[members]

    def separate(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with its own entries for each row, also where all rows have one in common."""
        if tensor.shape[0] > 1 or len(self._owners) == 1:
            return tensor
        return tensor.expand(len(self._owners), *tensor.shape[1:]).clone()

    def measure_row(self, inputs: torch.Tensor) -> int:
        """The entries of the first dimension that belong to one row. Layers may see frames or tokens one by one, but
        always row by row."""
        size, rest = divmod(inputs.shape[0], len(self._owners))
        if rest:
            raise ValueError(f"{inputs.shape[0]} entries are not those of {len(self._owners)} rows")
        return size


class Loras:
    """The LoRAs of requests, for the component that denoises."""

    def __init__(self, pipe: Any, component: str, device: torch.device) -> None:
        self._pipe = pipe
        self._component = component
        self._device = device
        self._rows = _BatchRows()
        self.cache = LoraCache()
        """Holds what has been read; a worker has one for all its models."""

    def hold(self, uses: Sequence[Sequence[LoraUse]]) -> None:
        """Have the LoRAs of requests that will be denoised together on the device. Raises `LoraFileError` when a
        file is gone, is another one than it was, or does not fit the model."""
        if any(uses):
            self.cache.hold(collect_files(uses), self._read)

    @contextmanager
    def applied(self, uses: Sequence[tuple[LoraUse, ...]]) -> Iterator[None]:
        """Inside the context, the model denoises each request of a batch with its LoRAs. Raises as `hold` does."""
        if not any(uses):
            yield
            return
        if any(self.cache.find_bytes(file) is None for file in collect_files(uses)):
            self.hold(uses)
        by_layer: defaultdict[torch.nn.Module, list[_AddedChange]] = defaultdict(list)
        for added in self._list_added(uses):
            by_layer[added.change.layer].append(added)
        handles = [layer.register_forward_hook(self._make_hook(added)) for layer, added in by_layer.items()]
        try:
            # Compiled code ignores hooks that are registered later.
            with torch.compiler.set_stance("force_eager"), _freeze(getattr(self._pipe, self._component)):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def check(self, file: Path) -> None:
        """Raise `LoraFileError` unless a file can be read and fits the model. Nothing of it stays in memory."""
        read_changes(file, self._pipe, self._component, torch.device("meta"))

    def lay_out(self, sizes: Sequence[int], passes: int) -> None:
        """The next call of the model has this number of passes, each with `sizes[i]` rows of the request i."""
        self._rows.lay_out(sizes, passes)

    def _list_added(self, uses: Sequence[tuple[LoraUse, ...]]) -> Iterator[_AddedChange]:
        members: defaultdict[tuple[LoraUse, ...], list[int]] = defaultdict(list)
        for index, own in enumerate(uses):
            members[own].append(index)
        for own, indices in members.items():
            of = None if len(members) == 1 else frozenset(indices)
            for use in own:
                for change in self.cache.get(use.file):
                    yield _AddedChange(change, change.scale * use.scale, of)

    def _make_hook(self, added: Sequence[_AddedChange]) -> Callable[..., torch.Tensor]:
        """Make a forward hook that adds changes to the output of their layer."""

        def add_changes(module: torch.nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            (inputs,) = args
            for one in added:
                if one.members is None:
                    output = output + one.change.compute(inputs) * one.scale
                    continue
                inputs, output = self._rows.separate(inputs), self._rows.separate(output)
                size = self._rows.measure_row(inputs)
                for start, end in self._rows.find(one.members):
                    part = slice(start * size, end * size)
                    output[part] += one.change.compute(inputs[part]) * one.scale
            return output

        return add_changes

    def _read(self, file: LoraFile) -> tuple[LayerChange, ...]:
        try:
            is_another = file.digest and file.path.is_file() and compute_digest(file.path) != file.digest
        except OSError as error:
            raise LoraFileError(f"{file.path}, the LoRA {file.name}, cannot be read: {error.strerror}") from error
        if is_another:
            raise LoraFileError(f"{file.path} is not the file that was added as the LoRA {file.name} any more")
        return read_changes(file.path, self._pipe, self._component, self._device)


@contextmanager
def _freeze(model: torch.nn.Module) -> Iterator[None]:
    """Inside the context no parameter requires a gradient, as in a model into which PEFT has put a LoRA, whose own
    matrices do. Nothing is trained here, but torch chooses by it whether an input that is not contiguous is multiplied
    as one matrix or sample by sample, and these round differently."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
