"""Errors that this package raises to its users.

Each class derives from `VerlServerError` and has an HTTP status. For the same fault, the in-process engine and the HTTP
adapter raise the same class. A message says what is wrong, where, and how to fix it.

    VerlServerError
    ├── BadRequestError        400  the caller's input is wrong; nothing was changed
    │   ├── ContextLengthError      400  the prompt, or the prompt with the output, is longer than the context
    │   └── ForbiddenError          403  the rules of access refuse the request
    │       └── UnauthorizedError   401  the request has no key, or one that the server does not know
    ├── ServerUnavailableError 503  the server cannot generate now (no weights, torn weights, full queue)
    │   ├── ServerStoppingError     503  the server is shutting down
    │   └── SessionUnavailableError 503  the server cannot continue a session now: retry
    ├── SessionError           404  a request of a session was refused; the session is unchanged
    │   ├── SessionNotFoundError     404  there is no such session
    │   ├── SessionEndedError        410  the session has finished or expired
    │   ├── SessionLimitError        403  the session has used what its limits allow
    │   ├── SessionExistsError       409  another session has this id
    │   └── IdempotencyConflictError 409  the idempotency key came before with another body
    ├── WeightVersionError     409  the server does not serve the weight version that the request demands
    │   ├── VersionBehindError       409  not yet: retry, or ask another server
    │   └── VersionSupersededError   409  never again: do not retry
    ├── WeightUpdateError      400  the server refused an update and still serves the old weights
    │   ├── UnknownRegistrationError 404  the server does not have this registration: send the description
    │   └── UpdateConflictError      409  another transaction is open, or the caller's transaction is closed
    ├── ServerLaunchError      500  the server did not start; the message has the child's traceback and log tail
    ├── ServerDiedError        503  the server has ended, or the connection to it broke
    ├── ServerRestartedError   412  the server was started again; nothing was done: call heal() or accept_restart()
    └── ControlTimeoutError    504  a call exceeded its time limit; it was refused and will not be carried out
        └── UnansweredError    504  the server did not answer: it may or may not have carried out the call
"""

from __future__ import annotations

_MOST_CHARACTERS = 32 * 1024


class VerlServerError(Exception):
    """Base class of all errors that this package raises to its users."""

    status_code = 500
    """HTTP status of the error."""
    code: str | None = None
    """Name of the error in the bodies of answers, for programs. None: the status is all that a body says."""

    def __str__(self) -> str:
        """Return the message, cut where it is very long: it may contain what a caller sent."""
        message = super().__str__()
        if len(message) <= _MOST_CHARACTERS:
            return message
        return f"{message[:_MOST_CHARACTERS]}... ({len(message):,} characters)"


class BadRequestError(VerlServerError, ValueError):
    """The caller's input is wrong. Nothing was changed."""

    status_code = 400


class ContextLengthError(BadRequestError):
    """The prompt, or the prompt with the requested output, is longer than the context. Nothing was changed.

    The context is what the model, the KV cache, the server's settings and the session permit. Bodies of answers have
    `code`, in every dialect. The text begins as OpenAI's and Anthropic's do, because clients look for them.
    """

    code = "context_length_exceeded"

    @classmethod
    def of(cls, prompt_tokens: int, new_tokens: int, most: int, cause: str = "") -> ContextLengthError:
        """Return the error for a sequence of more than `most` tokens. `cause` says what limits it to `most`."""
        limit = f"This model's maximum context length is {most} tokens{f' ({cause})' if cause else ''}."
        if prompt_tokens >= most:
            return cls(
                f"prompt is too long: {prompt_tokens} tokens > {most - 1} maximum. {limit} However, the prompt has "
                f"{prompt_tokens} tokens, and the output needs at least one. Reduce the length of the prompt."
            )
        return cls(
            f"{limit} However, you requested {prompt_tokens + new_tokens} tokens: {prompt_tokens} in the prompt and "
            f"{new_tokens} for the output. Reduce the length of the prompt or of the output."
        )


class ForbiddenError(BadRequestError):
    """The request is refused by the rules of access. Nothing was changed."""

    status_code = 403


class UnauthorizedError(ForbiddenError):
    """The request has no key, or a key that the server does not know."""

    status_code = 401


class ServerUnavailableError(VerlServerError):
    """The server cannot generate now: it has no weights, its weights are torn, or its queue is full."""

    status_code = 503


class ServerStoppingError(ServerUnavailableError):
    """The server is shutting down."""


class SessionUnavailableError(ServerUnavailableError):
    """The server cannot continue a session now: its store is full, or its weights are not confirmed. Retry."""


class SessionBusyError(SessionUnavailableError):
    """As many generations run in the session as its limit permits: its own client asked for too many. Retry."""

    status_code = 429


class SessionError(VerlServerError):
    """A request of a session was refused. The session is unchanged."""

    status_code = 404


class SessionNotFoundError(SessionError):
    """There is no such session."""


class SessionEndedError(SessionError):
    """The session has finished or expired."""

    status_code = 410


class SessionLimitError(SessionError):
    """The session has used what its limits allow."""

    status_code = 403


class SessionExistsError(SessionError):
    """Another session has this id."""

    status_code = 409


class IdempotencyConflictError(SessionError):
    """The idempotency key was used before, with another request body."""

    status_code = 409


class WeightVersionError(VerlServerError):
    """The server does not serve the weight version that the request demands. No token was sampled."""

    status_code = 409


class VersionBehindError(WeightVersionError):
    """The server does not serve the demanded weight version yet. Retry, or send the request to another server."""

    code = "weight_version_behind"


class VersionSupersededError(WeightVersionError):
    """The demanded weight version was superseded: this run of the server will not serve it again. Do not retry."""

    code = "weight_version_superseded"


class WeightUpdateError(VerlServerError):
    """The server refused an update and still serves the old weights."""

    status_code = 400


class UnknownRegistrationError(WeightUpdateError):
    """The server does not have a registration with this id. Send the description."""

    status_code = 404


class UpdateConflictError(WeightUpdateError):
    """Another transaction is open, or the caller's transaction is closed."""

    status_code = 409


class ServerLaunchError(VerlServerError):
    """The server did not start. The message has the child's traceback and the end of its log."""

    status_code = 500


class ServerDiedError(VerlServerError, ConnectionError):
    """The server has ended, or the connection to it broke."""

    status_code = 503


class ServerRestartedError(VerlServerError):
    """The server was started again and may serve other weights. The call had no effect."""

    status_code = 412


class ControlTimeoutError(VerlServerError, TimeoutError):
    """A call exceeded its time limit. The server will not carry it out."""

    status_code = 504


class UnansweredError(ControlTimeoutError):
    """The server did not answer. It may or may not have carried out the call."""


def error_for_status(
    status_code: int, message: str, bad_request: type[VerlServerError] = BadRequestError, code: object = None
) -> VerlServerError:
    """Return an error for an HTTP status. `bad_request` is the class for a status 4xx that has no class of its own.

    `code` is the error's code in a body. The code of a class wins over the status. The error keeps any other name.
    """
    for named in (ContextLengthError, VersionBehindError, VersionSupersededError):
        if code == named.code:
            return named(message)
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
    if isinstance(code, str) and not code.isdecimal():
        error.code = code
    return error
