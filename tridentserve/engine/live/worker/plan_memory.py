"""The memory of one worker for its plans: what each is expected to take, what it needs loaded, and what is done when
there is less than there should be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field

from tridentserve.device import MemoryPeak
from tridentserve.device.memory_errors import is_out_of_memory
from tridentserve.engine.live.messages import ExpectedPeak, PlanNote
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.replica_store import ReplicaStore
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.errors import OutOfMemoryError
from tridentserve.models.lora_files import LoraFile, collect_files, count_file_bytes
from tridentserve.models.step_cache import count_cache_bytes
from tridentserve.plans import DispatchPlan, Replica
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """A plan that a worker has been given, with all that it needs to run it."""

    plan: DispatchPlan
    inputs: Mapping[str, GenerationInputs]
    """Content of each member's request, by request id."""
    control: StepControl
    expected: ExpectedPeak
    """Memory that its activations are expected to take on this worker."""
    needed: tuple[Replica, ...]
    """Replicas that it uses on this worker."""
    tell: Callable[[PlanNote], None]
    """Takes the notes of the plan, in the event loop."""
    peak: MemoryPeak
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its first stage begins, or it has ended without one."""

    @property
    def is_skipped(self) -> bool:
        """True of a plan that has been stopped, and that no other worker waits for: it need not begin."""
        return self.control.stopped and self.plan.degree == 1


class PlanMemory:
    """All methods run in the event loop. One plan loads or computes at a time."""

    def __init__(self, replicas: ReplicaStore, host_copies: HostCopies) -> None:
        self._replicas = replicas
        self._host_copies = host_copies
        # By kinds of plans for which memory once ran out: bytes that they took beyond those expected.
        self._unexpected: dict[Hashable, int] = {}

    async def load(self, running: RunningPlan, queued: Collection[Replica]) -> bool:
        """Have in memory what the plan runs here; `queued` are the replicas that others wait for. Returns whether it
        must be run frugally to fit."""
        try:
            return await self._load_within_budget(running, queued)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("loading for plan %d is tried again: %r", running.plan.plan_id, error)
        await self._replicas.evict_all_but(queued)
        return await self._load_within_budget(running, queued)

    def load_ahead(self, running: RunningPlan, after: RunningPlan) -> None:
        """Begin to bring the weights of the plan after the one that computes, where it is known what that one takes."""
        if running.expected.num_bytes > 0:
            self._replicas.load_ahead(after.needed, self._expect_peak(running).num_bytes, _list_loras(running))

    def end_peak(self, running: RunningPlan) -> None:
        """The plan has been run. Weights that came meanwhile are none of its activations."""
        running.peak.end()
        running.peak.growth_bytes = max(running.peak.growth_bytes - self._replicas.ahead_bytes, 0)

    async def make_room(self, running: RunningPlan, queued: Collection[Replica]) -> None:
        """Memory has run out: keep what others wait for, and expect as much of such plans as was seen."""
        self.end_peak(running)
        key, unexpected_bytes = _name_size(running), running.peak.growth_bytes - running.expected.num_bytes
        self._unexpected[key] = max(unexpected_bytes, self._unexpected.get(key, 0))
        await self._replicas.evict_all_but(queued)

    async def _load_within_budget(self, running: RunningPlan, queued: Collection[Replica]) -> bool:
        expected, tell, loras = self._expect_peak(running), running.tell, _list_loras(running)
        keep = self._replicas.wanted if running.plan.is_warm_up else ()  # for which none of the placement leaves
        try:
            await self._replicas.prepare(running.needed, expected.num_bytes, queued, keep, tell, loras)
        except OutOfMemoryError:
            if expected.frugal_bytes >= expected.num_bytes:
                raise
            await self._replicas.prepare(running.needed, expected.frugal_bytes, queued, keep, tell, loras)
            return True
        return False

    def _expect_peak(self, running: RunningPlan) -> ExpectedPeak:
        unexpected_bytes = self._unexpected.get(_name_size(running), 0)
        return running.expected.with_bytes(self._count_own_bytes(running) + unexpected_bytes)

    def _count_own_bytes(self, running: RunningPlan) -> int:
        """Bytes that D needs for LoRAs and step caches, which no profile knows of."""
        if Stage.DIFFUSE not in running.plan.stages:
            return 0
        replica, requests = Replica(running.plan.model, Stage.DIFFUSE), running.inputs.values()
        source, formats = self._host_copies.source(replica), self._host_copies.formats(replica)
        held = {file: self._replicas.loras.find_bytes(file) for file in _list_loras(running)}
        lora_bytes = sum(count_file_bytes(file) if known is None else known for file, known in held.items())
        return lora_bytes + count_cache_bytes(source.folder, requests, formats, source.step_cache)


def _list_loras(running: RunningPlan) -> tuple[LoraFile, ...]:
    """The LoRAs that a plan needs."""
    if Stage.DIFFUSE not in running.plan.stages:
        return ()
    return collect_files(inputs.loras for inputs in running.inputs.values())


def _name_size(running: RunningPlan) -> Hashable:
    """The same for plans that take the same memory."""
    plan, shapes = running.plan, sorted(str(inputs.shape) for inputs in running.inputs.values())
    return plan.model, plan.stages, plan.degree, tuple(shapes)
