"""Each policy serves live: one engine and three workers for all of them, as starting these is what takes time."""

from __future__ import annotations

import asyncio
import io
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from PIL import Image

from deployments.assembly.planning import assemble_service
from deployments.assembly.profiles import make_cost_model
from deployments.config.app import AppArgs
from dispatch.policies import POLICIES, Policy
from profiler import CostModel
from tests.engine.live.configs import worker_configs
from tests.pipelines.models import stock_result
from tests.support import http
from tests.support.decision_log import read_log
from tests.support.policy_page import POLICY, write_policy
from tests.support.waiting import until
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.spawning.spawner import ActorSpawner
from tridentserve.engine.live.transport.nixl_link import NixlLink
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.engine.options import EngineOptions
from tridentserve.parallel import connect_store
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import DispatchPlan
from tridentserve.protocols import ClusterView, Decisions, WorkerView
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import Stage

MODEL = "tiny-sd3"
# No other fleet of the session has these names: their metrics are of this one.
WORKERS = ("policy-w0", "policy-w1", "policy-w2")
MEMORY_MB = 1024
CONTENTS = {
    "square": GenerationInputs("a lighthouse at dawn", Shape(128, 128), 4, 5.0, seed=1, negative_prompt="blurry"),
    "wide": GenerationInputs("a boat", Shape(128, 256), 5, 5.0, seed=2),
    "small": GenerationInputs("a cow", Shape(64, 64), 3, 5.0, seed=3),
}


def args_of(policy: str) -> AppArgs:
    """The configuration of a service with this policy."""
    load = [
        {
            "model": MODEL,
            "width": inputs.shape.width,
            "height": inputs.shape.height,
            "num_inference_steps": inputs.num_inference_steps,
        }
        for inputs in CONTENTS.values()
    ]
    return AppArgs.model_validate(
        {
            "models": [{"name": MODEL, "tiny": "sd3"}],
            "cluster": {"workers_per_node": len(WORKERS), "memory_mb": MEMORY_MB},
            "expected_load": load,
            "dispatch": {"policy": policy},
        }
    )


@dataclass
class Switching:
    """The dispatcher of the policy in force. Every reason names the policy. It fails as often as the test asks."""

    policy: Policy
    failures_left: int = 0

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return self.policy.dispatcher.can_ever_run(spec, workers)

    def decide(self, view: ClusterView) -> Decisions:
        if self.failures_left:
            self.failures_left -= 1
            raise ZeroDivisionError("no efficiency")
        decisions = self.policy.dispatcher.decide(view)
        named = (replace(each, reason=f"{self.policy.name}: {each.reason}") for each in decisions.assignments)
        return replace(decisions, assignments=tuple(named))


@dataclass
class Service:
    """A live engine whose policy and placement can be changed."""

    engine: LiveEngine
    dispatcher: Switching
    times: CostModel
    specs: list[WorkerSpec]
    log: Path
    epoch: int = field(default=0)

    async def follow(self, name: str) -> None:
        """Let a policy decide from now on, on the placement that a service with it would begin with."""
        planners = assemble_service(args_of(name), self.times, self.specs)
        self.dispatcher.policy = planners.policy
        self.epoch += 1
        placement = replace(planners.placement, epoch=self.epoch)
        await self.engine.models.add(ev.ModelAdded(MODEL, MODEL, slo_scale=5.0, placement=placement))

    async def generate(self, request_id: str, content: str) -> np.ndarray[Any, Any]:
        inputs = CONTENTS[content]
        spec = RequestSpec(request_id, MODEL, inputs.shape, inputs.num_inference_steps, slo_s=1000.0)
        *_, last = [update async for update in self.engine.generate(spec, inputs)]
        assert isinstance(last, CompletedUpdate), last
        (png,) = last.outputs
        return np.asarray(Image.open(io.BytesIO(png)))

    def plans_of(self, request_id: str) -> list[tuple[DispatchPlan, str]]:
        """The plans that a request was part of, each with its reason."""
        effects = (effect for decision in read_log(self.log) for effect in decision.effects)
        return [
            (effect.plan, effect.reason)
            for effect in effects
            if isinstance(effect, ev.RunPlan)
            and any(member.request_id.partition("~")[0] == request_id for member in effect.plan.members)
        ]


@pytest.fixture(scope="module")
async def service(
    ray_cluster: None, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    args = args_of("default")
    specs = [WorkerSpec(name, "node", MEMORY_MB << 20, "cpu", place) for place, name in enumerate(WORKERS)]
    times = make_cost_model(args)
    planners = assemble_service(args, times, specs)
    dispatcher, placement = Switching(planners.policy), planners.placement
    store = connect_store(is_server=True)
    sources = {MODEL: ModelSource(MODEL, ensure_tiny("sd3", tiny_cache))}
    log = tmp_path_factory.mktemp("policies") / "decisions.jsonl"
    engine = LiveEngine(
        Scheduler(specs, placement, times, dispatcher),
        worker_configs(specs, placement, sources, store.port, tiny_cache),
        ActorSpawner(0.1),
        lambda group, rank, plan_id: None,
        EngineOptions(decision_log=log),
    )
    await engine.start()
    yield Service(engine, dispatcher, times, specs, log)
    await engine.stop()
    del store


@pytest.fixture(scope="module")
def stock(tiny_cache: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The images of the stock pipeline."""
    torch.set_num_threads(1)
    folder = ensure_tiny("sd3", tiny_cache)
    return {name: np.asarray(stock_result(folder, inputs, "pil")[0]) for name, inputs in CONTENTS.items()}


def assert_same_image(image: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], plans: list[DispatchPlan]) -> None:
    """Bit for bit at degree 1 and alone, else up to rounding."""
    is_exact = all(plan.degree == len(plan.members) == 1 for plan in plans)
    assert image.shape == expected.shape
    assert np.abs(image.astype(int) - expected.astype(int)).max() <= (0 if is_exact else 1)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_policy_serves(service: Service, stock: dict[str, np.ndarray[Any, Any]], policy: str) -> None:
    await service.follow(policy)
    images = await asyncio.gather(*(service.generate(f"{policy}-{content}", content) for content in CONTENTS))
    for content, image in zip(CONTENTS, images, strict=True):
        given = service.plans_of(f"{policy}-{content}")
        assert f"{policy}: " in given[0][1], "the first plan follows from an assignment"
        stages = [stage for plan, _ in given for stage in plan.stages]
        assert (stages[0], stages[-1], set(stages)) == (Stage.ENCODE, Stage.DECODE, set(Stage))
        assert_same_image(image, stock[content], [plan for plan, _ in given])


async def test_a_policy_outside_the_repository_serves(
    service: Service, stock: dict[str, np.ndarray[Any, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is that of docs/write-a-policy.md, by its dotted path."""
    write_policy(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    await service.follow(POLICY)
    image = await service.generate("from-outside", "square")
    plans = service.plans_of("from-outside")
    assert f"{POLICY}: shortest first, " in plans[0][1]
    assert_same_image(image, stock["square"], [plan for plan, _ in plans])


async def test_a_policy_that_fails_is_asked_again(service: Service, stock: dict[str, np.ndarray[Any, Any]]) -> None:
    await service.follow("default")
    service.dispatcher.failures_left = 2
    image = await service.generate("asked-again", "small")
    assert service.dispatcher.failures_left == 0
    assert service.engine.healthy
    assert_same_image(image, stock["small"], [plan for plan, _ in service.plans_of("asked-again")])


@pytest.fixture(scope="module")
def nixl() -> None:
    """Skips where NIXL cannot be used at all: there, handoffs through host memory are what is promised."""
    try:
        NixlLink("policy-probe", torch.zeros(4096, dtype=torch.uint8)).close()
    except Exception as error:  # NIXL and UCX raise what they like
        pytest.skip(f"NIXL cannot start on this machine: {error!r}")


def handoffs() -> Counter[str]:
    """The number of handoffs to other workers that these have made by each path, as Prometheus would read it."""
    port = ray.nodes()[0]["MetricsExportPort"]  # type: ignore[no-untyped-call]
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    text = http.get(f"http://{address}:{port}/metrics").text
    found: Counter[str] = Counter()
    for labels, value in re.findall(r"^ray_tridentserve_handoffs_total\{(.+)\} (\S+)$", text, re.MULTILINE):
        told = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if told["worker"] in WORKERS and told["path"] != "local":
            found[told["path"]] += int(float(value))
    return found


async def test_stages_hand_on_through_nixl(
    service: Service, stock: dict[str, np.ndarray[Any, Any]], nixl: None
) -> None:
    """Were NIXL not used, all else would pass: host memory takes its place in silence."""
    await service.follow("b6")
    image = await service.generate("handed-on", "square")
    plans = [plan for plan, _ in service.plans_of("handed-on")]
    assert [plan.stages for plan in plans] == [(Stage.ENCODE,), (Stage.DIFFUSE,), (Stage.DECODE,)]
    assert {plan.workers for plan in plans} == {(name,) for name in WORKERS}
    assert_same_image(image, stock["square"], plans)
    effects = (effect for decision in read_log(service.log) for effect in decision.effects)
    encodes = [
        effect.plan for effect in effects if isinstance(effect, ev.RunPlan) and effect.plan.stages == (Stage.ENCODE,)
    ]
    pushed = sum(member.push_to not in (None, plan.leader) for plan in encodes for member in plan.members)
    # Ray's processes report every few seconds: all conditions of this engine so far, and these latents.
    await until(lambda: sum(handoffs().values()) > pushed, f"the metrics tell of {pushed + 1} handoffs", every_s=0.2)
    found = handoffs()
    assert found["host"] == 0
    assert found["nixl"] > pushed
