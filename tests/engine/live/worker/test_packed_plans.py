"""Members of a plan whose denoising steps differ in size or guidance share them as one packed sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.pipelines.models import load_stage, make_inputs
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.denoising import Denoising, StepControl
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.stages import Stage


@pytest.mark.parametrize("sizes", [((64, 64), (64, 64)), ((64, 96), (32, 32))])
def test_members_without_and_with_guidance_are_denoised_in_one_call(
    tiny_cache: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[tuple[int, int], ...]
) -> None:
    folder = ensure_tiny("sd3", tiny_cache)
    encode, diffuse = load_stage(folder, Stage.ENCODE), load_stage(folder, Stage.DIFFUSE)
    inputs = {
        str(scale): make_inputs(*size, steps=2, guidance_scale=scale)
        for size, scale in zip(sizes, (1.0, 5.0), strict=True)
    }
    conditions = {name: encode.encode(each) for name, each in inputs.items()}
    alone = {
        name: diffuse.step(diffuse.prepare(conditions[name], each), 2).tensors["latents"]
        for name, each in inputs.items()
    }
    members = tuple(PlanMember(name, (0, 2)) for name in inputs)
    plan = DispatchPlan(1, "tiny-sd3", (Stage.DIFFUSE,), ("w",), members)
    calls: list[int] = []
    stock: Callable[..., object] = diffuse.advance
    monkeypatch.setattr(diffuse, "advance", lambda states, n=1: (calls.append(len(states)), stock(states, n))[1])

    denoising = Denoising(plan, diffuse, None, StepControl())
    denoising.share_states(inputs, {name: Parcel(each) for name, each in conditions.items()})
    denoising.run_steps([])

    assert calls == [2, 2]
    for name, output in denoising.collect_outputs().items():
        assert torch.allclose(output.tensors["latents"], alone[name], atol=1e-4)
