"""A change from one set of models to the next, as pure functions: why it is refused, and where models are placed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from deployments.assembly.expected_load import assume_load
from deployments.assembly.planning import make_placement
from deployments.assembly.profiles import find_profile, list_unmeasured
from deployments.assembly.service_times import make_service_times
from deployments.config.app import AppArgs
from deployments.config.base import describe_problems
from deployments.config.models import ModelArgs
from deployments.config.planning import LoadArgs
from deployments.models.served import ServedModel, build_served_model
from deployments.models.sources import starts_from_image
from deployments.validation.args import check_parsed_args
from dispatch.policies import find_policy
from placement import align
from profiler import CostModel
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.scheduling.events import ModelAdded
from tridentserve.stages import Stage
from tridentserve.weights_share import WeightsShare

ModelState = Literal["loading", "warming", "serving", "draining", "removing"]


@dataclass(slots=True)
class KnownModel:
    """A model of the running service."""

    served: ServedModel
    model: ModelArgs
    load: tuple[LoadArgs, ...]
    """The load that is expected of the model."""
    state: ModelState
    profile: str
    """Its name in the profile tables."""
    closed_s: float = 0.0
    """Seconds of the monotonic clock at which the model began to drain."""

    @property
    def is_open(self) -> bool:
        """True while it takes requests."""
        return self.state in ("warming", "serving")

    def is_replaced_by(self, other: ModelArgs) -> bool:
        """True if `other` has other weights under the same name, or computes in another way."""
        return _describe_computing(self.model) != _describe_computing(other)

    def make_added_event(self, placement: PlacementPlan | None) -> ModelAdded:
        """The event that adds the model to the scheduler, with the placement if it changes."""
        expected = tuple(LoadShare(load.model, load.shape, load.num_inference_steps, load.weight) for load in self.load)
        model = self.model
        return ModelAdded(model.name, self.profile, model.slo_scale, placement, expected, model.window_s)


def build_known_model(args: AppArgs, model: ModelArgs, state: ModelState) -> KnownModel:
    """Raises `ModelFolderError` and `ProfileError`."""
    load = tuple(load for load in (*args.expected_load, *assume_load(args)) if load.model == model.name)
    return KnownModel(build_served_model(model), model, load, state, find_profile(model, args))


def find_refusals(args: AppArgs, now: AppArgs, shares: Mapping[Replica, WeightsShare]) -> list[str]:
    """The reasons why a running service, whose workers keep these shares of weights, cannot change to the models of
    `args`; none when it can."""
    policy = args.dispatch.policy
    if find_policy(policy).one_load and args != now:
        return [f"dispatch.policy: {policy} is made for the models and the load of the start; restart the service"]
    return (
        check_parsed_args(args)
        or [
            f"models: no profile has rows of {model.name}, and a service measures models at its start only: restart "
            "it, or profile the model with scripts/profile_model.py and name its table in profiles"
            for model in list_unmeasured(args)
        ]
        or list(_find_other_image_starts(args, now))
        or list(_find_other_shares(args, now, shares))
    )


def _find_other_image_starts(args: AppArgs, now: AppArgs) -> Iterator[str]:
    """The models whose workers would have to hold another E under the same name."""
    before = {model.name: starts_from_image(model) for model in now.models}
    for index, model in enumerate(args.models):
        starts = starts_from_image(model)
        if before.get(model.name, starts) != starts:
            yield (
                f"models[{index}].limits.max_images: E of {model.name} holds its VAE or not since the start; give the "
                "model another name, or restart the service"
            )


def _find_other_shares(args: AppArgs, now: AppArgs, shares: Mapping[Replica, WeightsShare]) -> Iterator[str]:
    """The models whose workers would have to keep another part of their weights: that is decided at the start."""
    ways = {model.name: model.weights for model in now.models}
    wanted = make_service_times(args).shares
    for index, model in enumerate(args.models):
        if ways.get(model.name, model.weights) != model.weights:
            yield f"models[{index}].weights: is read at the start; restart the service"
            continue
        for stage in Stage:
            replica = Replica(model.name, stage)
            if replica in wanted and shares.get(replica) != wanted[replica]:
                yield (
                    f"models[{index}]: {stage} does not fit a worker, and which part of its weights workers keep is "
                    "decided at the start; restart the service"
                )


def plan_interim_placement(
    args: AppArgs,
    leaving: Collection[KnownModel],
    times: CostModel,
    specs: Sequence[WorkerSpec],
    current: PlacementPlan,
) -> PlacementPlan:
    """A placement for the models of `args` and those that are leaving, which still have requests. Unless the
    configuration fixes the placement, stages go to the workers that hold most of them already.

    Raises `ConfigError` when they have no room together."""
    if leaving:
        args = _add_leaving(args, leaving)
    plan = make_placement(args, times, specs)
    if args.placement == "auto":
        plan = align(plan, current, specs, times)
    return PlacementPlan(plan.replicas, f"the models have changed; {plan.reason}", current.epoch + 1)


def _add_leaving(args: AppArgs, leaving: Collection[KnownModel]) -> AppArgs:
    together: Mapping[str, object] = {
        **args.model_dump(exclude_unset=True),
        "models": [*args.models, *(known.model for known in leaving)],
        "expected_load": [*args.expected_load, *(load for known in leaving for load in known.load)],
    }
    try:
        return AppArgs.model_validate(together)
    except ValidationError as error:
        raise ConfigError("; ".join(describe_problems(error, ""))) from None


def _describe_computing(model: ModelArgs) -> tuple[object, ...]:
    """The settings on which results depend."""
    kernels = model.attention, model.compile
    caches = model.step_cache_high, model.step_cache_fast, model.step_cache_max_bytes
    return model.folder, model.tiny, model.formats, *kernels, *caches
