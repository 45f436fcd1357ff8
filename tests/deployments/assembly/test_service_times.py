"""The shares of weights that the workers of a service keep, from its configuration."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.assembly.service_times import make_service_times
from deployments.config.app import AppArgs
from deployments.model_updates.change import find_refusals
from deployments.validation.args import check_args
from tridentserve.errors import ConfigError
from tridentserve.plans import Replica
from tridentserve.stages import Stage
from tridentserve.weights_share import WeightsShare

D = Replica("shapes", Stage.DIFFUSE)
STREAMED, HALVES = WeightsShare(streamed=True), WeightsShare(unit=2)
# The weights of D are 15.3 MiB, and activations at 64x64 little.
PLENTY_MB, LITTLE_MB = 128, 22


def make_values(memory_mb: int, workers: int = 1, weights: str = "auto", **more: Any) -> dict[str, Any]:
    limits = {"min_side": 64, "max_side": 64}
    return {
        "models": [{"name": "shapes", "shipped": "shapes", "weights": weights, "limits": limits}],
        "profiles": ["shapes-cpu"],
        "cluster": {"workers_per_node": workers, "memory_mb": memory_mb, "max_groups": 4},
        "handoff": {"capacity_mb": 1},
        "expected_load": [{"model": "shapes", "width": 64, "height": 64, "num_inference_steps": 4}],
        **more,
    }


def find_shares(*args: Any, **more: Any) -> dict[Replica, WeightsShare]:
    return make_service_times(AppArgs.model_validate(make_values(*args, **more))).shares


def test_what_does_not_fit_is_streamed() -> None:
    assert find_shares(PLENTY_MB) == {}
    assert find_shares(LITTLE_MB) == {D: STREAMED}
    assert check_args(make_values(LITTLE_MB)) == []
    (found,) = check_args(make_values(LITTLE_MB, weights="whole"))
    assert "the weights of diffuse alone are" in found or "fits on no worker" in found


def test_a_way_can_be_asked_for() -> None:
    assert find_shares(PLENTY_MB, 1, "streamed") == {D: STREAMED}
    assert find_shares(PLENTY_MB, 2, "divided") == {D: HALVES}
    assert check_args(make_values(PLENTY_MB, 2, "divided")) == []


@pytest.mark.parametrize(
    ("workers", "weights", "more", "message"),
    [
        (2, "divided", {"placement": ["EDC", "EDC"]}, "needs `placement: auto`"),
        (2, "divided", {"dispatch": {"policy": "b1"}}, "needs `placement: auto` and a policy"),
        (1, "divided", {}, "'divided' cannot be"),
        (1, "streamed", {"expected_load": [], "placement": ["EDC"]}, "needs the model in expected_load"),
    ],
)
def test_a_way_that_cannot_be_is_refused(workers: int, weights: str, more: dict[str, Any], message: str) -> None:
    found = check_args(make_values(PLENTY_MB, workers, weights, **more))
    assert any(line.startswith("args.models[0].weights") and message in line for line in found), found
    with pytest.raises(ConfigError, match="weights"):
        find_shares(PLENTY_MB, workers, weights, **more)


def test_what_workers_keep_does_not_change_while_they_run() -> None:
    now = AppArgs.model_validate(make_values(LITTLE_MB))
    assert find_refusals(now, now, {D: STREAMED}) == []
    (found,) = find_refusals(now, now, {})
    assert found.startswith("models[0]: diffuse does not fit a worker")
    other = AppArgs.model_validate(make_values(LITTLE_MB, weights="streamed"))
    (found,) = find_refusals(other, now, {D: STREAMED})
    assert found == "models[0].weights: is read at the start; restart the service"
