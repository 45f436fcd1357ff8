"""Stage times that can be added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tridentserve.errors import ProfileError
from tridentserve.protocols import LoadSource
from tridentserve.requests import Shape
from tridentserve.stages import Stage


@dataclass
class FixedTimes:
    """A `StageTimes` with the same times for all models and sizes. D scales perfectly with the degree; D and C take as
    many times as long as there are outputs in the batch, E does not."""

    encode_s: float = 0.5
    step_s: float = 1.0
    """Seconds of a denoising step of one output at degree 1."""
    decode_s: float = 2.0
    diffuse_degrees: tuple[int, ...] = (1, 2, 4)
    """The degrees at which D was profiled. E and C were profiled at degree 1."""
    max_batch: int = 1
    """The largest batch that is worth its latency, for all stages."""
    replica_bytes: int = 10
    """Bytes of the weights of one stage on a worker."""
    peak_bytes_per_output: int = 5
    handoff_bytes_per_output: int = 8
    """Bytes that a stage hands to the next one."""
    same_node_s: float = 0.25
    """Seconds of a handoff to another worker of the node."""
    other_node_s: float = 1.0
    """Seconds of a handoff to another node."""
    host_load_s: float = 3.0
    """Seconds to load a replica from the host copy or from disk."""
    peer_load_s: float = 1.0
    """Seconds to load a replica from another worker of the node."""
    packed_share: float = 1.0
    """Seconds of a packed step over those of the steps of its members one by one."""
    observed: list[tuple[Stage, int, float]] = field(default_factory=list)
    """Stage, degree and seconds of all stages that were reported to it. It does not learn from them."""

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        if degree not in self.degrees(model, stage):
            raise ProfileError(f"{stage} was not profiled at degree {degree}")
        match stage:
            case Stage.ENCODE:
                return self.encode_s
            case Stage.DIFFUSE:
                return self.step_s / degree * batch
            case Stage.DECODE:
                return self.decode_s * batch

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        return self.peak_bytes_per_output * batch

    def weights_bytes(self, model: str, stage: Stage) -> int:
        return self.replica_bytes

    def unit(self, model: str, stage: Stage) -> int:
        return 1

    def output_bytes(self, model: str, stage: Stage, shape: Shape, batch: int = 1) -> int:
        return self.handoff_bytes_per_output * batch

    def transfer_seconds(self, model: str, stage: Stage, shape: Shape, batch: int = 1, same_node: bool = True) -> float:
        return self.same_node_s if same_node else self.other_node_s

    def load_seconds(self, model: str, stage: Stage, source: LoadSource = "host") -> float:
        return self.peer_load_s if source == "peer" else self.host_load_s

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        return self.diffuse_degrees if stage is Stage.DIFFUSE else (1,)

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        return max(self.degrees(model, stage))

    def optimal_batch(self, model: str, stage: Stage, shape: Shape, degree: int = 1) -> int:
        return self.max_batch

    def packed_seconds(self, model: str, shapes: Sequence[Shape]) -> float:
        return self.packed_share * sum(self.seconds(model, Stage.DIFFUSE, shape) for shape in shapes)

    def observe(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int, seconds: float) -> None:
        self.observed.append((stage, degree, seconds))
