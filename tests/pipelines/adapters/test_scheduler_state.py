"""Any diffusers scheduler can be stopped, moved as tensors and JSON, and resumed with difference 0."""

from __future__ import annotations

import json
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from tridentserve.errors import HandoffError
from tridentserve.pipelines.adapters import scheduler_state

# Raised inside diffusers' own schedulers with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")

CPU = torch.device("cpu")
SCHEDULERS = {
    "flow": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "euler": diffusers.EulerDiscreteScheduler(),
    "ddim": diffusers.DDIMScheduler(),
    "dpm++2m": diffusers.DPMSolverMultistepScheduler(),
    "unipc": diffusers.UniPCMultistepScheduler(),
    "heun": diffusers.FlowMatchHeunDiscreteScheduler(),
    "pndm": diffusers.PNDMScheduler(),
}


def started(prototype: Any, num_inference_steps: int) -> Any:
    scheduler = scheduler_state.make_scheduler(prototype)
    scheduler.set_timesteps(num_inference_steps)
    return scheduler


def denoise(scheduler: Any, latents: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Some steps with a stand-in for the transformer that depends on latents and time."""
    for timestep in scheduler.timesteps[first:last]:
        scaled = scheduler.scale_model_input(latents, timestep) if hasattr(scheduler, "scale_model_input") else latents
        noise = torch.tanh(scaled) * (0.5 + timestep / 2000)
        latents = scheduler.step(noise, timestep, latents, return_dict=False)[0]
    return latents


@pytest.mark.parametrize("name", SCHEDULERS)
def test_moving_after_any_step_changes_nothing(name: str) -> None:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    reference = started(SCHEDULERS[name], 6)
    count = len(reference.timesteps)
    expected = denoise(reference, latents, 0, count)
    for stop in range(count):
        scheduler = started(SCHEDULERS[name], 6)
        halfway = denoise(scheduler, latents, 0, stop)
        tensors, values = scheduler_state.dump(scheduler)
        moved = scheduler_state.make_scheduler(SCHEDULERS[name])
        copies = {key: tensor.clone() for key, tensor in tensors.items()}
        scheduler_state.load(moved, copies, json.loads(json.dumps(values)), CPU)
        assert torch.equal(denoise(moved, halfway, stop, count), expected), f"moved after {stop} steps"


def test_a_state_that_was_not_moved_gives_another_result() -> None:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    scheduler = started(SCHEDULERS["unipc"], 6)
    halfway = denoise(scheduler, latents, 0, 3)
    expected = denoise(scheduler, halfway, 3, 6)
    assert not torch.equal(denoise(started(SCHEDULERS["unipc"], 6), halfway, 3, 6), expected)


class _Scheduler:
    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def test_every_kind_of_value_survives() -> None:
    state = {
        "nothing": None,
        "flag": True,
        "number": 3,
        "float": 0.1,
        "word": "leading",
        "array": np.arange(3, dtype=np.float64),
        "scalar": np.float32(1.5),
        "history": [None, torch.ones(2)],
        "pair": (1, [np.int64(2)]),
        "table": {"a": torch.zeros(1), "b": {"tensor": "not one"}},
    }
    tensors, values = scheduler_state.dump(_Scheduler(**state, _internal_dict={"config": "stays"}))
    assert "_internal_dict" not in values
    moved = _Scheduler()
    scheduler_state.load(moved, tensors, json.loads(json.dumps(values)), CPU)
    assert repr(vars(moved)) == repr(state)


def test_what_cannot_move_is_refused_by_name() -> None:
    with pytest.raises(HandoffError, match=r"scheduler\.noise is a Generator"):
        scheduler_state.dump(_Scheduler(noise=torch.Generator()))
