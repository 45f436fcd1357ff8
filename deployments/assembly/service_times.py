"""The stage times of a service, whose workers may be too small for all weights of a stage. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from deployments.assembly.expected_load import list_expected_load
from deployments.assembly.options import make_service_options
from deployments.assembly.planning import list_service_workers
from deployments.assembly.profiles import make_cost_model
from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from dispatch.policies import find_policy
from placement.shares import AllowedShares, choose_shares
from profiler import CostModel
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.models.cache import tiny_folder
from tridentserve.models.layers import read_layer_sizes
from tridentserve.models.model_folder import MODEL_INDEX, read_family
from tridentserve.models.number_formats import find_formats
from tridentserve.plans import Replica
from tridentserve.stages import Stage
from tridentserve.weights_share import WHOLE, LayerSizes, WeightsShare

# The proportions of a stage of a model that has not been fetched or made yet. Most have more layers, which are smaller.
_UNKNOWN = LayerSizes(1, (1,) * 16)


def make_service_times(args: AppArgs, workers: Sequence[WorkerSpec] | None = None) -> CostModel:
    """Stage times of all models of `args` on its device, of the shares of their weights that its workers keep. Without
    `workers`, those of `args` count. Raises `ProfileError`, beginning with the key at fault."""
    return share_service_stages(args, make_cost_model(args), workers)


def share_service_stages(args: AppArgs, times: CostModel, workers: Sequence[WorkerSpec] | None = None) -> CostModel:
    """`times` of whole stages as the times of a service, which streams the stages that a worker cannot hold, or divides
    D among several workers of a node, where the policy can plan that and the placement is not written down.

    Model folders say of which layers a stage consists. Where there is none yet, layers of one size are assumed. Raises
    `ProfileError` for an expected size that is not profiled, and `ConfigError` for `weights` that cannot be."""
    layers = {model.name: _read_layers(model, args) for model in args.models}
    allowed = {
        Replica(model.name, stage): _allow_shares(args, model, stage, layers[model.name].get(stage))
        for model in args.models
        for stage in Stage
    }
    options, load = make_service_options(args), list_expected_load(args, times)
    _check_ways(args, {kind.model for kind in load if kind.weight > 0})
    reserve_bytes = options.worker.reserve_bytes
    workers = list_service_workers(args) if workers is None else workers
    shares = choose_shares(times, load, workers, reserve_bytes, allowed)
    _check_choice(args, shares)
    if not shares:
        return times
    return times.share(shares, {replica: sizes for replica in shares if (sizes := allowed[replica].layers) is not None})


def _check_ways(args: AppArgs, expected: Collection[str]) -> None:
    """Raises `ConfigError` where a model cannot be kept as `weights` asks."""
    for index, model in enumerate(args.models):
        if model.weights in ("divided", "streamed") and model.name not in expected:
            raise ConfigError(f"models[{index}].weights: {model.weights!r} needs the model in expected_load")
        if model.weights == "divided" and not _can_divide(args):
            raise ConfigError(
                f"models[{index}].weights: 'divided' needs `placement: auto` and a policy that plans with groups of "
                "workers that hold a model together; docs/planning.md names them"
            )


def _check_choice(args: AppArgs, shares: Mapping[Replica, WeightsShare]) -> None:
    """Raises `ConfigError` where D of a model is not kept as `weights` asks, as it does not fit so."""
    for index, model in enumerate(args.models):
        share = shares.get(Replica(model.name, Stage.DIFFUSE), WHOLE)
        chosen = "streamed" if share.streamed else "whole" if share.is_whole else "divided"
        if model.weights not in ("auto", "whole", chosen):
            raise ConfigError(
                f"models[{index}].weights: {model.weights!r} cannot be: D with its activations fits no worker so, "
                "or no group of workers of a node at a degree that was profiled, at all sizes of expected_load"
            )


def _can_divide(args: AppArgs) -> bool:
    return args.placement == "auto" and find_policy(args.dispatch.policy).supports_units


def _allow_shares(args: AppArgs, model: ModelArgs, stage: Stage, layers: LayerSizes | None) -> AllowedShares:
    if layers is None:
        return AllowedShares(divided=False)
    if stage is not Stage.DIFFUSE:  # text encoders run once for a request, and one worker can do that alone
        return AllowedShares(divided=False, layers=layers)
    ways = model.weights
    return AllowedShares(
        whole=ways in ("auto", "whole"),
        divided=_can_divide(args) and ways in ("auto", "divided"),
        streamed=ways in ("auto", "streamed"),
        layers=layers,
    )


def _read_layers(model: ModelArgs, args: AppArgs) -> dict[Stage, LayerSizes]:
    folder = model.folder if model.tiny is None else tiny_folder(model.tiny, args.cache_dir)
    if folder is not None and (folder / MODEL_INDEX).is_file():
        family = read_family(folder, bool(model.limits.max_images))
        formats = find_formats(family, model.formats, args.cluster.device)
        return read_layer_sizes(folder, formats, family.starts_from_image)
    # A tiny model may consist of little but embeddings: it is whole unless something else is asked for.
    return {} if model.tiny is not None and model.weights == "auto" else dict.fromkeys(Stage, _UNKNOWN)
