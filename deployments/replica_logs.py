"""The log of the replicas, as the console shows it: the lines of this package that say what the service does, and of
Ray Serve's those that a reader can use."""

from __future__ import annotations

import logging

from tridentserve.errors import TridentServeError, find_error_class

_ROOMS = ("deployments", "tridentserve", "placement", "dispatch", "profiler")
_OF_SERVE = "ray.serve"
# Calls between the deployments of a service. The catalogue is asked for every two seconds.
_INTERNAL_CALLS = ("get_catalogue", "get_address", "get_health", "get_user_config", "take_references")


def prepare_logs() -> None:
    """Print the lines of this package from INFO on, and shorten those of Ray Serve, in this process. A second call has
    no effect."""
    serve_logger = logging.getLogger(_OF_SERVE)
    if any(isinstance(each, ServeLogFilter) for each in serve_logger.filters):
        return
    serve_logger.addFilter(ServeLogFilter())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    for room in _ROOMS:
        logger = logging.getLogger(room)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False


class ServeLogFilter(logging.Filter):
    """Drops the access log of internal calls. A call that was refused is one line: its caller has the error, and a
    traceback of this package says nothing of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if message.startswith(tuple(f"CALL {name} OK" for name in _INTERNAL_CALLS)):
            return False
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, TridentServeError) or (
            isinstance(error, ValueError | RuntimeError) and _is_told_to_caller(error)
        ):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            # An error that Ray has passed on begins with the traceback of where it comes from.
            told = str(error.__cause__ or error).strip().splitlines()[-1:]
            record.msg, record.args = "A call was refused: %s", ("".join(told),)
            record.exc_info = record.exc_text = None
        return True


def _is_told_to_caller(error: Exception) -> bool:
    """True for the plain form of an error of the service, whose text begins with its code."""
    code = str(error).partition(":")[0]
    return code != TridentServeError.code and find_error_class(code) is not TridentServeError
