"""How long things really take in a simulation: the stage times, remembered, with seeded jitter."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tridentserve.estimates import stage_degree
from tridentserve.plans import DispatchPlan, Replica
from tridentserve.protocols import LoadSource, StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import Stage

_Key = tuple[str, Stage, Shape, int, int]


class Truth:
    """Asks a `StageTimes` once per question. The scheduler's own copy may learn; this one stays as it is."""

    def __init__(self, times: StageTimes, jitter: float, seed: int) -> None:
        self._times = times
        self._seed = seed
        # A lognormal factor with mean 1 and relative standard deviation `jitter`.
        self._sigma = math.sqrt(math.log1p(jitter * jitter))
        self._seconds: dict[_Key, float] = {}
        self._peaks: dict[_Key, int] = {}
        self._degrees: dict[tuple[str, Stage, int], int] = {}
        self._weights: dict[Replica, int] = {}
        self._outputs: dict[tuple[str, Stage, Shape, int], int] = {}
        self._transfers: dict[tuple[str, Stage, Shape, int, bool], float] = {}

    def degree(self, plan: DispatchPlan, stage: Stage) -> int:
        """How many of a plan's workers run a stage."""
        key = (plan.model, stage, len(plan.workers))
        found = self._degrees.get(key)
        if found is None:
            found = self._degrees[key] = stage_degree(self._times, *key)
        return found

    def seconds(self, plan: DispatchPlan, stage: Stage, specs: Sequence[RequestSpec]) -> float:
        """Seconds that a plan spends in a stage, for all its requests."""
        batch = sum(spec.num_outputs for spec in specs)
        key = (plan.model, stage, specs[0].shape, self.degree(plan, stage), batch)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self._times.seconds(*key)
        if self._sigma:
            seconds *= self._jitter(specs[0].request_id, stage)
        return seconds * plan.num_steps if stage is Stage.DIFFUSE else seconds

    def peak_bytes(self, plan: DispatchPlan, stage: Stage, specs: Sequence[RequestSpec]) -> int:
        """Peak activation bytes of a stage on one worker. A batch is decoded one request after another."""
        outputs = [spec.num_outputs for spec in specs]
        batch = max(outputs) if stage is Stage.DECODE else sum(outputs)
        key = (plan.model, stage, specs[0].shape, self.degree(plan, stage), batch)
        peak = self._peaks.get(key)
        if peak is None:
            peak = self._peaks[key] = self._times.peak_bytes(*key)
        return peak

    def weights_bytes(self, replica: Replica) -> int:
        found = self._weights.get(replica)
        if found is None:
            found = self._weights[replica] = self._times.weights_bytes(replica.model, replica.stage)
        return found

    def load_seconds(self, replica: Replica, source: LoadSource) -> float:
        return self._times.load_seconds(replica.model, replica.stage, source)

    def output_bytes(self, model: str, stage: Stage, shape: Shape, batch: int) -> int:
        key = (model, stage, shape, batch)
        found = self._outputs.get(key)
        if found is None:
            found = self._outputs[key] = self._times.output_bytes(*key)
        return found

    def transfer_seconds(self, model: str, stage: Stage, shape: Shape, batch: int, same_node: bool) -> float:
        key = (model, stage, shape, batch, same_node)
        found = self._transfers.get(key)
        if found is None:
            found = self._transfers[key] = self._times.transfer_seconds(*key)
        return found

    def host_seconds(self, model: str, stage: Stage, num_bytes: int) -> float:
        """Seconds from host memory to the device, at the speed at which weights come from there."""
        replica = Replica(model, stage)
        weights_bytes = self.weights_bytes(replica)
        return self.load_seconds(replica, "host") * num_bytes / weights_bytes if weights_bytes else 0.0

    def _jitter(self, request_id: str, stage: Stage) -> float:
        draw = random.Random(f"{self._seed}/{request_id}/{stage}").gauss(0.0, 1.0)
        return math.exp(self._sigma * draw - self._sigma**2 / 2)
