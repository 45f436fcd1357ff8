"""Errors of calls between replicas, as errors of the service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from tridentserve.engine.live.channels.channel import ChannelError
from tridentserve.errors import OverloadedError, TridentServeError, WorkerError


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
        raise WorkerError("the scheduler is not available at the moment; try again later") from error
    except ObjectLostError as error:
        raise WorkerError("the result was lost with the worker that held it; try again") from error
