"""The Api deployment: stateless replicas with the HTTP routes, and the methods that Python handles call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import handle_api
from deployments.api import create_api
from deployments.config import ModelArgs
from deployments.models import served_models
from deployments.remote import RemoteBackend


@serve.ingress()
class Api:
    """`generate` and `generate_stream` are what a handle offers: plain dicts in, plain dicts out (docs/api.md)."""

    def __init__(self, scheduler: DeploymentHandle[Any], models: list[ModelArgs]) -> None:
        self._backend = RemoteBackend(scheduler)
        self._models = served_models(models)

    def __serve_build_asgi_app__(self) -> Any:
        return create_api(self._backend, self._models)

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `deployments.handle_api.generate`."""
        return await handle_api.generate(self._backend, self._models, body)

    async def generate_stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See `deployments.handle_api.generate_stream`."""
        async for update in handle_api.generate_stream(self._backend, self._models, body):
            yield update
