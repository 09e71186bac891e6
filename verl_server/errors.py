"""Errors that cross the boundary between us and a caller.

Every error a user can meet derives from `VerlServerError` and knows its HTTP status, so the in-process
engine raises what the HTTP adapter raises for the same fault. Messages say what, where and the remedy.

    VerlServerError
    ├── BadRequestError        400  the caller's input; nothing was changed
    ├── ServerUnavailableError 503  cannot serve now (no weights, torn weights, queue full)
    │   └── ServerStoppingError     503  the server is shutting down
    ├── WeightUpdateError      400  an update was refused; the old weights are still served
    │   ├── UnknownRegistrationError 404  the server does not know it (any more): send the description
    │   └── UpdateConflictError      409  another transaction is open, or the caller's is not (any more)
    ├── ServerLaunchError      500  the server did not come up; carries the child's traceback and log tail
    ├── ServerDiedError        503  the server was up and is gone
    ├── ServerRestartedError   412  the server was started again: nothing was done; heal() or accept_restart()
    └── ControlTimeoutError    504  a call took longer than its bound: it was refused, and is not carried out
        └── UnansweredError    504  no answer came, so it is not certain whether it was carried out
"""

from __future__ import annotations


class VerlServerError(Exception):
    """Base of all errors raised to users of this package."""

    status_code = 500


class BadRequestError(VerlServerError, ValueError):
    status_code = 400


class ServerUnavailableError(VerlServerError):
    status_code = 503


class ServerStoppingError(ServerUnavailableError):
    pass


class WeightUpdateError(VerlServerError):
    status_code = 400


class UnknownRegistrationError(WeightUpdateError):
    status_code = 404


class UpdateConflictError(WeightUpdateError):
    status_code = 409


class ServerLaunchError(VerlServerError):
    status_code = 500


class ServerDiedError(VerlServerError, ConnectionError):
    status_code = 503


class ServerRestartedError(VerlServerError):
    status_code = 412


class ControlTimeoutError(VerlServerError, TimeoutError):
    status_code = 504


class UnansweredError(ControlTimeoutError):
    pass


def error_for_status(
    status_code: int, message: str, bad_request: type[VerlServerError] = BadRequestError
) -> VerlServerError:
    """The error that an HTTP status stands for; `bad_request` is the class of 4xx."""
    kinds: dict[int, type[VerlServerError]] = {
        412: ServerRestartedError,
        503: ServerUnavailableError,
        504: ControlTimeoutError,
    }
    if issubclass(bad_request, WeightUpdateError):
        kinds |= {404: UnknownRegistrationError, 409: UpdateConflictError}
    kind = kinds.get(status_code, bad_request if 400 <= status_code < 500 else VerlServerError)
    error = kind(message)
    error.status_code = status_code if status_code >= 400 else kind.status_code
    return error
