"""Runs C of a plan on one of its workers: alone, or together with others that compute rows of the same layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.errors import HandoffError
from tridentserve.models.decode_tiles import choose_decode_tile
from tridentserve.models.decoded_outputs import DecodedOutputs
from tridentserve.parallel import SequenceGroup, sequence_parallel
from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.plans import DispatchPlan
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Decoded = dict[str, DecodedOutputs]


class Decoding:
    """Runs C of the members of a plan, one request after the other, which bounds memory."""

    def __init__(self, plan: DispatchPlan, adapter: PipelineAdapter, group: SequenceGroup | None) -> None:
        """`group` is made of the workers that decode together; None at degree 1. The first of them has the latents and
        gets the outputs; the others need the content of the requests only."""
        self._plan = plan
        self._adapter = adapter
        self._group = group
        self._is_first = group is None or group.rank == 0
        self.tiled = False

    def decode_members(
        self, inputs: Mapping[str, GenerationInputs], latents: Mapping[str, Parcel], stopped: bool, in_tiles: bool
    ) -> Decoded | None:
        """The outputs of each request in `inputs`, on the first worker; None when that is `stopped`. `in_tiles`: this
        worker lacks the memory for whole images; then all of the group decode in tiles."""
        names = self._agree_on_requests(list(inputs), stopped)
        if names is None:
            return None
        self.tiled = self._agree_on_any(in_tiles)
        decoded: Decoded = {}
        for name in names:
            content = inputs[name]
            given = self._share_latents(latents.get(name), name)
            with sequence_parallel(self._group):
                tile = choose_decode_tile(content.shape) if self.tiled else None
                outputs = self._adapter.decode_outputs(given, content, tile)
            if self._is_first:
                decoded[name] = outputs
        return decoded

    def _agree_on_requests(self, names: list[str], stopped: bool) -> list[str] | None:
        """The requests that the first worker still has: some may have ended since, or all."""
        mine = None if stopped else names
        if self._group is None:
            return mine
        agreed: list[str] | None = self._group.broadcast_json(mine)
        return agreed

    def _agree_on_any(self, mine: bool) -> bool:
        if self._group is None:
            return mine
        flag = torch.tensor([mine], dtype=torch.int64, device=self._group.device)
        return bool(torch.cat(self._group.all_gather(flag, [(1,)] * self._group.size)).any())

    def _share_latents(self, latents: Parcel | None, name: str) -> dict[str, torch.Tensor]:
        """The latents of a request, on all workers."""
        if self._is_first and latents is None:
            raise HandoffError(f"plan {self._plan.plan_id} of request {name} has no inputs for {Stage.DECODE}")
        tensors = latents.tensors if latents is not None else {}
        return tensors if self._group is None else self._group.broadcast_tensors(tensors if self._is_first else None)
