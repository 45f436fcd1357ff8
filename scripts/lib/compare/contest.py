"""Services of one machine, one policy after another, that serve the same traces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployments.assembly.planning import list_service_workers
from deployments.config.app import AppArgs
from deployments.config.planning import LoadArgs
from lib.compare.calibration import Calibration, calibrate
from lib.compare.samples import StagePoint
from lib.compare.warm_up import WarmUpClient
from lib.compare.workload import limit_to_cores, make_traces
from lib.local_service import deploy, run_local_serve
from traces.client.replay import replay
from traces.requests import TraceRequest
from traces.results import ReplayResult
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# Evenly spaced requests tell policies apart least.
_TRACES = ("poisson", "bursty")


@dataclass(frozen=True, slots=True)
class ContestLoad:
    """The load of a contest."""

    sides: Sequence[int]
    """The sides of its images in pixels."""
    steps: int
    """Denoising steps of every request."""
    requests: int
    """The number of requests of each trace."""
    load: float
    """Share of what the workers can do."""
    slo_scale: float
    """Deadline over the time that a request takes alone on one worker."""
    rounds: int
    """Warm-up requests of each size."""


@dataclass(frozen=True, slots=True)
class ContestRun:
    """One policy that served one trace once."""

    policy: str
    trace: str
    repetition: int
    on_time: float
    """Share of the requests that met their deadlines."""
    latencies_s: tuple[float, ...]
    """Those of the requests that were served, as the client saw them."""
    failed: int
    """The number of requests that failed."""


class Contest:
    """Starts services and replays traces. A first service, of plans on one worker, says what each size takes; where
    there is only one worker, that of the first policy does, as it has no other plans."""

    def __init__(self, args: AppArgs, options: ContestLoad, seed: int, serve_url: str | None = None) -> None:
        """`args`: the service; its placement is left to each policy. `serve_url`: as in `run_local_serve`."""
        self._model = args.models[0].name
        load = [
            LoadArgs(model=self._model, width=side, height=side, num_inference_steps=options.steps)
            for side in options.sides
        ]
        others = [entry for entry in args.expected_load if entry.model != self._model]
        self._args = limit_to_cores(args.model_copy(update={"placement": "auto", "expected_load": [*load, *others]}))
        self._options = options
        self._seed = seed
        self._serve_url = serve_url
        self._traces: dict[str, list[TraceRequest]] = {}

    def hold(self, policies: Sequence[str], repetitions: int, report: Callable[[str], None]) -> list[ContestRun]:
        """All runs. `report` is called with a line after each. Raises `ConfigError` where a service cannot be started
        or a warm-up failed."""
        runs = []
        with run_local_serve(self._serve_url) as url:
            if len(list_service_workers(self._args)) > 1:
                with deploy(self._set_dispatch(max_degree=1)):
                    self._traces = self._make_traces(self._warm_up(url))
            for repetition in range(repetitions):
                turn = repetition % len(policies)
                for policy in (*policies[turn:], *policies[:turn]):
                    for run in self._serve(url, policy, repetition):
                        report(f"{run.policy} {run.trace} {run.repetition}: {run.on_time:.3f} on time")
                        runs.append(run)
        return runs

    def count_requests(self) -> int:
        """The number of requests that one policy gets in one repetition."""
        return sum(len(requests) for requests in self._traces.values())

    def _serve(self, url: str, policy: str, repetition: int) -> list[ContestRun]:
        runs = []
        with deploy(self._set_dispatch(policy=policy)):
            calibration = self._warm_up(url)
            if not self._traces:
                self._traces = self._make_traces(calibration)
            for name, requests in self._traces.items():
                results = asyncio.run(replay(requests, url))
                runs.append(_judge(policy, name, repetition, results))
        return runs

    def _set_dispatch(self, **changed: Any) -> AppArgs:
        dispatch = self._args.dispatch.model_copy(update=changed)
        return self._args.model_copy(update={"dispatch": dispatch})

    def _warm_up(self, url: str) -> Calibration:
        """Every service is warmed up alike, so that none pays for what happens once."""
        o = self._options
        client = WarmUpClient(url, self._model, o.sides, o.steps, o.rounds, on_done=lambda: None)
        num_workers = len(list_service_workers(self._args))
        return calibrate([asyncio.run(client.run(num_workers, lambda _: {}))], num_workers)

    def _make_traces(self, calibration: Calibration) -> dict[str, list[TraceRequest]]:
        o, workers = self._options, list_service_workers(self._args)
        most = min(len(workers), workers[0].max_denoising or len(workers))
        traces = make_traces(self._model, o.sides, o.steps, o.requests, o.load, most, calibration, self._seed)
        return {name: [self._set_deadline(request, calibration) for request in traces[name]] for name in _TRACES}

    def _set_deadline(self, request: TraceRequest, calibration: Calibration) -> TraceRequest:
        shape = Shape(request.height, request.width)
        calls = {Stage.ENCODE: 1, Stage.DIFFUSE: self._options.steps, Stage.DECODE: 1}
        alone_s = calibration.http_s[shape] + sum(
            count * calibration.stage_s[StagePoint(self._model, stage, shape, 1)] for stage, count in calls.items()
        )
        return replace(request, slo_ms=round(1000 * self._options.slo_scale * alone_s, 1))


def _judge(policy: str, trace: str, repetition: int, results: Sequence[ReplayResult]) -> ContestRun:
    served = [result for result in results if result.error is None]
    return ContestRun(
        policy,
        trace,
        repetition,
        on_time=sum(result.slo_met is True for result in results) / len(results),
        latencies_s=tuple(result.latency_s for result in served),
        failed=len(results) - len(served),
    )
