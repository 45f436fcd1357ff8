"""The options of a service, as each package holds them: those of its configuration, else those that ship."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deployments.config.app import AppArgs
from deployments.config.base import collect_values
from dispatch import DispatchOptions
from dispatch.options import DEFAULT_POLICY
from dispatch.policies import find_policy
from placement import ReplanOptions
from tridentserve.engine.options import (
    EngineOptions,
    TorchDevice,
    WorkerOptions,
    choose_compile_dir,
    choose_host_dir,
)
from tridentserve.engine.simulated.options import SimulationOptions
from tridentserve.scheduling.estimation.expected_times import DEFAULT_SLO_SCALE
from tridentserve.scheduling.scheduler import SchedulerOptions

# Options of a simulation that change its results. Seed and trace stand in other columns; tick, handoff buffer and
# groups are the service's.
_OF_SIMULATIONS = (
    "solve_time",
    "jitter",
    "retry_s",
    "plan_overhead_s",
    "report_overhead_s",
    "image_s_per_pixel",
    "slowdown",
    "wide_slowdown",
    "group_setup_s",
    "max_idle_s",
    "decodes_in_tiles",
)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """All options that a scheduler and its workers are made with. Each default is that of the package that holds it, so
    that a simulation without options of its own has those of a service without any."""

    policy: str = DEFAULT_POLICY
    dispatch: DispatchOptions = field(default_factory=DispatchOptions)
    """Without `handoff_reserve_bytes`, which the assembly takes from `worker`."""
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    """Without `decode_order`, which is the policy's."""
    replan: ReplanOptions = field(default_factory=ReplanOptions)
    replans: bool | None = None
    """True when the placement follows the load; None: where it is planned, under policies that want that."""
    windows_s: Mapping[str, float] = field(default_factory=dict)
    """The models whose replanning window is not `replan.window_s`."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)


def make_service_options(args: AppArgs) -> ServiceOptions:
    """The options of the service that a configuration describes."""
    worker = WorkerOptions(
        **collect_values(WorkerOptions, args.cluster, args.handoff, args.replicas),
        host_dir=args.replicas.host_dir or choose_host_dir(args.cache_dir),
        compile_dir=choose_compile_dir(args.cache_dir),
    )
    return ServiceOptions(
        policy=args.dispatch.policy,
        dispatch=DispatchOptions(**collect_values(DispatchOptions, args.dispatch)),
        scheduler=SchedulerOptions(
            **collect_values(SchedulerOptions, args, args.checkpoints, args.faults, args.scheduler),
            slo_scale={model.name: model.slo_scale for model in args.models},
        ),
        replan=args.replan.make_options(),
        replans=args.replan.enabled,
        windows_s={model.name: model.window_s for model in args.models if model.window_s is not None},
        engine=EngineOptions(**collect_values(EngineOptions, args, args.dispatch, args.scheduler)),
        worker=worker,
    )


def choose_device(gpu: str) -> TorchDevice:
    """The kind of a device that is named as in the profile tables."""
    return "cpu" if gpu == "cpu" else "cuda"


def describe_options(options: ServiceOptions, simulation: SimulationOptions | None = None) -> dict[str, Any]:
    """The options of a service in addition to its policy, and those of its simulation: JSON-able values by dotted
    names, such as `dispatch.max_batch`, with what the policy makes of values that are left out. They are written next
    to its results. `scheduler.slo_scale` is the default, and those of the models that have another one."""
    dispatch = find_policy(options.policy).resolve(options.dispatch)
    scales = {name: scale for name, scale in options.scheduler.slo_scale.items() if scale != DEFAULT_SLO_SCALE}
    kept: dict[str, Any] = {
        "dispatch": _leave_out(asdict(dispatch), "handoff_reserve_bytes"),
        "scheduler": {**asdict(options.scheduler), "slo_scale": {"default": DEFAULT_SLO_SCALE, **scales}},
        "replan": {**asdict(options.replan), "enabled": options.replans},
        "engine": {"tick_s": options.engine.tick_s},
        "worker": {name: getattr(options.worker, name) for name in ("handoff_bytes", "max_groups", "group_bytes")},
    }
    if simulation is not None:
        kept["simulation"] = {name: getattr(simulation, name) for name in _OF_SIMULATIONS}
    return dict(_flatten(kept))


def format_options(options: ServiceOptions) -> str:
    """One line that says whether a service has the shipped options, and names those that differ."""
    shipped = describe_options(
        ServiceOptions(policy=options.policy, worker=WorkerOptions(torch_device=options.worker.torch_device))
    )
    changed = [f"{name} {value}" for name, value in describe_options(options).items() if value != shipped.get(name)]
    return f"options: as shipped (docs/configuration.md){', but ' if changed else ''}{', '.join(changed)}"


def _leave_out(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value
