"""The calls of workers: each one of the engine or a peer fits a method; the actor needs no torch."""

from __future__ import annotations

import asyncio
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.processes import output_of
from tridentserve.engine.live.channels.opening import listen
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.handoff.remote_peer import RemotePeer
from tridentserve.engine.live.transport.parcel import ParcelLayout
from tridentserve.engine.live.worker.worker_actor import StageWorker
from tridentserve.engine.live.worker.worker_calls import WorkerCalls
from tridentserve.engine.live.worker_handle import WorkerHandle

# Methods of these classes that call nobody.
_LOCAL = {"kill", "open_channel", "wait_for_break", "wait_until_idle", "fail_plans", "close"}


class CheckedWorker:
    """In place of a worker: a call that fits no method raises. `actor` is that of Ray's handle."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    @property
    def actor(self) -> Any:
        def find(name: str) -> Any:
            def remote(*args: Any) -> Any:
                self._check(StageWorker, name, args)
                return nothing()

            return SimpleNamespace(remote=remote)

        return type("Actor", (), {"__getattr__": lambda _, name: find(name)})()

    def __getattr__(self, name: str) -> Any:
        """A method of `WorkerCalls`."""
        method = getattr(WorkerCalls, name)

        def call(*args: Any) -> None:
            self._check(WorkerCalls, name, args)

        async def answer(*args: Any) -> None:
            self._check(WorkerCalls, name, args)

        return answer if inspect.iscoroutinefunction(method) else call

    def _check(self, kind: type, name: str, args: tuple[Any, ...]) -> None:
        inspect.signature(getattr(kind, name)).bind(None, *args)
        self.called.add(name)


class nothing:  # noqa: N801
    """An answer that may be awaited, and need not be."""

    def __await__(self) -> Any:
        yield from ()


def public_methods(of: type[Any]) -> set[str]:
    return {name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")}


async def call_all(of: object, special: dict[str, tuple[Any, ...]]) -> None:
    for name in sorted(public_methods(type(of)) - _LOCAL):
        method = getattr(of, name)
        args = special.get(name, tuple({} for _ in inspect.signature(method).parameters))
        answer = method(*args)
        if inspect.isawaitable(answer):
            await asyncio.wait_for(asyncio.ensure_future(_finish(answer)), 60)


async def _finish(answer: Any) -> None:
    await answer


async def test_all_calls_fit_the_worker() -> None:
    worker = CheckedWorker()
    listener = await listen("127.0.0.1", lambda _: worker)
    handle = WorkerHandle(worker.actor)
    await handle.open_channel(listener.address)
    await call_all(handle, {"run_plan": (SimpleNamespace(plan_id=1), {}, None, False, print)})
    peer = RemotePeer(worker.actor, listener.address, "link", "node")
    await call_all(peer, {"deliver_parcel": (HandoffKey("r", 1), ParcelLayout((), 0, {}), torch.zeros(1))})
    handle._require_channel().close()
    peer.close()
    listener.close()
    await asyncio.sleep(0)
    assert worker.called == public_methods(StageWorker) | public_methods(WorkerCalls), "each is called by one of them"


@pytest.mark.parametrize("module", ["tridentserve.engine.live.fleet", "deployments.serve.start"])
def test_the_process_that_starts_workers_imports_no_torch(module: str) -> None:
    """It would take ten seconds before the first worker could begin."""
    code = f"import sys, {module}; print([name for name in ('torch', 'diffusers') if name in sys.modules])"
    assert output_of([sys.executable, "-c", code]).strip() == "[]"
