"""The Scheduler's process of the benchmark (an actor of Ray's): the real scheduler, engine and gate for replicas."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Sequence
from typing import Any

from deployments.assembly.workers import make_worker_configs
from deployments.serve.client_calls import ClientGate
from lib.control_plane.cluster import Truth
from lib.control_plane.logical_workers import HOST, LogicalSpawner, read_usage
from tridentserve.engine.live.channels.channel import ChannelAddress
from tridentserve.engine.live.channels.opening import ChannelListener, listen
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.simulated import TimedRequest
from tridentserve.process.long_lived import spare_long_lived

# Lines of a profile, of each thread.
_PROFILE_LINES = 25


class ControlPlaneScheduler:
    """The parts of the Scheduler deployment that are behind Ray Serve."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._engine: LiveEngine | None = None
        self._listener: ChannelListener | None = None
        self._profilers: list[cProfile.Profile] = []

    async def start(self, arrivals: Sequence[TimedRequest], hosts: list[Any]) -> float:
        """Start the engine with workers in these processes; returns the seconds that it took."""
        began_s = time.perf_counter()
        truth = self._truth
        planners, options = truth.make_planners(arrivals), truth.make_options()
        configs = make_worker_configs(truth.list_workers(), planners.placement, {}, {}, ("", 0), options.worker)
        self._engine = LiveEngine(
            planners.scheduler,
            configs,
            LogicalSpawner(hosts),
            lambda group, rank, plan_id: None,
            options.engine,
            truth.make_times().build_memory_table(),
        )
        await self._engine.start()
        self._listener = await listen(HOST, ClientGate(self._engine, orphan_s=0.0).serve)
        spare_long_lived()
        return time.perf_counter() - began_s

    async def get_address(self) -> ChannelAddress:
        """See `SchedulerDeployment.get_address`."""
        assert self._listener is not None
        return self._listener.address

    async def read_usage(self) -> tuple[float, int]:
        """CPU seconds of this process so far, and its resident bytes."""
        return read_usage()

    async def begin_profile(self) -> None:
        """Have the event loop and the scheduler's thread profiled from now on."""
        assert self._engine is not None
        # CPU time of the thread: with the time of the clock, waits for the other thread would count.
        self._profilers = [cProfile.Profile(time.thread_time), cProfile.Profile(time.thread_time)]
        self._profilers[0].enable()
        await self._engine.models.call_in_core(self._profilers[1].enable)

    async def end_profile(self) -> str:
        """The functions that took most of the time in each of the two threads."""
        assert self._engine is not None
        self._profilers[0].disable()
        await self._engine.models.call_in_core(self._profilers[1].disable)
        text = io.StringIO()
        for name, profile in zip(("event loop", "scheduler's thread"), self._profilers, strict=True):
            text.write(f"--- {name}\n")
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(_PROFILE_LINES)
        return text.getvalue()
