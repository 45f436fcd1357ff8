"""The `user_config` of a service with several cells: that of the first cell, which the others ask for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

# A first cell that does not answer in so long is starting itself, or is lost.
_TIMEOUT_S = 2.0
_PERIOD_S = 2.0

logger = logging.getLogger(__name__)


class UserConfigFollower:
    """Asks the deployment of the first cell, again and again. It lives in one event loop."""

    def __init__(self, first: Any) -> None:
        """`first` is a `ray.serve.handle.DeploymentHandle`, whose types do not know of awaiting."""
        self._first = first
        self._task: asyncio.Task[None] | None = None

    async def fetch(self, otherwise: Any) -> Any:
        """The first cell's `user_config`, or `otherwise` while it does not answer."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._first.get_user_config.remote()
        except Exception as error:  # whatever it is, the first cell is absent at the moment
            logger.info("the first cell does not answer: %s", type(error).__name__)
            return otherwise

    def follow(self, known: Any, change: Callable[[Any], None]) -> None:
        """Call `change` whenever the first cell has another `user_config` than before; it had `known` at the start."""
        self._task = asyncio.get_running_loop().create_task(self._follow(known, change))

    def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self, known: Any, change: Callable[[Any], None]) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            if (found := await self.fetch(known)) != known:
                known = found
                change(found)
