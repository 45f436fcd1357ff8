"""Errors of calls between replicas, as errors of the service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from tridentserve.engine.live.channels.channel import ChannelError
from tridentserve.errors import OverloadedError, TridentServeError, WorkerError


class LostCallError(WorkerError):
    """The other side, or the result that it had, is lost: the same call may succeed at another one, or later."""


@contextmanager
def translate_call_errors() -> Iterator[None]:
    """Raises the exception of the other side where Ray raises its own class with a traceback, and a
    `TridentServeError` where Ray or the channel reports that the other side is busy or lost."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, TridentServeError):
            raise error.cause from None
        raise
    except BackPressureError as error:
        raise OverloadedError("the service has as many requests as it can queue; try again later") from error
    except (ChannelError, DeploymentUnavailableError, RayActorError) as error:
        raise LostCallError("the scheduler is not available at the moment; try again later") from error
    except ObjectLostError as error:
        raise LostCallError("the result was lost with the worker that held it; try again") from error
