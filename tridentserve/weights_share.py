"""The part of a stage's weights that a worker keeps in memory: all of them, a shard of each layer, or no layer at all.

Layers are the members of a model's lists of modules, such as the blocks of a transformer. One that is not kept whole is
put together in one of two slots just before it computes, and the next one in the other slot meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Shards of layers are multiples of this many bytes: up to four units, or six, eight or twelve of them, can then send
# equal parts of a shard.
SHARD_MULTIPLE_BYTES = 64 * 24
# A slot may begin this many bytes later than it must, so that tensors are aligned as in the run of all weights.
SLOT_ALIGNMENT_BYTES = 512


@dataclass(frozen=True, slots=True)
class WeightsShare:
    """The part of a stage's weights that each worker keeps that holds the stage."""

    unit: int = 1
    """The number of workers of a node that hold the layers together, a shard of each on every one of them, and send
    each other the shards of a layer before it computes."""
    streamed: bool = False
    """The worker keeps no layer, and copies each from the host copy before it computes."""

    @property
    def is_whole(self) -> bool:
        """True when all weights are kept, as usual."""
        return self.unit == 1 and not self.streamed


WHOLE = WeightsShare()


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The weights of one stage by layers."""

    rest_bytes: int
    """Bytes outside all layers, such as embeddings, which every worker keeps."""
    layers: tuple[int, ...]
    """Bytes of each layer, in any order."""

    @property
    def layers_bytes(self) -> int:
        """Bytes of all layers together."""
        return sum(self.layers)

    def scale(self, total_bytes: int) -> LayerSizes:
        """The same proportions at another total: in another number format."""
        factor = total_bytes / max(1, self.rest_bytes + self.layers_bytes)
        layers = tuple(math.ceil(size * factor) for size in self.layers)
        return LayerSizes(max(0, total_bytes - sum(layers)), layers)

    def count_kept_bytes(self, share: WeightsShare) -> int:
        """Bytes that a worker keeps of the weights for good, with two slots for layers where it does not keep them."""
        if share.is_whole:
            return self.rest_bytes + self.layers_bytes
        shards = [count_shard_bytes(size, share.unit) for size in self.layers]
        slots_bytes = 2 * (share.unit * max(shards, default=0) + SLOT_ALIGNMENT_BYTES)
        # What begins at an alignment of its own: each shard, and what lies between layers.
        gaps_bytes = 2 * SLOT_ALIGNMENT_BYTES * (len(shards) + 1)
        return self.rest_bytes + slots_bytes + gaps_bytes + (0 if share.streamed else sum(shards))

    def count_supplied_bytes(self, share: WeightsShare, workers: int) -> int:
        """Bytes that a worker gets from the others of a group of so many workers, or from the host copy, each time when
        all layers compute once."""
        if share.streamed:
            return self.layers_bytes
        return self.layers_bytes * (workers - 1) // workers


def count_shard_bytes(layer_bytes: int, unit: int) -> int:
    """Bytes of one of the `unit` equal shards of a layer, the last of which is padded."""
    return -(-layer_bytes // (unit * SHARD_MULTIPLE_BYTES)) * SHARD_MULTIPLE_BYTES
