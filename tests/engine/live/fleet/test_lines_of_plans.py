"""Plans sent behind others, on real stage workers: requests join a batch, and it goes on when some leave."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.live.fleet.plans import LONG, Plans, forget, pixels
from tests.support.waiting import until
from tridentserve.plans import PlanMember
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE


async def make_each_alone(plans: Plans, contents: Mapping[str, GenerationInputs]) -> dict[str, list[bytes]]:
    """The images of each request by itself."""
    alone = {}
    for name, inputs in contents.items():
        steps = (0, inputs.num_inference_steps)
        _, alone[name], _ = await plans.run(plans.plan((E, D, C), "w3", request_id=name, steps=steps), inputs)
        await forget(plans, name)
    return alone


@pytest.mark.parametrize("workers", ["w0", "w0 w1"])
async def test_a_request_joins_a_batch_without_a_round_trip(plans: Plans, workers: str) -> None:
    """The plan of both is sent behind the one that it takes over; both have the images they would have alone."""
    old, new = f"old-{workers}", f"new-{workers}"
    contents = {
        old: GenerationInputs("a boat", Shape(128, 128), LONG, 5.0, seed=1),
        new: GenerationInputs("a cow", Shape(128, 128), 3, 5.0, seed=2),
    }
    alone = await make_each_alone(plans, contents)
    stages = (E, D) if " " in workers else (E, D, C)
    first = plans.plan(stages, workers, request_id=old, steps=(0, LONG))
    running = asyncio.create_task(plans.run(first, contents))
    await until(lambda: plans.steps_told[first.plan_id] > 1)
    guess = 7  # nobody knows the step at which the first plan pauses
    members = (
        PlanMember(old, (guess, guess + 3), first.plan_id, "w0", inherited=True),
        PlanMember(new, (0, 3)),
    )
    both = replace(plans.plan((E, D), workers), members=members, takes_over=first.plan_id)
    plans.fleet.get_handle("w0").pause_plan(first.plan_id)
    together, _, _ = await plans.run(both, contents)
    report, _, _ = await running
    paused = report.paused_after
    assert paused is not None
    assert together.taken_steps == {old: (paused, paused + 3), new: (0, 3)}
    assert [(span.stage, span.steps) for span in together.spans] == [(E, None), (D, 3)]
    rest = plans.plan((D,), workers, request_id=old, steps=(paused + 3, LONG), input_id=both.plan_id, source="w0")
    await plans.run(rest, contents)
    for name, plan in ((new, both), (old, rest)):
        decode = plans.plan((C,), "w0", request_id=name, input_id=plan.plan_id, source="w0")
        _, (image,), _ = await plans.run(decode, contents)
        assert np.abs(pixels(image).astype(int) - pixels(alone[name][0]).astype(int)).max() <= 1
        await forget(plans, name)


@pytest.mark.parametrize("workers", ["w0", "w0 w1"])
async def test_a_batch_goes_on_without_a_round_trip_when_one_leaves(plans: Plans, workers: str) -> None:
    """C of the one that ends and D of the other are sent behind the plan of both."""
    short, long = f"short-{workers}", f"long-{workers}"
    contents = {
        short: GenerationInputs("a boat", Shape(128, 128), 3, 5.0, seed=1),
        long: GenerationInputs("a cow", Shape(128, 128), 8, 5.0, seed=2),
    }
    alone = await make_each_alone(plans, contents)
    both = replace(plans.plan((E, D), workers), members=(PlanMember(short, (0, 3)), PlanMember(long, (0, 3))))
    decode = replace(
        plans.plan((C,), "w0", takes_over=both.plan_id),
        members=(PlanMember(short, None, both.plan_id, "w0", inherited=True),),
    )
    rest = replace(
        plans.plan((D, C), workers, takes_over=both.plan_id),
        members=(PlanMember(long, (3, 8), both.plan_id, "w0", inherited=True),),
    )
    first, ended, others = await asyncio.gather(*(plans.run(plan, contents) for plan in (both, decode, rest)))
    assert [span.stage for span in first[0].spans] == [E, D]
    assert others[0].taken_steps == {long: (3, 8)}
    for name, (_, (image,), _) in ((short, ended), (long, others)):
        assert np.abs(pixels(image).astype(int) - pixels(alone[name][0]).astype(int)).max() <= 1
        await forget(plans, name)


@pytest.mark.parametrize("workers", ["w0", "w0 w1"])
async def test_one_joins_a_batch_whose_others_were_to_go_on(plans: Plans, workers: str) -> None:
    """The plan of both pauses before one of them has ended: there is nothing to decode, and the plan of the other does
    no step. Both go on with the third from where they are."""
    short, long, new = (f"{name}-{workers}" for name in ("nearly", "far", "third"))
    steps = {short: LONG, long: LONG + 20, new: 3}
    contents = {name: GenerationInputs("a boat", Shape(128, 128), count, 5.0, seed=1) for name, count in steps.items()}
    both = replace(plans.plan((E, D), workers), members=(PlanMember(short, (0, LONG)), PlanMember(long, (0, LONG))))
    behind = both.plan_id
    decode = replace(
        plans.plan((C,), "w0", takes_over=behind), members=(PlanMember(short, None, behind, "w0", inherited=True),)
    )
    rest = replace(
        plans.plan((D, C), workers, takes_over=behind),
        members=(PlanMember(long, (LONG, LONG + 20), behind, "w0", inherited=True),),
    )
    running = [asyncio.create_task(plans.run(plan, contents)) for plan in (both, decode, rest)]
    await until(lambda: plans.steps_told[both.plan_id] > 1)
    three = replace(
        plans.plan((E, D), workers, takes_over=rest.plan_id),
        members=(
            PlanMember(short, (7, 10), behind, "w0", inherited=True),
            PlanMember(long, (7, 10), rest.plan_id, "w0", inherited=True),
            PlanMember(new, (0, 3)),
        ),
    )
    for plan in (rest, both):
        plans.fleet.get_handle("w0").pause_plan(plan.plan_id)
    together, _, _ = await plans.run(three, contents)
    (first, *_), (ended, *_), (passed, *_) = await asyncio.gather(*running)
    paused = first.paused_after
    assert paused is not None
    assert ended.outcome == "stopped"
    assert passed.taken_steps == {long: (paused, paused)}
    assert together.taken_steps == {short: (paused, paused + 3), long: (paused, paused + 3), new: (0, 3)}
    for name in contents:
        await forget(plans, name)


async def test_a_plan_that_takes_over_nothing_is_stopped(plans: Plans) -> None:
    first = plans.plan((E, D, C), "w0", request_id="old")
    rest = replace(
        plans.plan((D,), "w0", takes_over=first.plan_id),
        members=(PlanMember("old", (1, 4), first.plan_id, "w0", inherited=True),),
    )
    _, (report, _, _) = await asyncio.gather(plans.run(first), plans.run(rest))
    assert (report.outcome, report.taken_steps) == ("stopped", {})
    await forget(plans, "old")
