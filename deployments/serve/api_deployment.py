"""The Api deployment: stateless replicas with the HTTP routes, and the methods that Python handles call."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.assembly.cell_args import take_cell
from deployments.backend import closing
from deployments.config.app import AppArgs
from deployments.http import python_handle as handle_api
from deployments.http.app import create_api
from deployments.http.routes.handle_routes import HandleAddress
from deployments.model_updates.catalogue_client import CatalogueClient, CombinedCatalogue
from deployments.replica_logs import prepare_logs
from deployments.serve.cells_backend import choose_backend
from deployments.serve.gpu_shortage import count_gpus, find_gpu_shortage
from deployments.serve.remote_backend import RemoteBackend
from deployments.serve.videos_deployment import RemoteVideoBackend
from tridentserve.errors import TridentServeError

logger = logging.getLogger(__name__)


@serve.ingress()
class ApiDeployment:
    """The HTTP routes, and for Python handles `generate`, `generate_stream`, `quote` and `explain`, which take and
    return plain dicts, texts and lists (docs/api.md)."""

    def __init__(
        self, schedulers: list[DeploymentHandle[Any]], args: AppArgs, videos: DeploymentHandle[Any] | None
    ) -> None:
        """`schedulers` has the handle of each cell's."""
        prepare_logs()
        if (shortage := find_gpu_shortage(num_gpus := count_gpus(args))) is not None:
            logger.warning("the service waits: %s", shortage)
        cells = [RemoteBackend(scheduler, num_gpus) for scheduler in schedulers]
        self._backend = choose_backend(cells, args)
        self._videos = RemoteVideoBackend(videos, args) if videos is not None else None
        self._models = CombinedCatalogue(
            [CatalogueClient(cell.get_catalogue, take_cell(args, number).models) for number, cell in enumerate(cells)]
        )
        self._models.follow()
        self._lenient = args.validation == "lenient"

    def __serve_build_asgi_app__(self) -> Any:
        handle = _find_handle_address()
        return create_api(self._backend, self._models, self._videos, lenient=self._lenient, handle=handle)

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `deployments.http.python_handle.generate`."""
        with _raise_plain_errors():
            return await handle_api.generate(self._backend, self._models, body, self._lenient)

    async def quote(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `deployments.http.python_handle.quote`."""
        with _raise_plain_errors():
            return await handle_api.quote(self._backend, self._models, body, self._lenient)

    async def explain(self, request_id: str) -> dict[str, Any]:
        """See `deployments.http.python_handle.explain`."""
        with _raise_plain_errors():
            return await handle_api.explain(self._backend, request_id)

    async def generate_stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See `deployments.http.python_handle.generate_stream`."""
        with _raise_plain_errors():
            sent = handle_api.generate_stream(self._backend, self._models, body, self._lenient)
            async with closing(sent) as updates:
                async for update in updates:
                    yield update


def _find_handle_address() -> HandleAddress:
    context = ray.get_runtime_context()
    # Ray hands its mode to all of its processes in their environment.
    takes_token = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return HandleAddress(
        application=serve.get_replica_context().app_name,
        namespace=context.namespace,
        ray_address=context.gcs_address,
        ray_auth_mode="token" if takes_token else "disabled",
    )


@contextmanager
def _raise_plain_errors() -> Iterator[None]:
    """Raises ValueError for an error that the caller can correct, RuntimeError for every other one. The text begins
    with the code. Callers in other applications may not have this package, so they could not unpickle its errors."""
    try:
        yield
    except TridentServeError as error:
        kind = ValueError if error.http_status < 429 else RuntimeError
        raise kind(f"{error.code}: {error}") from None
