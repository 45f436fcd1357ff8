"""The class of the worker actors, for who starts and calls them: without torch, which the workers import themselves.

Ray wants the class of an actor where the actor is started. To import `worker` there would cost the Scheduler's process
nine seconds of CPU and 400 MB, before the first worker could begin with the same imports.
"""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

_NAME = "StageWorker"


@cache
def actor_class() -> type[Any]:
    """A class with the public methods of `worker.StageWorker`, as its source has them; each is carried out by one."""
    tree = ast.parse(Path(__file__).with_name("worker.py").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == _NAME).body
    public = [node for node in body if isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_")]
    methods = {node.name: _stream(node.name) if _yields(node) else _call(node.name) for node in public}

    def begin(self: Any, config: Any) -> None:
        from tridentserve.engine.live.worker.worker import StageWorker

        self.worker = StageWorker(config)

    return type(_NAME, (), {**methods, "__init__": begin, "__repr__": lambda self: repr(self.worker)})


def _yields(method: ast.AsyncFunctionDef) -> bool:
    return any(isinstance(node, ast.Yield) for node in ast.walk(method))


def _call(name: str) -> Callable[..., Any]:
    async def call(self: Any, *args: Any) -> Any:
        return await getattr(self.worker, name)(*args)

    return call


def _stream(name: str) -> Callable[..., Any]:
    async def stream(self: Any, *args: Any) -> AsyncIterator[Any]:
        async for item in getattr(self.worker, name)(*args):
            yield item

    return stream
