"""The exceptions of the product. Each class says when it is raised, and which HTTP status and code it stands for."""

from __future__ import annotations

from typing import ClassVar


class TridentServeError(Exception):
    """Base of everything this package raises on purpose; an internal error unless a subclass says otherwise."""

    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"


class InvalidRequestError(TridentServeError):
    """A request holds a value that can never be served; `param` names the field at fault."""

    http_status = 422
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(InvalidRequestError):
    """A request names a model that this service does not serve."""

    http_status = 404
    code = "model_not_found"


class ModelUnavailableError(TridentServeError):
    """A model takes no new requests, because it is being drained; or it was removed before the request had ended."""

    http_status = 503
    code = "model_unavailable"


class RequestNotFoundError(TridentServeError):
    """A request id is asked for (or cancelled) that the service does not know."""

    http_status = 404
    code = "request_not_found"


class RequestCancelledError(TridentServeError):
    """A request was stopped by its client, or by `DELETE /v1/requests/{id}`, before it finished."""

    http_status = 499
    code = "cancelled"


class UnauthorizedError(TridentServeError):
    """A request for administrators comes without their token."""

    http_status = 401
    code = "unauthorized"


class AdminDisabledError(TridentServeError):
    """A request for administrators comes to a service that has no token for them."""

    http_status = 403
    code = "admin_disabled"


class LoraNotFoundError(TridentServeError):
    """A LoRA is to be removed that the model does not have."""

    http_status = 404
    code = "lora_not_found"


class LoraExistsError(TridentServeError):
    """A LoRA is to be added under a name that another one has."""

    http_status = 409
    code = "lora_exists"


class VideoStorageError(TridentServeError):
    """A video cannot be kept, because its directory is full or the bound on its size is too low; or a job cannot be
    stored, because the disk is full."""

    http_status = 507
    code = "storage_failed"


class OverloadedError(TridentServeError):
    """The bounded queue is full; try again later."""

    http_status = 429
    code = "overloaded"


class ConfigError(TridentServeError):
    """A deployment, cluster or model configuration cannot work; the message says which key and what to do."""

    code = "bad_config"


class ProfileError(ConfigError):
    """A profile table is malformed, or does not cover what is asked of it; the message says what to profile."""

    code = "bad_profile"


class PlacementError(ConfigError):
    """No placement of the given models fits the given cluster."""

    code = "no_placement"


class DeadlineMissedError(TridentServeError):
    """A request was refused, because its deadline was out of reach; `predicted_s` are the seconds from its arrival to
    its end that were predicted, None where a policy has refused it."""

    http_status = 503
    code = "deadline_missed"

    def __init__(self, message: str, predicted_s: float | None = None) -> None:
        super().__init__(message)
        self.predicted_s = predicted_s


class TraceError(TridentServeError):
    """A trace row cannot be read; the message holds the line number."""

    http_status = 422
    code = "bad_trace"


class ModelFolderError(ConfigError):
    """A model folder is missing, incomplete, or of a family that is not supported."""

    code = "bad_model_folder"


class LoraFileError(ModelFolderError):
    """The file of a LoRA is gone, is another one than it was, or does not fit the model."""

    code = "bad_lora_file"


class HandoffError(TridentServeError):
    """A tensor could not be moved from one worker to another."""

    code = "handoff_failed"


class OutOfMemoryError(TridentServeError):
    """A plan needs more memory than its worker has; the message holds the numbers."""

    http_status = 507
    code = "out_of_memory"


class WorkerError(TridentServeError):
    """A worker was lost, or failed while it ran a plan, more often than the retry limit allows."""

    http_status = 503
    code = "worker_failed"


class GroupError(WorkerError):
    """A collective of a process group failed: a member died or never came. The message names the group."""

    code = "group_failed"


def find_error_class(code: str) -> type[TridentServeError]:
    """The class with this code; `TridentServeError` for a code that no class has."""
    todo: list[type[TridentServeError]] = [TridentServeError]
    while todo:
        kind = todo.pop()
        if kind.code == code:
            return kind
        todo.extend(kind.__subclasses__())
    return TridentServeError


def http_status_of(code: str) -> int:
    """The HTTP status of the error class with this code; 500 for a code that no class has."""
    return find_error_class(code).http_status


def make_error(
    code: str, message: str, param: str | None = None, predicted_s: float | None = None
) -> TridentServeError:
    """An error of the class with this code; `param` is used where the class names a field at fault, `predicted_s` where
    it is about a deadline."""
    kind = find_error_class(code)
    if issubclass(kind, DeadlineMissedError):
        return kind(message, predicted_s)
    return kind(message, param) if issubclass(kind, InvalidRequestError) else kind(message)
