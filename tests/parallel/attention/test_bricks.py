"""Requests of different sizes share the steps of several workers, each on a ring of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.members import Member, Pool
from tests.pipelines.models import families, family_of, load_stage, make_inputs, start
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.denoising import Denoising, StepControl
from tridentserve.packing.rings import plan_rings
from tridentserve.parallel import sequence_parallel
from tridentserve.pipelines import DenoisingState
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Model = Callable[[str], Path]


def unlike(variant: str) -> list[GenerationInputs]:
    """A long request, a short one with two outputs, and one of a single frame without guidance."""
    frames = {"num_frames": 1} if family_of(variant).frame_multiple else {}
    return [
        make_inputs(128, 96, steps=3, seed=1, guidance_scale=3.0, variant=variant),
        make_inputs(32, 64, steps=3, seed=2, guidance_scale=5.0, num_outputs=2, negative_prompt="", variant=variant),
        make_inputs(64, 64, steps=3, seed=3, guidance_scale=1.0, prompt="a desert", variant=variant, **frames),
    ]


def advance_together(member: Member, folder: Path, states: Sequence[DenoisingState]) -> list[DenoisingState]:
    adapter = member.adapter(folder)
    with sequence_parallel(member.group("bricks")):
        assert len({adapter.pack_key(state) for state in states}) == 1
        return adapter.advance(states, 3)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", families("sd3", "sd3-medium", "flux", "flux-schnell", "wan", "wan-2.2-ti2v"))
def test_each_request_gets_what_it_gets_on_one_worker(pool: Pool, model: Model, variant: str, size: int) -> None:
    folder = model(variant)
    diffuse = load_stage(folder, Stage.DIFFUSE)
    states = [start(folder, inputs) for inputs in unlike(variant)]
    alone = [diffuse.step(state, 3).tensors["latents"] for state in states]
    for ended in pool.run(advance_together, size, folder, states):
        for one, other in zip(ended, alone, strict=True):
            assert one.tensors["latents"].shape == other.shape
            assert (one.tensors["latents"] - other).abs().max() <= 1e-4


def test_a_request_of_fewer_tokens_than_workers_has_one_of_them(pool: Pool, model: Model) -> None:
    folder = model("sd3")
    diffuse = load_stage(folder, Stage.DIFFUSE)
    inputs = [make_inputs(128, 96, steps=3, seed=1), make_inputs(16, 16, steps=3, seed=2)]
    states = [start(folder, content) for content in inputs]
    alone = [diffuse.step(state, 3).tensors["latents"] for state in states]
    for ended in pool.run(advance_together, 4, folder, states):
        for one, other in zip(ended, alone, strict=True):
            assert (one.tensors["latents"] - other).abs().max() <= 1e-4


def run_plan(member: Member, folder: Path, inputs: dict[str, GenerationInputs], given: dict[str, Parcel]) -> Any:
    """D of a plan, as a worker runs it."""
    members = tuple(PlanMember(name, (0, 3)) for name in inputs)
    plan = DispatchPlan(1, "m", (Stage.DIFFUSE,), tuple(f"w{rank}" for rank in range(member.size)), members)
    denoising = Denoising(plan, member.adapter(folder), member.group("bricks"), StepControl())
    denoising.share_states(inputs, given)
    denoising.run_steps([])
    return denoising.collect_outputs()


def test_a_plan_of_several_workers_packs_requests_of_several_sizes(pool: Pool, model: Model) -> None:
    folder = model("sd3")
    adapter = load_stage(folder, Stage.ENCODE)
    inputs = {f"r{index}": content for index, content in enumerate(unlike("sd3"))}
    given = {name: Parcel(adapter.encode(content)) for name, content in inputs.items()}
    together = pool.run(run_plan, 2, folder, inputs, given)
    for name, content in inputs.items():
        (alone,) = pool.run(run_plan, 1, folder, {name: content}, given)
        for outputs in together:
            assert (outputs[name].tensors["latents"] - alone[name].tensors["latents"]).abs().max() <= 1e-4


costs = st.lists(st.floats(1, 1000), min_size=1, max_size=12)
sizes = st.sampled_from([1, 2, 4, 8, 16])


@given(costs=costs, size=sizes)
def test_rings_are_aligned_and_leave_no_worker_idle(costs: list[float], size: int) -> None:
    rings = plan_rings(costs, size)
    assert len(rings) == len(costs)
    assert all(math.log2(len(ring)).is_integer() and ring.start % len(ring) == 0 for ring in rings)
    assert {worker for ring in rings for worker in ring} == set(range(size))


@given(costs=costs, size=sizes)
def test_no_worker_has_much_more_than_its_share(costs: list[float], size: int) -> None:
    """A worker has at most what fits, and the last request that did not: that of one ring."""
    rings = plan_rings(costs, size)
    loads = [
        sum(cost / len(ring) for cost, ring in zip(costs, rings, strict=True) if worker in ring)
        for worker in range(size)
    ]
    share = sum(costs) / size
    assert max(loads) <= 2.5 * share + 1e-6


def test_a_short_request_stays_on_one_worker_beside_a_long_one() -> None:
    assert plan_rings([100, 10, 10, 10], 4) == [range(4), range(1), range(1, 2), range(2, 3)]
    assert plan_rings([40, 20, 10, 10], 4) == [range(2), range(2, 3), range(3, 4), range(3, 4)]
    assert plan_rings([5], 8) == [range(8)]
