"""The caches of requests that do a step together: results of their last computed steps, as part of their states
(`tridentserve.pipelines.reuse.block_cache`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tridentserve.parallel.guidance import PassShare
from tridentserve.pipelines.adapters.denoising_request import DenoisingRequest
from tridentserve.pipelines.base import CACHE_LIMIT, SKIPPED_STEPS
from tridentserve.pipelines.reuse.block_cache import BlockResiduals, CachedPass, JoinedStream, use_block_cache

# The names of a state's tensors, (passes, num_outputs, tokens, channels).
_FIRST, _OTHERS = "cache.first", "cache.others"


def may_skip(values: dict[str, Any]) -> bool:
    """True for the values of a state whose steps need not all be computed."""
    return bool(values[CACHE_LIMIT] > 0)


class RequestCaches(ABC):
    """The caches of requests in one step, whatever they hold."""

    @abstractmethod
    def run(self, first: int, count: int) -> AbstractContextManager[None]:
        """Have the model take over what it may in the call for `count` passes from the `first` on, with a row for each
        pass and output."""

    @abstractmethod
    def keep(self, share: PassShare) -> None:
        """Put what the calls have found into the tensors and the values of the requests, on all members."""


class StepCaches(RequestCaches):
    """The caches of requests in one step. Those that are made exactly have none, and are computed."""

    def __init__(self, requests: Sequence[DenoisingRequest], passes: int, stream: JoinedStream | None = None) -> None:
        self._requests = requests
        self._stream = stream
        self._passes = passes
        self._sizes = [request.latents.shape[0] for request in requests]
        limits = [
            torch.full((passes, size), request.values[CACHE_LIMIT], dtype=torch.float64)
            for request, size in zip(requests, self._sizes, strict=True)
        ]
        self._limits = torch.cat(limits, dim=1)
        self._before = self._join()
        self._done: list[CachedPass] = []

    def run(self, first: int, count: int) -> AbstractContextManager[None]:
        rows = slice(first * sum(self._sizes), (first + count) * sum(self._sizes))
        before = self._before.select(rows) if self._before else None
        cached = CachedPass(self._limits.flatten()[rows], before, self._stream)
        self._done.append(cached)
        return use_block_cache(cached)

    def keep(self, share: PassShare) -> None:
        # Groups of GPUs exchange tensors of the device only.
        mine = torch.cat([cached.computed for cached in self._done]).float().to(self._requests[0].latents.device)
        computed = share.gather(mine).cpu() > 0
        by_pass = computed.view(self._passes, -1)
        for request, own in zip(self._requests, torch.split(by_pass, self._sizes, dim=1), strict=True):
            if may_skip(request.values):
                skipped = request.values[SKIPPED_STEPS] + 1 - own.double().mean().item()
                request.values = request.values | {SKIPPED_STEPS: skipped}
        if not computed.any():
            return
        first, others = (
            self._gather(share, [getattr(cached.after, name) for cached in self._done]) for name in ("first", "others")
        )
        for index, request in enumerate(self._requests):
            if may_skip(request.values):
                request.tensors |= {_FIRST: first[index], _OTHERS: others[index]}

    def _join(self) -> BlockResiduals | None:
        known = [_FIRST in request.tensors for request in self._requests]
        if not any(known):
            return None
        pattern = self._requests[known.index(True)].tensors[_FIRST]

        def join(name: str) -> torch.Tensor:
            parts = [
                request.tensors[name]
                if name in request.tensors
                else pattern.new_zeros(self._passes, size, *pattern.shape[2:])
                for request, size in zip(self._requests, self._sizes, strict=True)
            ]
            return torch.cat(parts, dim=1).flatten(0, 1)

        rows = torch.repeat_interleave(torch.tensor(known), torch.tensor(self._sizes)).repeat(self._passes)
        return BlockResiduals(join(_FIRST), join(_OTHERS), rows)

    def _gather(self, share: PassShare, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors of each request, of all passes."""
        rows = share.gather(torch.cat(parts))
        return torch.split(rows.view(self._passes, -1, *rows.shape[1:]), self._sizes, dim=1)
