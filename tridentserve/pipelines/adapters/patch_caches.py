"""The caches of patches of requests that do a step of a U-Net together, as part of their states
(`tridentserve.pipelines.reuse.patch_pass`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from tridentserve.parallel.guidance import PassShare
from tridentserve.pipelines.adapters.denoising_request import DenoisingRequest
from tridentserve.pipelines.adapters.patched_unet import order_by_size
from tridentserve.pipelines.adapters.step_caches import RequestCaches, may_skip
from tridentserve.pipelines.base import CACHE_LIMIT, SKIPPED_STEPS
from tridentserve.pipelines.reuse.patch_pass import KeptStack, PassRows, PatchGrid, PatchPass, use_patch_passes
from tridentserve.pipelines.reuse.predictor import ReusePredictor

# The names of a state's tensors for the stack of each number: (passes, num_outputs, tokens, channels), and the same
# with a dimension for the blocks of the stack before the last two.
_ENTERING, _ADDED = "cache.{:02}.entering", "cache.{:02}.added"


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows of one request in one pass of guidance: as many as it has outputs."""

    request: int
    index: int
    """The number of the pass."""


_Find = Callable[[PatchPass], torch.Tensor]


class PatchCaches(RequestCaches):
    """The caches of requests in one step. Those that are made exactly have none, and are computed."""

    def __init__(
        self, requests: Sequence[DenoisingRequest], levels: int, stacks: int, predictor: ReusePredictor
    ) -> None:
        """`levels` and `stacks`: the numbers of the U-Net's levels and of its stacks of transformer blocks."""
        self._requests, self._predictor, self._stacks = requests, predictor, range(stacks)
        self._grids = [PatchGrid.choose(request.latents.shape, levels) for request in requests]
        self._passes = [len(next(iter(request.rows.values()))) for request in requests]
        self._done: list[tuple[list[_Piece], PatchPass]] = []

    def run(self, first: int, count: int) -> AbstractContextManager[None]:
        passes = range(first, first + count)
        return self._run([[_Piece(index, number) for number in passes for index in range(len(self._requests))]])

    def run_packed(self) -> AbstractContextManager[None]:
        """Do what `run` does in the packed call of the U-Net, in which each request has all of its passes."""
        latents = [request.latents for request in self._requests]
        by_size = groupby(order_by_size(latents), lambda index: latents[index].shape[-2:])
        return self._run(
            [
                [_Piece(index, number) for index in members for number in range(self._passes[index])]
                for _, members in by_size
            ]
        )

    def keep(self, share: PassShare) -> None:
        pieces = [_Piece(index, number) for number in range(self._passes[0]) for index in range(len(self._requests))]

        def collect(find: _Find) -> list[tuple[list[_Piece], torch.Tensor]]:
            return [(pieces, share.gather(torch.cat([find(done) for _, done in self._done])))]

        self._keep(collect)

    def keep_packed(self) -> None:
        """Do what `keep` does after a packed call."""
        self._keep(lambda find: [(pieces, find(done)) for pieces, done in self._done if done.keeps])

    def _run(self, sizes: Sequence[list[_Piece]]) -> AbstractContextManager[None]:
        passes = [self._begin(pieces) for pieces in sizes]
        self._done += zip(sizes, passes, strict=True)
        return use_patch_passes(passes)

    def _begin(self, pieces: list[_Piece]) -> PatchPass:
        requests = [self._requests[piece.request] for piece in pieces]
        counts = torch.tensor([len(request.latents) for request in requests])

        def spread(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts)[:, None]

        rows = PassRows(
            self._grids[pieces[0].request],
            spread([request.values[CACHE_LIMIT] for request in requests]),
            spread([request.steps_done / request.before.num_steps for request in requests]),
            spread([float(_ADDED.format(0) in request.tensors) for request in requests]) > 0,
        )
        kept = {number: self._join(pieces, number) for number in self._stacks} if rows.known.any() else {}
        return PatchPass(rows, kept, self._predictor)

    def _join(self, pieces: Sequence[_Piece], number: int) -> KeptStack:
        """Join the tensors that a stack keeps of these rows; zeros for those of which it keeps nothing."""

        def join(name: str) -> torch.Tensor:
            found = [self._requests[piece.request].tensors.get(name) for piece in pieces]
            (pattern, *_) = (tensor for tensor in found if tensor is not None)
            return torch.cat(
                [
                    pattern.new_zeros(len(self._requests[piece.request].latents), *pattern.shape[2:])
                    if tensor is None
                    else tensor[piece.index]
                    for piece, tensor in zip(pieces, found, strict=True)
                ]
            )

        return KeptStack(join(_ENTERING.format(number)), join(_ADDED.format(number)))

    def _keep(self, collect: Callable[[_Find], list[tuple[list[_Piece], torch.Tensor]]]) -> None:
        """Put what the calls have found into the tensors and the values of the requests. `collect` finds something of
        the rows of all calls, on all members."""
        # Groups of GPUs exchange tensors of the device only.
        device = self._requests[0].latents.device
        skipped = self._split(collect(lambda done: torch.stack(done.skipped).mean(0).float().to(device)))
        for request, parts in skipped:
            steps = request.values[SKIPPED_STEPS] + torch.stack(parts).double().mean().item()
            request.values = request.values | {SKIPPED_STEPS: steps}
        for number in self._stacks:
            for name, attribute in ((_ENTERING, "entering"), (_ADDED, "added")):
                find = partial(_find_kept, number, attribute)
                for request, parts in self._split(collect(find)):
                    request.tensors[name.format(number)] = torch.stack(parts)

    def _split(
        self, collected: list[tuple[list[_Piece], torch.Tensor]]
    ) -> list[tuple[DenoisingRequest, list[torch.Tensor]]]:
        """Something of the rows of each request that need not be exact, pass by pass."""
        found: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for pieces, rows in collected:
            counts = [len(self._requests[piece.request].latents) for piece in pieces]
            for piece, part in zip(pieces, torch.split(rows, counts), strict=True):
                found[piece.request].append(part)
        by_request = [(self._requests[index], parts) for index, parts in found.items()]
        return [(request, parts) for request, parts in by_request if may_skip(request.values)]


def _find_kept(number: int, attribute: str, done: PatchPass) -> torch.Tensor:
    found: torch.Tensor = getattr(done.after[number], attribute)
    return found
