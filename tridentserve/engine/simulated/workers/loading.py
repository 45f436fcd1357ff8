"""Weights that come to simulated workers, and plans for which these have too little memory."""

from __future__ import annotations

from collections.abc import Callable

from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.recorder import Recorder
from tridentserve.engine.simulated.workers.actual_times import ActualTimes
from tridentserve.engine.simulated.workers.devices import Device, Devices, PlanRun
from tridentserve.errors import OutOfMemoryError
from tridentserve.plans import Replica
from tridentserve.protocols import LoadSource
from tridentserve.scheduling import events as ev


class SimulatedLoading:
    """Makes replicas resident in the time that this takes, and reports each to `post`."""

    def __init__(
        self,
        agenda: Agenda,
        devices: Devices,
        times: ActualTimes,
        recorder: Recorder,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._agenda = agenda
        self._devices = devices
        self._times = times
        self._recorder = recorder
        self._post = post

    def find_memory_error(self, run: PlanRun) -> OutOfMemoryError | None:
        """The error of a plan for which a worker has too little memory, whatever else leaves it."""
        for device, demand in zip(run.devices, run.demand.ranks, strict=True):
            least_bytes = self._devices.least_bytes(demand)
            if least_bytes > device.spec.memory_bytes:
                stages = "".join(replica.stage.letter for replica in demand.replicas)
                return OutOfMemoryError(
                    f"out of memory: {stages} of {run.plan.model} for {len(run.specs)} x {run.specs[0].shape} at "
                    f"degree {run.plan.degree} needs {least_bytes} bytes on {device.worker_id} ({demand.peak_bytes} of "
                    f"them for activations), which has {device.spec.memory_bytes}"
                )
        return None

    def load(self, device: Device, replicas: tuple[Replica, ...]) -> float:
        """Make the replicas resident on one worker, which has room for them; returns the seconds until they are."""
        total_s = 0.0
        for replica in replicas:
            if replica in device.resident:
                continue
            source = self._devices.source(device, replica)
            seconds = self._times.load_seconds(replica, source)
            total_s += seconds
            self._agenda.call_at(
                self._agenda.now_s + total_s, self._finish_load, device, device.incarnation, replica, source, seconds
            )
        device.loading_until_s = self._agenda.now_s + total_s
        return total_s

    def _finish_load(
        self, device: Device, incarnation: int, replica: Replica, source: LoadSource, seconds: float
    ) -> None:
        if not device.alive or device.incarnation != incarnation or replica in device.resident:
            return
        self._devices.add(device, replica)
        num_bytes = self._times.weights_bytes(replica)
        counts = self._recorder.counts
        counts.loads += 1
        counts.load_bytes += num_bytes
        counts.load_seconds += seconds
        # What left in between and is back now was never missed.
        evicted = tuple(other for other in device.evicted if other != replica)
        device.evicted.clear()
        self._post(ev.ReplicaLoaded(device.worker_id, replica, evicted, source, num_bytes, seconds))
