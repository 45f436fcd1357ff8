"""Requests that start from an image in a simulation: they take the steps that their strength leaves, no others."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.config.models import Limits
from deployments.models.served import ServedModel
from deployments.schemas.common.parsing import parse_as
from deployments.schemas.edit import EditRequest, build_edit_request
from dispatch import IlpDispatcher
from tests.deployments.fake_backend import make_png
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions
from tridentserve.models.families import FAMILIES
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import Stage
from tridentserve.testing import FixedTimes, find_violations, make_cluster
from tridentserve.testing.clusters import MODEL

MODELS = {MODEL: ServedModel(MODEL, FAMILIES["sd3"].with_image_start(), Limits(max_images=1))}


def ask(request_id: str, strength: float, **more: Any) -> RequestSpec:
    body = {"prompt": "make it night", "image": make_png(512, 512), "num_inference_steps": 10, **more}
    request = parse_as(EditRequest, {**body, "strength": strength, "request_id": request_id})
    return build_edit_request(request, MODELS)[0]


@pytest.mark.parametrize("kinds", [{"a": "EDC", "b": "EDC"}, {"a": "ED", "b": "D", "c": "C"}])
def test_a_simulation_computes_what_a_strength_leaves(kinds: dict[str, str]) -> None:
    asked = {
        "weak": ask("weak", 0.2),
        "strong": ask("strong", 0.75),
        "masked": ask("masked", 1.0, mask=make_png(512, 512)),
    }
    times = FixedTimes()
    options = SimulationOptions(keep_plans=True)
    workers, placement = make_cluster(kinds, 200 + options.reserve_bytes)
    scheduler = Scheduler(workers, placement, times, IlpDispatcher(times))
    engine = SimulatedEngine(scheduler, workers, placement, times, options)
    result = engine.run((float(at_s), spec) for at_s, spec in enumerate(asked.values()))
    assert [request.outcome for request in result.requests] == ["finished"] * 3
    assert list(find_violations(result, workers)) == []
    steps = {
        request.spec.request_id: sum(span.steps or 0 for span in request.timeline if span.stage is Stage.DIFFUSE)
        for request in result.requests
    }
    assert steps == {"weak": 2, "strong": 8, "masked": 10}
