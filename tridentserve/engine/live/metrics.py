"""Metrics of the live engine, through Ray: they appear as `ray_tridentserve_*` on its metrics ports.

Tags hold names from the configuration only: no request ids, no text of users. Ray's histograms round their sums to
bucket midpoints, so exact totals are counters in addition to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge, Histogram

from tridentserve.engine.live.messages import ReplicaLoad
from tridentserve.plans import DispatchPlan, StageSpan, WorkerId
from tridentserve.scheduling.request_records import RequestRecord, RequestState

if TYPE_CHECKING:
    from tridentserve.engine.live.handoff.buffer import HandoffBuffer
    from tridentserve.engine.live.handoff.peer import CompletedTransfer

# Ray drops a gauge that is not set for a while: levels are reported again this often.
GAUGE_PERIOD_S = 2.0
_RATIOS = [0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 4]
_SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]


class WorkerMetrics:
    """Counts the stages, transfers, loads and checkpoints of one worker."""

    def __init__(self, worker_id: WorkerId) -> None:
        self._worker = {"worker": worker_id}
        stage_tags = ("worker", "model", "stage", "degree")
        self._stage_seconds = Histogram(
            "tridentserve_stage_seconds",
            "Seconds that one run of a stage took.",
            boundaries=_SECONDS,
            tag_keys=stage_tags,
        )
        self._stage_seconds_total = Counter(
            "tridentserve_stage_busy_seconds_total", "Seconds that a worker has spent in a stage.", tag_keys=stage_tags
        )
        self._stage_runs = Counter(
            "tridentserve_stage_runs_total", "Runs of a stage that have ended.", tag_keys=stage_tags
        )
        self._add_handoff_metrics()
        self._add_replica_metrics()

    def _add_handoff_metrics(self) -> None:
        path_tags = ("worker", "path")
        self._handoff_bytes = Counter(
            "tridentserve_handoff_bytes_total",
            "Bytes of stage outputs and state checkpoints that a worker has sent, or taken from itself (path local).",
            tag_keys=path_tags,
        )
        self._handoff_seconds = Counter(
            "tridentserve_handoff_seconds_total",
            "Seconds that sending stage outputs and state checkpoints took; those of path local take no time.",
            tag_keys=path_tags,
        )
        self._handoffs = Counter(
            "tridentserve_handoffs_total",
            "Stage outputs and state checkpoints that a worker has sent, or taken from itself (path local).",
            tag_keys=path_tags,
        )
        self._handoff_used = Gauge(
            "tridentserve_handoff_used_bytes", "Bytes of the handoff buffer that are in use.", tag_keys=("worker",)
        )
        self._handoff_parcels = Gauge(
            "tridentserve_handoff_parcels",
            "Parcels that a worker holds: its stage outputs, what it has received, and state checkpoints for others.",
            tag_keys=("worker",),
        )
        self._checkpoints = Counter(
            "tridentserve_checkpoints_total",
            "State checkpoints that were sent to another worker.",
            tag_keys=("worker",),
        )
        self._checkpoint_bytes = Counter(
            "tridentserve_checkpoint_bytes_total",
            "Bytes of the state checkpoints that were sent.",
            tag_keys=("worker",),
        )
        self._checkpoint_seconds = Counter(
            "tridentserve_checkpoint_seconds_total",
            "Seconds that sending state checkpoints took.",
            tag_keys=("worker",),
        )
        self._held_checkpoints = Gauge(
            "tridentserve_checkpoints_held", "State checkpoints that a worker holds for others.", tag_keys=("worker",)
        )
        self._held_checkpoint_bytes = Gauge(
            "tridentserve_checkpoint_held_bytes",
            "Bytes of host memory of the state checkpoints that a worker holds for others.",
            tag_keys=("worker",),
        )

    def _add_replica_metrics(self) -> None:
        source_tags = ("worker", "model", "stage", "source")
        self._loads = Counter("tridentserve_replica_loads_total", "Replicas that were loaded.", tag_keys=source_tags)
        self._load_bytes = Counter(
            "tridentserve_replica_load_bytes_total", "Bytes of the replicas that were loaded.", tag_keys=source_tags
        )
        self._load_seconds = Counter(
            "tridentserve_replica_load_seconds_total", "Seconds that loading replicas took.", tag_keys=source_tags
        )
        self._evictions = Counter(
            "tridentserve_replica_evictions_total", "Replicas that were evicted.", tag_keys=("worker", "model", "stage")
        )
        self._resident = Gauge(
            "tridentserve_replica_bytes",
            "Bytes of the weights that a worker holds in device memory.",
            tag_keys=("worker",),
        )
        self._loras = Gauge(
            "tridentserve_lora_bytes", "Bytes of the LoRAs that a worker holds in device memory.", tag_keys=("worker",)
        )
        self._group_reserve = Gauge(
            "tridentserve_group_reserve_bytes",
            "Bytes of a worker's memory that process groups have: as planned, or more where they took more.",
            tag_keys=("worker",),
        )
        self._largest_group = Gauge(
            "tridentserve_largest_group_bytes",
            "The most bytes of device memory that one process group was measured to take; 0 where none was.",
            tag_keys=("worker",),
        )
        self._plan_peak = Gauge(
            "tridentserve_plan_peak_bytes",
            "Peak bytes of activations of the latest plan, as the profile expects and as measured.",
            tag_keys=("worker", "model", "stages", "degree", "kind"),
        )
        self._tiled = Counter(
            "tridentserve_tiled_decodes_total",
            "Requests that were decoded in tiles because memory was short.",
            tag_keys=("worker", "model"),
        )

    def count_stages(self, plan: DispatchPlan, spans: Iterable[StageSpan]) -> None:
        for span in spans:
            tags = {**self._worker, "model": plan.model, "stage": span.stage.value, "degree": str(len(span.workers))}
            seconds = max(span.seconds, 0.0)
            self._stage_seconds.observe(seconds, tags=tags)
            self._stage_seconds_total.inc(max(seconds, 1e-9), tags=tags)
            self._stage_runs.inc(tags=tags)

    def set_plan_peak(self, plan: DispatchPlan, measured_bytes: int, expected_bytes: int) -> None:
        stages = "".join(stage.letter for stage in plan.stages)
        tags = {**self._worker, "model": plan.model, "stages": stages, "degree": str(plan.degree)}
        self._plan_peak.set(measured_bytes, tags={**tags, "kind": "measured"})
        self._plan_peak.set(expected_bytes, tags={**tags, "kind": "expected"})

    def count_tiled_decodes(self, plan: DispatchPlan, num_requests: int) -> None:
        if num_requests:
            self._tiled.inc(num_requests, tags={**self._worker, "model": plan.model})

    def count_load(self, load: ReplicaLoad) -> None:
        tags = {**self._worker, "model": load.loaded.model, "stage": load.loaded.stage.value, "source": load.source}
        self._loads.inc(tags=tags)
        self._load_bytes.inc(max(load.num_bytes, 1), tags=tags)
        self._load_seconds.inc(max(load.seconds, 1e-9), tags=tags)
        for replica in load.evicted:
            self._evictions.inc(tags={**self._worker, "model": replica.model, "stage": replica.stage.value})

    def set_resident_bytes(self, resident_bytes: int) -> None:
        self._resident.set(resident_bytes, tags=self._worker)

    def set_lora_bytes(self, lora_bytes: int) -> None:
        self._loras.set(lora_bytes, tags=self._worker)

    def set_group_bytes(self, reserve_bytes: int, largest_bytes: int) -> None:
        self._group_reserve.set(reserve_bytes, tags=self._worker)
        self._largest_group.set(largest_bytes, tags=self._worker)

    def count_transfer(self, transfer: CompletedTransfer) -> None:
        tags = {**self._worker, "path": transfer.path}
        self._handoffs.inc(tags=tags)
        self._handoff_bytes.inc(max(transfer.nbytes, 1), tags=tags)
        self._handoff_seconds.inc(max(transfer.seconds, 1e-9), tags=tags)

    def set_handoff_levels(self, buffer: HandoffBuffer) -> None:
        self._handoff_used.set(buffer.used_bytes, tags=self._worker)
        self._handoff_parcels.set(buffer.num_parcels, tags=self._worker)
        self._held_checkpoints.set(len(buffer.checkpoints), tags=self._worker)
        self._held_checkpoint_bytes.set(buffer.checkpoints.nbytes, tags=self._worker)

    def count_checkpoint(self, nbytes: int, seconds: float) -> None:
        self._checkpoints.inc(tags=self._worker)
        self._checkpoint_bytes.inc(max(nbytes, 1), tags=self._worker)
        self._checkpoint_seconds.inc(max(seconds, 1e-9), tags=self._worker)


class EngineMetrics:
    """Counts the requests of the engine, and measures its queue. Counts reach Ray with the next levels, every
    `GAUGE_PERIOD_S`: one call of a counter of Ray's costs as much as the pickle of a plan."""

    def __init__(self) -> None:
        self._counted: defaultdict[tuple[Counter, tuple[tuple[str, str], ...]], int] = defaultdict(int)
        self._requests = Counter(
            "tridentserve_requests_total",
            "Requests that have ended, or were refused because the queue was full.",
            tag_keys=("model", "state"),
        )
        self._slo = Counter(
            "tridentserve_slo_total",
            "Requests that have ended, by whether they met their deadline; cancelled and invalid ones are left out.",
            tag_keys=("model", "met"),
        )
        self._latency = Histogram(
            "tridentserve_request_latency_seconds",
            "Seconds from arrival to result of completed requests.",
            boundaries=_SECONDS,
            tag_keys=("model",),
        )
        self._prediction = Histogram(
            "tridentserve_prediction_ratio",
            "Predicted over actual seconds from arrival to result of completed requests whose end was predicted.",
            boundaries=_RATIOS,
            tag_keys=("model",),
        )
        self._queue = Gauge("tridentserve_queue_length", "Requests that wait to be dispatched.")
        self._running = Gauge("tridentserve_running_requests", "Requests that have been dispatched and have not ended.")
        self._workers = Gauge("tridentserve_workers_alive", "Workers that are ready.")
        self._aside = Gauge(
            "tridentserve_workers_aside", "Workers that are given no plans for a while, as plans have failed there."
        )
        self._set_aside = Counter(
            "tridentserve_set_aside_total",
            "Times that a worker was given no plans for a while, as plans had failed there.",
            tag_keys=("worker",),
        )
        self._retries = Counter(
            "tridentserve_retries_total",
            "Requests that were put back into the queue after a fault.",
            tag_keys=("model",),
        )
        self._resumed_steps = Counter(
            "tridentserve_resumed_steps_total",
            "Denoising steps that requeued requests did not have to repeat because of a state checkpoint.",
            tag_keys=("model",),
        )

    def count_ended(self, record: RequestRecord) -> None:
        model = record.spec.model
        self._count(self._requests, model=model, state=record.state.value)
        if record.state is RequestState.COMPLETED and record.latency_s is not None:
            self._latency.observe(record.latency_s, tags={"model": model})
            if record.predicted_s is not None and record.latency_s > 0:
                self._prediction.observe(record.predicted_s / record.latency_s, tags={"model": model})
        if record.state is not RequestState.CANCELLED and record.error_code != "invalid_request":
            self._count(self._slo, model=model, met=str(record.slo_met).lower())

    def count_refused(self, model: str) -> None:
        """A request that found the queue full."""
        self._count(self._requests, model=model, state="refused")

    def count_retry(self, model: str, steps_done: int) -> None:
        """A request was put back into the queue; `steps_done` of its steps need not be repeated."""
        self._count(self._retries, model=model)
        if steps_done:
            self._count(self._resumed_steps, steps_done, model=model)

    def count_aside(self, worker_id: WorkerId) -> None:
        """A worker was set aside."""
        self._count(self._set_aside, worker=worker_id)

    def report(self, queued: int, running: int, workers_alive: int, workers_aside: int) -> None:
        """Give Ray the present levels, and what was counted since the last time."""
        self._queue.set(queued)
        self._running.set(running)
        self._workers.set(workers_alive)
        self._aside.set(workers_aside)
        counted, self._counted = self._counted, defaultdict(int)
        for (counter, tags), number in counted.items():
            counter.inc(number, tags=dict(tags))

    def _count(self, counter: Counter, number: int = 1, **tags: str) -> None:
        self._counted[counter, tuple(tags.items())] += number
