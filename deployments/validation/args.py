"""Checks the `args:` of the application: all that would keep it from starting, or from ever serving what it allows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deployments.assembly.cell_args import take_cell
from deployments.assembly.expected_load import assume_load, list_unexpected
from deployments.assembly.measured_tables import find_folder
from deployments.assembly.planning import assemble_service, list_service_workers
from deployments.assembly.profiles import list_missing, list_unmeasured, make_cost_model
from deployments.assembly.service_times import share_service_stages
from deployments.config.app import AppArgs
from deployments.config.base import describe_problems
from deployments.config.live import apply_user_config
from deployments.config.models import ModelArgs
from deployments.config.planning import LoadArgs
from deployments.models.served import ServedModel, build_served_model
from profiler import CostModel
from tridentserve.byte_sizes import MIB
from tridentserve.errors import ConfigError, ModelFolderError, ProfileError
from tridentserve.models.families import FAMILIES
from tridentserve.models.kernels import Kernels
from tridentserve.models.model_folder import stage_weights_bytes
from tridentserve.models.number_formats import find_formats
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.events import Reject, RequestArrived
from tridentserve.stages import Stage

# A model folder's weights may differ by as much from those in its profile; beyond, the profile is of another model.
_WEIGHTS_FACTOR = 1.5
_FEWEST_TO_DIVIDE = 2
# How the key of a request begins that is expected though `expected_load` does not name it.
_ASSUMED = "expected_load (default of "


def check_args(args: Mapping[str, Any], key: str = "args", readable: bool = True) -> list[str]:
    """The problems of the `args:` of one application, each beginning with the path of the key. Model folders and
    profile tables are read, weights are not; without `readable` not even these, as others stand for them. Nothing is
    written or fetched: of models of the hub, those are read that are in its cache."""
    try:
        parsed = AppArgs.model_validate(args)
    except ValidationError as error:
        return describe_problems(error, key)
    except ConfigError as error:  # of the environment, which the default is made from
        return [f"{key}.cache_dir: {error}"]
    return [f"{key}.{problem}" for problem in (check_parsed_args(parsed) if readable else ())]


def check_user_config(args: Mapping[str, Any], user_config: Any, key: str) -> list[str]:
    """The problems of a `user_config` of the Scheduler and of the `args` that it leaves in force; none where the
    `args` are wrong by themselves."""
    try:
        parsed = apply_user_config(AppArgs.model_validate(args), user_config, key)
    except ValidationError:
        return []
    except ConfigError as error:
        return str(error).splitlines()
    return [f"{key}.{problem}" for problem in check_parsed_args(parsed)]


def check_parsed_args(parsed: AppArgs) -> list[str]:
    """The problems of `args` that are right in themselves, each beginning with a key of theirs. See `check_args`."""
    problems = list(_check_paths(parsed))
    weights: dict[str, Mapping[Stage, int]] = {}
    models: dict[str, ServedModel] = {}
    for index, model in enumerate(parsed.models):
        if model.is_unfetched:
            continue
        try:
            models[model.name] = build_served_model(model)
            if model.folder is not None:
                formats = find_formats(models[model.name].family, model.formats, parsed.cluster.device)
                image_start = models[model.name].family.starts_from_image
                weights[model.name] = stage_weights_bytes(model.folder, formats, image_start)
        except ModelFolderError as error:
            problems.append(f"models[{index}].path: {error}")
    try:
        measured = {model.name for model in list_missing(parsed)}
        unmeasured = {model.name for model in list_unmeasured(parsed)}
    except ProfileError as error:
        return [*problems, str(error)]
    if measured and (why := _explain_unwritable(find_folder(parsed))):
        problems.append(f"profiling.folder: {why}")
    # Requests that the configuration allows or expects; the id of each is the key that does.
    probes: list[RequestSpec] = []
    for index, model in enumerate(parsed.models):
        if model.name in models:
            served = models[model.name]
            if served.smallest.width > served.largest.width:
                problems.append(f"models[{index}].limits: {_describe_no_size(served)}")
            elif model.name not in measured:  # else the service refuses what turns out too large, one by one
                probes += _make_limit_probes(served, f"models[{index}].limits")
    is_load_known = all(model.name in models for model in list_unexpected(parsed))
    probes += _make_load_probes(parsed, assume_load(parsed) if is_load_known else ())
    problems += _check_frames(parsed, models)
    problems += _check_packing(parsed, models)
    problems += _check_divided(parsed)
    if unmeasured:  # nothing can be planned before the start has measured them
        return problems
    try:
        times = make_cost_model(parsed)
    except ProfileError as error:
        problems.append(str(error))
    else:
        problems += _check_weights(parsed.models, weights, times)
        problems += _check_coverage(probes, times)
        if not problems and is_load_known:
            problems += _check_planning(parsed, times, probes)
    return problems


def list_unplanned(args: AppArgs) -> Iterator[str]:
    """A line for each model that can be read here, but not planned with, as the service measures it at its start."""
    unmeasured = {model.name for model in list_unmeasured(args)}
    for index, model in enumerate(args.models):
        if model.name in unmeasured and not model.is_unfetched:
            yield (
                f"models[{index}]: {model.name} has no profile for the device ({args.cluster.device_name}) and is "
                "measured at the first start; before, nobody knows whether it fits (cluster.memory_mb: "
                f"{args.cluster.memory_mb}, weights: {model.weights})"
            )


def _check_paths(args: AppArgs) -> Iterator[str]:
    """Folders that are made at the start."""
    if any(model.tiny is not None for model in args.models) and (why := _explain_unwritable(args.cache_dir)):
        yield f"cache_dir: {why}"
    if args.replicas.host_dir is not None and (why := _explain_unwritable(args.replicas.host_dir)):
        yield f"replicas.host_dir: {why}"
    for key, file in (("decision_log", args.decision_log), ("loras_file", args.loras_file)):
        if file is None:
            continue
        if why := _explain_unwritable(file.parent):
            yield f"{key}: {why}"
        elif file.is_dir():
            yield f"{key}: is a directory; name a file in it"


def _explain_unwritable(folder: Path) -> str | None:
    """The reason why `folder` cannot be made, or written to."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror})"
    if not existing.is_dir():
        return f"{existing} is a file, it should be a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written to"
    return None


def _describe_no_size(model: ServedModel) -> str:
    limits, family = model.limits, model.family
    return (
        f"no size is left: sides are multiples of {family.size_multiple} ({family.name}) from {limits.min_side} to "
        f"{limits.max_side}, with at most {model.get_max_pixels()} pixels"
    )


def _make_limit_probes(model: ServedModel, key: str) -> Iterator[RequestSpec]:
    upper = "max_pixels" if model.limits.max_pixels < model.limits.max_side**2 else "max_side"
    if model.makes_videos:
        upper = "max_frames"
    for name, shape in (("min_side", model.smallest), (upper, model.longest)):
        yield RequestSpec(f"{key}.{name}", model.name, shape, model.default_steps)


def _make_load_probes(args: AppArgs, assumed: Sequence[LoadArgs]) -> Iterator[RequestSpec]:
    keys = [f"expected_load[{index}]" for index in range(len(args.expected_load))]
    keys += [f"{_ASSUMED}{load.model})" for load in assumed]
    for key, load in zip(keys, (*args.expected_load, *assumed), strict=True):
        yield RequestSpec(key, load.model, load.shape, load.num_inference_steps)


def _check_frames(args: AppArgs, models: Mapping[str, ServedModel]) -> Iterator[str]:
    for index, load in enumerate(args.expected_load):
        model = models.get(load.model)
        if model is not None and not model.family.allows_frames(load.num_frames):
            rule = f"1 plus a multiple of {model.family.frame_multiple}" if model.makes_videos else "1"
            yield f"expected_load[{index}].num_frames: must be {rule} ({model.family.name})"


def _check_divided(args: AppArgs) -> Iterator[str]:
    for index, model in enumerate(args.models):
        if model.weights == "divided" and args.cluster.workers_per_node < _FEWEST_TO_DIVIDE:
            yield (
                f"models[{index}].weights: 'divided' cannot be with cluster.workers_per_node: "
                f"{args.cluster.workers_per_node}, as the workers of a node divide them; use `streamed` or `auto`"
            )


def _check_packing(args: AppArgs, models: Mapping[str, ServedModel]) -> Iterator[str]:
    kernels = {model.name: Kernels(attention=model.attention, compiled=model.compile) for model in args.models}
    for name in args.dispatch.pack_sizes:
        if name in models and not models[name].family.packs_sizes:
            packing = ", ".join(family.name for family in FAMILIES.values() if family.packs_sizes)
            yield f"dispatch.pack_sizes: {name} is of the family {models[name].family.name}; those of {packing} pack"
        elif kernels[name] != Kernels():
            yield f"dispatch.pack_sizes: {name} has {kernels[name]}; only the default kernels pack"
    for name in args.dispatch.ring_sizes:
        if name not in args.dispatch.pack_sizes:
            yield f"dispatch.ring_sizes: {name} is not in dispatch.pack_sizes"
        elif name in models and not models[name].family.shares_tokens:
            family = models[name].family.name
            yield f"dispatch.ring_sizes: {name} is of the family {family}, whose tokens no workers can share"


def _check_weights(
    models: Sequence[ModelArgs], weights: Mapping[str, Mapping[Stage, int]], times: CostModel
) -> Iterator[str]:
    """Memory is planned by the profile: of a model with much larger weights it would be planned wrongly."""
    for index, model in enumerate(models):
        for stage, found_bytes in weights.get(model.name, {}).items():
            profiled_bytes = times.weights_bytes(model.name, stage)
            if max(found_bytes, profiled_bytes) > _WEIGHTS_FACTOR * min(found_bytes, profiled_bytes):
                key = "name" if model.profile_as is None else "profile_as"
                yield (
                    f"models[{index}].{key}: the weights of {stage} are {found_bytes / MIB:.1f} MiB when loaded, in "
                    f"its profile {profiled_bytes / MIB:.1f} MiB; it is of another model "
                    "or of other number formats: profile this one, or set the `dtype` that was profiled"
                )
                break


def _check_coverage(probes: Sequence[RequestSpec], times: CostModel) -> Iterator[str]:
    """Sizes without a profile: their requests could never be planned."""
    for probe in probes:
        try:
            # Large sizes need not be profiled at degree 1; E and C run at no other.
            times.optimal_degree(probe.model, Stage.DIFFUSE, probe.shape)
            for stage in (Stage.ENCODE, Stage.DECODE):
                times.seconds(probe.model, stage, probe.shape)
        except ProfileError as error:
            _, is_limit, limit = probe.request_id.partition(".limits.")
            way_out = f", or {'raise' if limit == 'min_side' else 'narrow'} limits.{limit}" if is_limit else ""
            if probe.request_id.startswith(_ASSUMED):
                way_out = "; list a size that is profiled in expected_load"
            yield f"{probe.request_id}: {error}{way_out}"


def _check_planning(args: AppArgs, times: CostModel, probes: Sequence[RequestSpec]) -> Iterator[str]:
    """Problems of the placement, and of the requests that the scheduler of an idle service would refuse."""
    for number in range(args.scheduler.cells):
        cell, where = take_cell(args, number), f" (cell {number})" if args.scheduler.cells > 1 else ""
        try:
            shared = share_service_stages(cell, times)
            scheduler = assemble_service(cell, shared, list_service_workers(cell)).scheduler
        except ConfigError as error:
            yield f"{error}{where}"
            continue
        names = {model.name for model in cell.models}
        for probe in (probe for probe in probes if probe.model in names):
            for effect in scheduler.on(RequestArrived(probe), now_s=0.0):
                if isinstance(effect, Reject):
                    yield f"{probe.request_id}: {effect.reason}{where}"
