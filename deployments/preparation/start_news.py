"""Tells the replicas of Api what the Scheduler's replica does while it starts, as Ray Serve lets no call through to it
before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

# What the replica may be doing, as `GET /health` calls it.
Topic = Literal["profiling", "warming"]


class StartNews:
    """An actor that keeps the latest news about one topic."""

    def __init__(self) -> None:
        self._news: Mapping[str, Any] = {}

    def tell(self, news: Mapping[str, Any]) -> None:
        self._news = news

    def get(self) -> Mapping[str, Any]:
        return self._news


@contextmanager
def open_start_news(topic: Topic) -> Iterator[Any]:
    """The handle of an actor that others find by the name of this replica's application, until the end."""
    name = _name_news(serve.get_replica_context().app_name, topic)
    actor: Any = ray.remote(StartNews).options(name=name, num_cpus=0, get_if_exists=True).remote()
    try:
        yield actor
    finally:
        ray.kill(actor)


async def read_start_news() -> tuple[Topic, Mapping[str, Any]] | None:
    """The topic of the Scheduler of this replica's application, and the latest news of it; None where it has none to
    tell."""
    topics: tuple[Topic, ...] = get_args(Topic)
    for topic in topics:
        if (news := await _read_news(topic)) is not None:
            return topic, news
    return None


async def _read_news(topic: Topic) -> Mapping[str, Any] | None:
    try:
        name = _name_news(serve.get_replica_context().app_name, topic)
        actor: Any = await asyncio.to_thread(ray.get_actor, name)
        news: Mapping[str, Any] = await actor.get.remote()
    except (RayServeException, ValueError, ray.exceptions.RayError):  # no replica, no actor, or it has just ended
        return None
    return news or None


def _name_news(app_name: str, topic: Topic) -> str:
    return f"{app_name}-{topic}-news"
