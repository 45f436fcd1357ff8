"""The route that says how a Python program reaches the handle of this service."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fastapi import FastAPI
from starlette.exceptions import HTTPException

HANDLE_ROUTES = ("GET /v1/handle",)


@dataclass(frozen=True)
class HandleAddress:
    """Where the Python handle of a service is: found by the address of the service, callers depend neither on other Ray
    clusters of the machine nor on variables of their own."""

    application: str
    """The name to give to `serve.get_app_handle`."""

    namespace: str
    """The Ray namespace of Serve."""

    ray_address: str
    """The Ray cluster, as "host:port"."""

    ray_auth_mode: str
    """"token" or "disabled". Ray reads it from RAY_AUTH_MODE when it is imported, and a caller that has the other one
    waits without end, or for half a minute."""


def add_handle_routes(api: FastAPI, address: HandleAddress | None) -> None:
    @api.get("/v1/handle")
    async def find_handle() -> dict[str, str]:
        """Where the Python handle of this service is, and the mode of authentication that its callers need. Ray's token
        is no part of it."""
        if address is None:
            raise HTTPException(404, "this service does not run on Ray Serve, so it has no Python handle")
        return asdict(address)
