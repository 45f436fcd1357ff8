"""The Scheduler deployment as a `Backend`, through a Ray Serve handle. Errors of Ray become `TridentServeError`s."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.model_updates.catalogue import Catalogue
from tridentserve.engine.live.updates import CompletedUpdate, Update
from tridentserve.errors import OverloadedError, TridentServeError, WorkerError
from tridentserve.requests import GenerationInputs, RequestSpec


class RemoteBackend:
    """A deployment whose class has the three methods of `Backend` (its `generate` an async generator, whose last update
    holds references to the outputs instead of their bytes)."""

    def __init__(self, handle: Any) -> None:
        """`handle` is a `ray.serve.handle.DeploymentHandle`, whose types do not know of streaming."""
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(self, spec: RequestSpec, inputs: GenerationInputs) -> AsyncIterator[Update]:
        with translate_ray_errors():
            updates = self._streaming.generate.remote(spec, inputs)
            try:
                async for update in updates:
                    if isinstance(update, CompletedUpdate):
                        # The scheduler hands on references: the outputs come straight from their worker's node.
                        yield replace(update, outputs=tuple(await asyncio.gather(*update.outputs)))
                    else:
                        yield update
            finally:
                # The replica learns that this client has left. Once all updates have come, this has no effect.
                updates.cancel()

    async def cancel(self, request_id: str) -> bool:
        with translate_ray_errors():
            return bool(await self._handle.cancel.remote(request_id))

    async def catalogue(self, known_version: str | None, timeout_s: float) -> Catalogue:
        """Long-poll the models that take requests: return when they differ from `known_version`, or after `timeout_s`
        seconds."""
        with translate_ray_errors():
            found: Catalogue = await self._handle.catalogue.remote(known_version, timeout_s)
            return found

    async def health(self) -> dict[str, Any]:
        with translate_ray_errors():
            return dict(await self._handle.health.remote())


@contextmanager
def translate_ray_errors() -> Iterator[None]:
    """Raises the exception of the other side where Ray raises its own class with a traceback, and a
    `TridentServeError` where Ray reports that the other side is busy or lost."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, TridentServeError):
            raise error.cause from None
        raise
    except BackPressureError as error:
        raise OverloadedError("the service has as many requests as it can queue; try again later") from error
    except (DeploymentUnavailableError, RayActorError) as error:
        raise WorkerError("the scheduler is not available at the moment; try again later") from error
    except ObjectLostError as error:
        raise WorkerError("the result was lost with the worker that held it; try again") from error
