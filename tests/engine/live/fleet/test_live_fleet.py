"""Plans on real stage workers (Ray actors, gloo, NIXL): the image is the stock pipeline's wherever stages run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.live.fleet.plans import HANDOFF_BYTES, INPUTS, LONG, WORKERS, Plans, forget, pixels
from tests.pipelines.models import make_inputs, stock_result
from tests.support.waiting import until
from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.messages import PreviewNote, WorkerConfig
from tridentserve.engine.live.plan_calls import PeakEstimator
from tridentserve.engine.live.transport.parcel import ParcelLayout
from tridentserve.engine.live.warming.warm_up_runs import WarmUpOrder
from tridentserve.engine.live.warming.warmer import Warmer, WarmUpProgress
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import PlanMember, Replica, WorkerId
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.estimation.hot_groups import HotGroup
from tridentserve.stages import Stage

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE


@pytest.fixture(scope="module")
def stock(tiny_cache: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The images that the stock pipelines make of the same inputs, in this process."""
    import diffusers

    torch.set_num_threads(1)
    images = {}
    for name, kind in (("sd3", diffusers.StableDiffusion3Pipeline), ("flux", diffusers.FluxPipeline)):
        pipeline = kind.from_pretrained(ensure_tiny(name, tiny_cache), local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        result = pipeline(
            prompt=INPUTS.prompt,
            negative_prompt=INPUTS.negative_prompt,
            height=INPUTS.shape.height,
            width=INPUTS.shape.width,
            num_inference_steps=INPUTS.num_inference_steps,
            guidance_scale=INPUTS.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(INPUTS.seed),
        )
        images[name] = np.asarray(result.images[0])
    return images


@pytest.mark.parametrize("model", ["sd3", "flux"])
async def test_all_stages_on_one_worker(plans: Plans, stock: dict[str, Any], model: str) -> None:
    report, (image,), notes = await plans.run(plans.plan((E, D, C), "w0", model))
    assert np.array_equal(pixels(image), stock[model])
    assert notes == INPUTS.num_inference_steps
    assert [span.stage for span in report.spans] == [E, D, C]
    assert report.peak_memory_bytes > 0


@pytest.mark.parametrize("model", ["sd3", "flux"])
@pytest.mark.parametrize("diffuse", ["w1", "w1 w2", "w2 w3 w0 w1"])
async def test_stages_apart(plans: Plans, stock: dict[str, Any], model: str, diffuse: str) -> None:
    leader = diffuse.split()[0]
    encode = plans.plan((E,), "w0", model, push_to=leader)
    denoise = plans.plan((D,), diffuse, model, input_id=encode.plan_id, source="w0", push_to="w3")
    decode = plans.plan((C,), "w3", model, input_id=denoise.plan_id, source=leader)
    for plan in (encode, denoise):
        _, images, _ = await plans.run(plan)
        assert not images
    _, (image,), _ = await plans.run(decode)
    exact = len(denoise.workers) == 1
    difference = np.abs(pixels(image).astype(int) - stock[model].astype(int)).max()
    assert difference <= (0 if exact else 1)
    await forget(plans)


async def test_an_edit_whose_image_only_encode_is_given(plans: Plans, tiny_cache: Path) -> None:
    inputs = replace(INPUTS, image=make_inputs(variant="flux_kontext").image)
    without = replace(inputs, image=None)
    encode = plans.plan((E,), "w0", "flux_kontext", push_to="w1")
    denoise = plans.plan((D,), "w1 w2", "flux_kontext", input_id=encode.plan_id, source="w0", push_to="w3")
    decode = plans.plan((C,), "w3", "flux_kontext", input_id=denoise.plan_id, source="w1")
    await plans.run(encode, inputs)
    await plans.run(denoise, without)
    _, (made,), _ = await plans.run(decode, without)
    expected = np.asarray(stock_result(ensure_tiny("flux_kontext", tiny_cache), inputs, "pil")[0])
    assert np.abs(pixels(made).astype(int) - expected.astype(int)).max() <= 1
    await forget(plans)


@pytest.mark.parametrize("model", ["sd3", "flux"])
async def test_stopped_after_every_step_and_resumed_elsewhere(plans: Plans, stock: dict[str, Any], model: str) -> None:
    """Each step on another worker; the state moves through the handoff buffers."""
    previous = plans.plan((E,), "w3", model, push_to="w0")
    await plans.run(previous)
    for step in range(INPUTS.num_inference_steps):
        plan = plans.plan(
            (D,), WORKERS[step % 4], model, steps=(step, step + 1), input_id=previous.plan_id, source=previous.leader
        )
        await plans.run(plan)
        previous = plan
    decode = plans.plan((C,), "w1", model, input_id=previous.plan_id, source=previous.leader)
    _, (image,), _ = await plans.run(decode)
    assert np.array_equal(pixels(image), stock[model])
    await forget(plans)


async def test_plans_of_overlapping_groups_run_in_their_order(plans: Plans, stock: dict[str, Any]) -> None:
    """Their order, the same on all workers, keeps the groups from deadlocking."""
    made = []
    for index in range(6):
        request_id = f"r{index}"
        wide = plans.plan((E, D), ("w0 w1", "w1 w2", "w2 w3")[index % 3], request_id=request_id)
        decode = plans.plan((C,), wide.leader, request_id=request_id, input_id=wide.plan_id, source=wide.leader)
        made.append(asyncio.gather(plans.run(wide), plans.run(decode)))
    for _, (_, (image,), _) in await asyncio.gather(*made):
        assert np.abs(pixels(image).astype(int) - stock["sd3"].astype(int)).max() <= 1
    for index in range(6):
        await forget(plans, f"r{index}")


@pytest.mark.parametrize("workers", ["w0", "w0 w1"])
async def test_a_plan_tells_of_its_steps_from_the_moment_that_it_is_watched(plans: Plans, workers: str) -> None:
    inputs = GenerationInputs("long", Shape(128, 128), 100_000, 5.0, seed=1)
    plan = plans.plan((E, D), workers, steps=(0, 100_000))
    running = asyncio.create_task(plans.run(plan, inputs, is_watched=False))
    await asyncio.sleep(0)  # the plan is given to its workers
    plans.fleet.get_handle("w0").watch_plan(plan.plan_id)
    await until(lambda: plans.steps_told[plan.plan_id] > 0 or running.done())
    plans.fleet.get_handle("w0").stop_plan(plan.plan_id)
    assert (await running)[0].outcome == "stopped"


@pytest.mark.parametrize("model", ["sd3", "flux"])
@pytest.mark.parametrize("workers", ["w0", "w1 w2"])
async def test_previews_change_no_pixel(plans: Plans, stock: dict[str, Any], model: str, workers: str) -> None:
    inputs, told = replace(INPUTS, partial_images=3), list[PreviewNote]()
    plain = None if workers == "w0" else (await plans.run(plans.plan((E, D, C), workers, model)))[1]
    # There are none before the colours of the model are fitted, in a thread for which no plan waits.
    while len(told) < 3:
        plan = plans.plan((E, D, C), workers, model)
        _, (image,), _ = await plans.run(plan, inputs)
        assert np.array_equal(pixels(image), stock[model] if plain is None else pixels(plain[0]))
        told = plans.previews[plan.plan_id]
    assert [(note.request_id, note.step) for note in told] == [("r", 1), ("r", 2), ("r", 3)]
    assert all(pixels(file).shape == (12, 20, 3) for note in told for file in note.files)
    unwatched = plans.plan((E, D, C), workers, model)
    await plans.run(unwatched, inputs, is_watched=False)
    assert not plans.previews[unwatched.plan_id]


async def test_a_plan_that_nobody_watches_tells_of_its_end_alone(plans: Plans) -> None:
    plan = plans.plan((E, D), "w0")
    _, _, notes = await plans.run(plan, is_watched=False)
    assert notes == 1, "the last step, which the report implies"
    assert plans.steps_told[plan.plan_id] == 0
    await forget(plans, "r")


@pytest.mark.parametrize("workers", ["w0", "w0 w1"])
async def test_stop_ends_a_plan_within_a_step(plans: Plans, workers: str) -> None:
    """And not when it is done, for which nobody would wait."""
    inputs = GenerationInputs("long", Shape(128, 128), 100_000, 5.0, seed=1)
    plan = plans.plan((E, D), workers, steps=(0, 100_000))
    running = asyncio.create_task(plans.run(plan, inputs))
    await until(lambda: plans.steps_told[plan.plan_id] > 0 or running.done())
    plans.fleet.get_handle("w0").stop_plan(plan.plan_id)
    report, _, notes = await running
    assert report.outcome == "stopped"
    assert 0 < notes < 100_000


@pytest.mark.parametrize(("first", "then"), [("w0", "w1"), ("w0", "w2 w3"), ("w0 w1", "w3")])
async def test_a_paused_plan_goes_on_elsewhere_and_at_another_degree(plans: Plans, first: str, then: str) -> None:
    """The state is kept where it was; the image is that of an undisturbed run."""
    inputs = GenerationInputs("long", Shape(128, 128), LONG, 5.0, seed=1)
    _, (undisturbed,), _ = await plans.run(plans.plan((E, D, C), "w3", steps=(0, LONG)), inputs)
    begun = plans.plan((E, D) if " " in first else (E, D, C), first, steps=(0, LONG))
    running = asyncio.create_task(plans.run(begun, inputs))
    await until(lambda: plans.steps_told[begun.plan_id] > 0 or running.done())
    plans.fleet.get_handle("w0").pause_plan(begun.plan_id)
    report, images, notes = await running
    assert (report.outcome, images) == ("finished", [])
    assert report.paused_after == notes < LONG
    rest = plans.plan((D,), then, steps=(notes, LONG), input_id=begun.plan_id, source="w0")
    await plans.run(rest, inputs)
    decode = plans.plan((C,), "w0", input_id=rest.plan_id, source=rest.leader)
    _, (image,), _ = await plans.run(decode, inputs)
    difference = np.abs(pixels(image).astype(int) - pixels(undisturbed).astype(int)).max()
    assert difference <= (0 if begun.degree == rest.degree == 1 else 1)
    await forget(plans)


@pytest.mark.parametrize("workers", ["w0", "w0 w1"])
@pytest.mark.parametrize("model", ["sd3", "flux"])
async def test_a_batch_of_requests_at_different_steps(plans: Plans, model: str, workers: str) -> None:
    """`late` joins after two steps of `early`; both have the images they would have alone."""
    early, late = (f"{name}-{model}-{workers}" for name in ("early", "late"))
    contents = {
        early: GenerationInputs("a boat", Shape(128, 128), 5, 5.0, seed=1),
        late: GenerationInputs("a cow", Shape(128, 128), 3, 2.0, seed=2, num_outputs=2),
    }
    alone = {}
    for name, inputs in contents.items():
        steps = (0, inputs.num_inference_steps)
        _, alone[name], _ = await plans.run(plans.plan((E, D, C), "w3", model, request_id=name, steps=steps), inputs)
        await forget(plans, name)
    encode = {name: plans.plan((E,), "w2", model, request_id=name + "2") for name in contents}
    content = {name + "2": inputs for name, inputs in contents.items()}
    for plan in encode.values():
        await plans.run(plan, content)
    first = plans.plan(
        (D,), workers, model, request_id=early + "2", steps=(0, 2), input_id=encode[early].plan_id, source="w2"
    )
    await plans.run(first, content)
    members = (
        PlanMember(early + "2", (2, 5), first.plan_id, "w0"),
        PlanMember(late + "2", (0, 3), encode[late].plan_id, "w2"),
    )
    both = replace(plans.plan((D,), workers, model), members=members)
    _, _, notes = await plans.run(both, content)
    assert notes == 2 * 3
    after = tuple(PlanMember(name, None, both.plan_id, "w0") for name in both.request_ids)
    decode = replace(plans.plan((C,), "w1", model), members=after)
    report, images, _ = await plans.run(decode, content)
    assert report.num_outputs == {early + "2": 1, late + "2": 2}
    for image, expected in zip(images, [*alone[early], *alone[late]], strict=True):
        assert np.abs(pixels(image).astype(int) - pixels(expected).astype(int)).max() <= 1
    for name in content:
        await forget(plans, name)


async def test_a_plan_that_has_ended_leaves_nothing_to_take_over(plans: Plans, stock: dict[str, Any]) -> None:
    first = plans.plan((E, D, C), "w0", request_id="old")
    members = (
        PlanMember("old", (1, 4), first.plan_id, "w0", inherited=True),
        PlanMember("new", (0, INPUTS.num_inference_steps)),
    )
    both = replace(plans.plan((E, D), "w0"), members=members, takes_over=first.plan_id)
    (_, images, _), (report, _, _) = await asyncio.gather(plans.run(first), plans.run(both))
    assert np.array_equal(pixels(images[0]), stock["sd3"])
    assert report.taken_steps == {"new": (0, INPUTS.num_inference_steps)}
    for name in ("old", "new"):
        await forget(plans, name)


async def test_who_has_left_a_batch_holds_up_nobody(plans: Plans, stock: dict[str, Any]) -> None:
    encode = {name: plans.plan((E,), "w0", request_id=name) for name in ("stays", "left")}
    for plan in encode.values():
        await plans.run(plan)
    members = tuple(
        PlanMember(name, (0, INPUTS.num_inference_steps), plan.plan_id, "w0") for name, plan in encode.items()
    )
    both = replace(plans.plan((D, C), "w1"), members=members)
    await forget(plans, "left")
    report, (image,), _ = await plans.run(both)
    assert report.num_outputs == {"stays": 1}
    assert np.array_equal(pixels(image), stock["sd3"])
    await forget(plans, "stays")


async def test_a_plan_paused_before_its_turn_keeps_its_condition(plans: Plans, stock: dict[str, Any]) -> None:
    plan = plans.plan((E, D, C), "w0")
    running = asyncio.create_task(plans.run(plan))
    await asyncio.sleep(0)  # the plan is given to its worker, in one message with what follows
    plans.fleet.get_handle("w0").pause_plan(plan.plan_id)
    report, images, _ = await running
    assert (report.paused_after, [span.stage for span in report.spans], images) == (0, [E, D], [])
    rest = plans.plan((D, C), "w1", input_id=plan.plan_id, source="w0")
    _, (image,), _ = await plans.run(rest)
    assert np.array_equal(pixels(image), stock["sd3"])
    await forget(plans)


async def test_a_plan_stopped_before_its_turn_does_not_run(plans: Plans) -> None:
    plan = plans.plan((E, D, C), "w0")
    running = asyncio.create_task(plans.run(plan))
    await asyncio.sleep(0)  # the plan is given to its worker, in one message with what follows
    plans.fleet.get_handle("w0").stop_plan(plan.plan_id)
    report, images, _ = await running
    assert (report.outcome, images) == ("stopped", [])


async def test_a_plan_stopped_while_it_waits_for_its_inputs_does_not_fail(plans: Plans) -> None:
    plan = plans.plan((D, C), "w1", input_id=99_999, source="w0")
    key = HandoffKey("r", 99_999)
    assert await plans.find_peer("w1").reserve_slot(key, "w0", ParcelLayout((), 1, {})) is not None
    waiting = asyncio.create_task(plans.run(plan))
    await asyncio.sleep(0.2)  # most likely it waits by now; if not, it is stopped before its turn
    plans.fleet.get_handle("w1").stop_plan(plan.plan_id)
    report, images, _ = await waiting
    assert (report.outcome, images) == ("stopped", [])
    await plans.find_peer("w1").release_slot(key)


async def test_a_failing_plan_reports_its_error_and_the_next_one_runs(plans: Plans, stock: dict[str, Any]) -> None:
    orphan = plans.plan((C,), "w0", input_id=99_999, source="w1")
    with pytest.raises(AssertionError, match="holds no output of plan 99999"):
        await plans.run(orphan)
    with pytest.raises(AssertionError, match="no model named 'nope'"):
        await plans.run(plans.plan((E,), "w0", "nope"))
    _, (image,), _ = await plans.run(plans.plan((E, D, C), "w0"))
    assert np.array_equal(pixels(image), stock["sd3"])


async def test_a_leader_that_fails_does_not_leave_its_group_waiting(plans: Plans) -> None:
    broken = plans.plan((D,), "w0 w1", input_id=99_999, source="w2")
    with pytest.raises(AssertionError, match="dropped"):
        await plans.run(broken)


async def test_a_full_buffer_changes_no_pixel(plans: Plans, stock: dict[str, Any]) -> None:
    block = HandoffKey("block", 0)
    assert await plans.find_peer("w1").reserve_slot(block, "x", ParcelLayout((), HANDOFF_BYTES, {})) is not None
    encode = plans.plan((E,), "w0", push_to="w1")
    denoise = plans.plan((D, C), "w1", input_id=encode.plan_id, source="w0")
    await plans.run(encode)
    _, (image,), _ = await plans.run(denoise)
    assert np.array_equal(pixels(image), stock["sd3"])
    await plans.find_peer("w1").release_slot(block)
    await forget(plans)


class PlacedFleet:
    """The fleet of these tests, with a placement."""

    def __init__(self, fleet: WorkerFleet, placement: dict[WorkerId, tuple[Stage, ...]]) -> None:
        self.run_plan, self.list_handles, self.end_broken = fleet.run_plan, fleet.list_handles, fleet.end_broken
        self._fleet = fleet
        self._placement = placement

    def list_configs(self) -> list[WorkerConfig]:
        held = {
            worker_id: frozenset(Replica("sd3", stage) for stage in self._placement.get(worker_id, ()))
            for worker_id in WORKERS
        }
        return [replace(config, replicas=held[config.spec.worker_id]) for config in self._fleet.list_configs()]

    def list_hot_groups(self) -> list[HotGroup]:
        return [HotGroup("warm-pair", ("w0", "w1"))]


async def test_workers_are_warmed_up_alone_and_together(plans: Plans, caplog: pytest.LogCaptureFixture) -> None:
    workers = PlacedFleet(plans.fleet, {"w0": (E, D), "w1": (D,), "w2": (C,)})
    sizes = tuple(replace(INPUTS, shape=shape, num_inference_steps=2) for shape in (Shape(64, 64), Shape(96, 160)))
    told: list[WarmUpProgress] = []
    warmer = Warmer([WarmUpOrder("sd3", sizes, (1, 2), is_compiled=False)], PeakEstimator(None))
    await warmer.warm_all(workers, told.append)
    await warmer.warm_again(workers, "w1")
    assert [(progress["done"], progress["total"]) for progress in told][-1] == (6, 6)
    posted: list[ev.Event] = []
    await warmer.warm_model(workers, WarmUpOrder("sd3", sizes, (1, 2), is_compiled=False), posted.append)
    ended = [event.plan.plan_id for event in posted if isinstance(event, ev.WarmUpEnded)]
    assert [event.plan.plan_id for event in posted if isinstance(event, ev.WarmUpBegun)] == ended
    assert len(ended) > 6, "some runs have several plans"
    assert "is not warmed up" not in caplog.text


async def test_nothing_is_left_in_the_buffers(plans: Plans) -> None:
    await forget(plans)
    assert [await plans.fleet.get_handle(worker_id).count_parcels() for worker_id in WORKERS] == [0, 0, 0, 0]


async def test_the_dashboard_names_a_worker_with_its_placement(plans: Plans) -> None:
    import ray
    from ray.util.state import list_actors

    names = {
        actor.repr_name
        for actor in list_actors(address=ray.get_runtime_context().gcs_address, detail=True)
        if actor.class_name == "StageWorker"
    }
    assert {f"StageWorker({worker_id}, sd3:EDC)" for worker_id in WORKERS} <= names
