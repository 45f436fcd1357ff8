"""The models of a service as its configuration says, over an engine that only records its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from deployments.assembly.planning import list_service_workers, make_placement
from deployments.assembly.profiles import make_cost_model
from deployments.config.app import AppArgs
from deployments.model_updates.catalogue import CataloguePublisher
from deployments.model_updates.catalogue_client import CatalogueClient
from deployments.model_updates.reconciler import ModelReconciler
from tests.deployments.fake_backend import MODELS
from tests.support.waiting import until
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.warming.warm_up_runs import WarmUpOrder
from tridentserve.errors import ModelFolderError, WorkerError
from tridentserve.models.cache import tiny_folder
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import StageMemory
from tridentserve.scheduling.events import ModelAdded, ModelRemoved

T = TypeVar("T")
LIMITS = {"max_side": 512}
SD3: dict[str, Any] = {"name": "tiny-sd3", "tiny": "sd3", "limits": LIMITS}
FLUX: dict[str, Any] = {"name": "tiny-flux", "tiny": "flux", "limits": LIMITS}
TWIN: dict[str, Any] = {**SD3, "name": "twin", "profile_as": "tiny-sd3"}


class FakeChanges:
    """The part of `ModelChanges` that the reconciler uses. Models have requests while they are in `busy`."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.placement: PlacementPlan | None = None
        self.unreadable: set[str] = set()
        self.busy: set[str] = set()
        self.warmed = asyncio.Event()

    async def call_in_core(self, function: Callable[[], T]) -> T:
        return function()

    def set_memory(self, memory: StageMemory) -> None:
        self.memory = memory

    async def prepare(self, source: ModelSource) -> None:
        self.told.append(f"prepare {source.name}")
        if source.name in self.unreadable:
            raise ModelFolderError(f"{source.folder} is damaged")

    async def rehearse(self, source: ModelSource) -> None:
        self.told.append(f"rehearse {source.name}")
        if source.name in self.unreadable:
            raise ModelFolderError(f"{source.folder} is damaged")

    async def drop_rehearsed(self, source: ModelSource) -> None:
        self.told.append(f"drop {source.name} in {source.formats.diffuse}")

    async def discard(self, model: str) -> None:
        self.told.append(f"discard {model}")

    async def add(self, event: ModelAdded) -> None:
        self.told.append(f"add {event.model}")
        self.placement = event.placement or self.placement

    def close(self, model: str) -> None:
        self.told.append(f"close {model}")

    async def wait_until_drained(self, model: str) -> None:
        await until(lambda: model not in self.busy)

    async def warm_up(self, order: WarmUpOrder) -> None:
        self.told.append(f"warm {order.model} at {len(order.requests)} sizes")
        await self.warmed.wait()

    async def remove(self, event: ModelRemoved) -> None:
        self.told.append(f"remove {event.model}")
        self.placement = event.placement or self.placement

    @property
    def held(self) -> set[str]:
        assert self.placement is not None
        return {replica.model for held in self.placement.replicas.values() for replica in held}


def make_args(cache: Path, *models: dict[str, Any], **more: Any) -> AppArgs:
    load = [{"model": m["name"], "width": 256, "height": 256, "num_inference_steps": 28} for m in models]
    return AppArgs.model_validate(
        {
            "models": list(models),
            "cluster": {"workers_per_node": 2, "memory_mb": 512},
            "expected_load": load,
            "cache_dir": str(cache),
            **more,
        }
    )


class Bench:
    """A reconciler of a service that has just started with tiny-sd3."""

    def __init__(self, cache: Path, **more: Any) -> None:
        self.cache, self.more, self.changes = cache, more, FakeChanges()
        for family in ("sd3", "flux"):
            tiny_folder(family, cache).mkdir(exist_ok=True)
        args = make_args(cache, SD3, **more)
        times, specs = make_cost_model(args), list_service_workers(args)
        placement = make_placement(args, times, specs)
        self.reconciler = ModelReconciler(args, cast(Any, self.changes), times, specs, placement, self.fetch)

    async def fetch(self, args: AppArgs) -> AppArgs:
        return args

    def want(self, *models: dict[str, Any], **more: Any) -> None:
        self.reconciler.reconcile_to(make_args(self.cache, *models, **self.more, **more))

    async def wait_until(self, is_so: Callable[[dict[str, Any]], bool]) -> None:
        await until(lambda: is_so(self.reconciler.describe()))

    async def wait_for_models(self, **models: str) -> None:
        names = {name.replace("_", "-"): state for name, state in models.items()}
        await self.wait_until(lambda state: state["models"] == names)

    @property
    def listed(self) -> list[str]:
        return [model.name for model in self.reconciler.catalogue.latest.models]


def run(scenario: Callable[[Bench], Awaitable[None]], cache: Path, **more: Any) -> None:
    async def begin() -> None:
        bench = Bench(cache, **more)
        try:
            await scenario(bench)
        finally:
            bench.reconciler.stop()

    asyncio.run(begin())


def test_one_model_comes_and_the_other_goes(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert bench.listed == ["tiny-sd3"]
        bench.want(SD3, FLUX)
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="serving")
        assert bench.changes.told == ["prepare tiny-flux", "add tiny-flux", "add tiny-sd3"]
        assert (bench.changes.held, bench.listed) == ({"tiny-sd3", "tiny-flux"}, ["tiny-sd3", "tiny-flux"])
        bench.changes.busy = {"tiny-sd3"}
        bench.want(FLUX)
        await bench.wait_for_models(tiny_sd3="draining", tiny_flux="serving")
        assert bench.listed == ["tiny-flux"]
        assert bench.changes.told[-1] == "close tiny-sd3"
        bench.changes.busy = set()
        await bench.wait_for_models(tiny_flux="serving")
        assert "remove tiny-sd3" in bench.changes.told
        assert bench.changes.held == {"tiny-flux"}

    run(scenario, tmp_path)


def test_a_model_that_comes_is_warmed_up_and_takes_requests_meanwhile(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want(SD3, FLUX)
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="warming")
        await until(lambda: "warm tiny-flux at 2 sizes" in bench.changes.told)
        assert [(model.name, model.to_json()["state"]) for model in bench.reconciler.catalogue.latest.models] == [
            ("tiny-sd3", "serving"),
            ("tiny-flux", "warming"),
        ]
        bench.want(SD3, {**FLUX, "slo_scale": 4.0})  # another change meanwhile does not end the warm-up
        await until(lambda: bench.changes.told.count("add tiny-flux") == 2)
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="warming")
        bench.changes.warmed.set()
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="serving")
        assert {model.to_json()["state"] for model in bench.reconciler.catalogue.latest.models} == {"serving"}
        assert bench.changes.told.count("warm tiny-flux at 2 sizes") == 1

    run(scenario, tmp_path, cluster={"workers_per_node": 2, "memory_mb": 512, "warm_up": "always"})


def test_a_model_that_leaves_while_it_is_warmed_up_is_gone(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want(SD3, FLUX)
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="warming")
        bench.want(SD3)
        await bench.wait_for_models(tiny_sd3="serving")
        bench.changes.warmed.set()
        await asyncio.sleep(0)
        assert bench.listed == ["tiny-sd3"]

    run(scenario, tmp_path, cluster={"workers_per_node": 2, "memory_mb": 512, "warm_up": "always"})


def test_a_model_that_leaves_can_be_had_back(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want(SD3, FLUX)
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="serving")
        bench.changes.busy = {"tiny-sd3"}
        bench.want(FLUX)
        await bench.wait_for_models(tiny_sd3="draining", tiny_flux="serving")
        bench.want(FLUX, SD3)
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="serving")
        assert "remove tiny-sd3" not in bench.changes.told
        assert bench.listed == ["tiny-flux", "tiny-sd3"]

    run(scenario, tmp_path)


def test_requests_that_do_not_end_are_ended(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.changes.busy = {"tiny-sd3"}
        bench.want(FLUX)
        await bench.wait_for_models(tiny_flux="serving")

    run(scenario, tmp_path, drain_timeout_s=0.1)


def test_draining_keeps_a_model(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want({**SD3, "drain": True}, FLUX)
        await bench.wait_for_models(tiny_sd3="draining", tiny_flux="serving")
        assert bench.listed == ["tiny-flux"]
        assert bench.changes.held == {"tiny-sd3", "tiny-flux"}
        bench.want(SD3, FLUX)
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="serving")

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"name": "x", "path": "/nowhere", "profile_as": "tiny-sd3"}, "models[1].path"),
        (
            {"name": "x", "tiny": "flux", "profile_as": "y"},
            "models[1].profile_as: 'y' is in none of the",
        ),
        ({**FLUX, "limits": {"min_side": 500, "max_side": 505}}, "models[1].limits: no size is left"),
        ({**FLUX, "limits": {"max_side": 4096}}, "models[1].limits"),
    ],
)
def test_what_cannot_work_changes_nothing(tmp_path: Path, wrong: dict[str, Any], why: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want(SD3, wrong)
        await bench.wait_until(lambda state: any(why in line for line in state["problems"]))
        assert bench.reconciler.describe()["models"] == {"tiny-sd3": "serving"}
        assert bench.changes.told == []
        bench.want(SD3, FLUX)
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="serving")
        assert bench.reconciler.problems == []

    run(scenario, tmp_path)


def test_of_models_that_come_together_none_comes_where_one_cannot_be_read(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.changes.unreadable = {"twin"}
        bench.want(SD3, FLUX, TWIN)
        await bench.wait_until(lambda state: any("is damaged" in line for line in state["problems"]))
        assert bench.reconciler.describe()["models"] == {"tiny-sd3": "serving"}
        assert {"discard tiny-flux", "discard twin"} <= set(bench.changes.told)
        assert not any(line.startswith("add") for line in bench.changes.told)

    run(scenario, tmp_path)


def test_other_weights_under_the_same_name_are_another_model(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want({**SD3, "dtype": "bfloat16"})
        await bench.wait_until(lambda state: "add tiny-sd3" in bench.changes.told)
        told = ["rehearse tiny-sd3", "close tiny-sd3", "remove tiny-sd3", "prepare tiny-sd3", "add tiny-sd3"]
        assert bench.changes.told[:5] == told
        await bench.wait_for_models(tiny_sd3="serving")

    run(scenario, tmp_path)


def test_a_model_stays_where_what_is_to_replace_it_cannot_be_read(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.changes.unreadable = {"tiny-sd3"}
        bench.want({**SD3, "dtype": "bfloat16"}, FLUX)
        await bench.wait_until(lambda state: any("is damaged" in line for line in state["problems"]))
        assert bench.reconciler.describe()["models"] == {"tiny-sd3": "serving"}
        assert bench.changes.told == ["rehearse tiny-sd3"]
        assert bench.listed == ["tiny-sd3"]

    run(scenario, tmp_path)


def test_copies_of_what_is_not_to_replace_a_model_any_more_are_dropped(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.changes.unreadable = {"tiny-flux"}
        bench.want({**SD3, "dtype": "bfloat16"}, FLUX)
        await bench.wait_until(lambda state: any("is damaged" in line for line in state["problems"]))
        assert bench.changes.told[-1] == "drop tiny-sd3 in bfloat16"
        bench.changes.unreadable, bench.changes.busy = set(), {"tiny-sd3"}
        bench.want({**SD3, "dtype": "bfloat16"})
        await bench.wait_for_models(tiny_sd3="draining")
        bench.want(SD3)
        await bench.wait_for_models(tiny_sd3="serving")
        assert bench.changes.told.count("rehearse tiny-sd3") == 2
        assert bench.changes.told.count("drop tiny-sd3 in bfloat16") == 2

    run(scenario, tmp_path)


def test_a_model_that_is_to_come_back_is_named_meanwhile(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want(SD3, FLUX)
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="serving")
        bench.changes.busy = {"tiny-sd3"}
        bench.want({**SD3, "dtype": "bfloat16"}, {**FLUX, "dtype": "bfloat16"})
        await bench.wait_for_models(tiny_sd3="draining", tiny_flux="draining")
        bench.changes.busy = {"tiny-flux"}
        await bench.wait_for_models(tiny_sd3="loading", tiny_flux="draining")
        bench.changes.busy = set()
        await bench.wait_for_models(tiny_sd3="serving", tiny_flux="serving")

    run(scenario, tmp_path)


@pytest.mark.parametrize("change", [{"attention": "math"}, {"step_cache_fast": 0.3}, {"step_cache_high": 0.01}])
def test_another_way_of_computing_needs_no_other_copies(tmp_path: Path, change: dict[str, Any]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want({**SD3, **change})
        await bench.wait_until(lambda state: "add tiny-sd3" in bench.changes.told)
        assert "rehearse tiny-sd3" not in bench.changes.told

    run(scenario, tmp_path)


def test_another_profile_under_a_known_name_is_refused(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want({**SD3, "profile_as": "tiny-flux"})
        await bench.wait_until(lambda state: any("had another profile" in line for line in state["problems"]))
        assert bench.changes.told == []

    run(scenario, tmp_path)


def test_models_without_room_for_each_other_change_places(tmp_path: Path) -> None:
    """The written placement has no place for the one that leaves: the new one waits until it has left."""

    async def scenario(bench: Bench) -> None:
        bench.want(FLUX, placement=["EDC", "EDC"])
        await bench.wait_for_models(tiny_flux="serving")
        order = [bench.changes.told.index(line) for line in ("close tiny-sd3", "remove tiny-sd3", "add tiny-flux")]
        assert order == sorted(order)
        assert bench.changes.held == {"tiny-flux"}

    run(scenario, tmp_path)


def test_a_policy_made_for_one_load_keeps_its_models(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want(SD3, FLUX)
        await bench.wait_until(lambda state: any("dispatch.policy: b2" in line for line in state["problems"]))

    run(scenario, tmp_path, dispatch={"policy": "b2"})


def test_the_api_follows_and_keeps_what_it_knows(tmp_path: Path) -> None:
    async def scenario() -> None:
        publisher, down = CataloguePublisher(), False

        async def ask(edition: str | None, wait_s: float) -> Any:
            if down:
                raise WorkerError("starting again")
            return await publisher.wait_for_change(edition, wait_s)

        publisher.publish([MODELS["tiny-flux"]])
        models = CatalogueClient(ask, make_args(tmp_path, SD3).models)
        assert list(models) == ["tiny-sd3"]
        models.follow()

        await until(lambda: list(models) == ["tiny-flux"])
        publisher.publish(list(MODELS.values()))
        await until(lambda: list(models) == ["tiny-sd3", "tiny-flux"])
        down = True
        await asyncio.sleep(0.1)
        assert (len(models), models["tiny-sd3"].name) == (2, "tiny-sd3")
        models.stop()

    asyncio.run(scenario())
