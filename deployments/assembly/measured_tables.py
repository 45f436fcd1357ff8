"""The profile tables that a service measures itself: which models need one, and where it lies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from profiler import ProfileTable, read_table
from tridentserve.models.model_folder import read_family

# Limits on which the sizes to measure depend.
_SIZE_LIMITS = {"min_side", "max_side", "max_pixels", "max_frames", "max_pixel_frames"}
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def may_measure(model: ModelArgs, args: AppArgs) -> bool:
    """True where a model that no table of `profiles` has rows of is measured at the start, as far as the
    configuration decides it. The cells of a service would each measure at the same time, and the replicas of Api need
    the profile of all models before."""
    return args.profiling.budget_s > 0 and model.profile_as is None and args.scheduler.cells == 1


def name_measured_table(model: ModelArgs, args: AppArgs) -> Path:
    """The file of the table of a model. Its name changes with all that the rows depend on."""
    cluster = args.cluster
    settings = [
        str(model.folder or model.tiny),
        *(asdict(model.formats), model.attention, model.compile, _is_guided(model)),
        *(cluster.device, cluster.device_name, list_measured_degrees(args)),
        None if cluster.has_gpus else cluster.cpu_threads,
        model.limits.model_dump(include=_SIZE_LIMITS),
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return find_folder(args) / f"{_UNSAFE.sub('-', f'{model.name}-{cluster.device_name}')}-{digest}.csv"


def _is_guided(model: ModelArgs) -> bool:
    """True where requests of the model are guided unless they say otherwise, which takes a second pass in each step."""
    scale = model.defaults.guidance_scale
    if scale is None or model.folder is None:
        return scale is None or scale > 0
    return scale > read_family(model.folder).unguided_scale


def find_folder(args: AppArgs) -> Path:
    """The directory of the tables."""
    return args.profiling.folder or args.cache_dir / "profiles"


def list_measured_degrees(args: AppArgs) -> tuple[int, ...]:
    """The degrees at which D is measured. A process has one GPU, so that a group of GPUs is not measured here."""
    widest = args.dispatch.max_degree or args.cluster.workers_per_node
    return (1, 2) if widest > 1 and not args.cluster.has_gpus else (1,)


def read_measured_tables(models: Sequence[ModelArgs], args: AppArgs) -> list[ProfileTable]:
    """The tables of those of the models that have been measured. Raises `ProfileError` for a file that is damaged."""
    paths = [name_measured_table(model, args) for model in models]
    return [read_table(path) for path in paths if path.exists()]
