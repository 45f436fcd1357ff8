"""The calls of workers: each one that the engine or a peer makes fits a method of the actor, which needs no torch."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.processes import output_of
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.handoff.ray_peer import RayPeer
from tridentserve.engine.live.transport.parcel import ParcelLayout
from tridentserve.engine.live.worker.worker_actor import StageWorker, WorkerHandle


class CheckedActor:
    """In place of Ray's handle of an actor: a call that fits no method of `StageWorker` raises."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            inspect.signature(getattr(StageWorker, name)).bind(None, *args)
            self.called.append(name)
            return nothing()

        return SimpleNamespace(remote=remote)


class nothing:  # noqa: N801
    """An answer that may be awaited, and need not be."""

    def __await__(self) -> Any:
        yield from ()


def public_methods(of: type[Any]) -> set[str]:
    return {name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")}


async def call_all(of: object, names: set[str], special: dict[str, tuple[Any, ...]]) -> None:
    for name in sorted(names):
        method = getattr(of, name)
        args = special.get(name, tuple({} for _ in inspect.signature(method).parameters))
        answer = method(*args)
        if inspect.isawaitable(answer):
            await answer


async def test_all_calls_fit_the_actor() -> None:
    actor: Any = CheckedActor()
    await call_all(WorkerHandle(actor), public_methods(WorkerHandle) - {"kill"}, {})
    deliver = {"deliver_parcel": (HandoffKey("r", 1), ParcelLayout((), 0, {}), torch.zeros(1))}
    await call_all(RayPeer(actor, "link", "node"), public_methods(RayPeer), deliver)
    assert set(actor.called) == public_methods(StageWorker), "each method of the actor is called by one of them"


def test_plans_are_streams() -> None:
    assert inspect.isasyncgenfunction(StageWorker.run_plan)


def test_the_actor_needs_no_torch() -> None:
    code = "import sys, tridentserve.engine.live.fleet; print('torch' in sys.modules)"
    assert output_of([sys.executable, "-c", code]).strip() == "False"
