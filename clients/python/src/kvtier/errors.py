"""What a call can fail with: one exception a status code of the API, with what to do about it.

The codes and their meaning are those of docs/api.md. A cache miss is never an error, and for an
engine almost every error means the same: go on as after a miss. The classes are there for those
that need more (attach again, ask for quiescence, fix the program).
"""

from __future__ import annotations

from typing import Any

import grpc


class KvtierError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: the name of the status, "NOT_FOUND".
        text: what the daemon (or this package) said, without the advice.
        advice: what the caller should do.
        is_of_attach: as a session's `last_error`: Attach itself got this in place of a session, and
            the daemon had answered what goes before it. So it is there and answers, and what it
            does not take, or not in time, is the regions.
    """

    code = "UNKNOWN"
    advice = "report it"
    is_of_attach = False

    def __init__(self, text: str, *, advice: str | None = None) -> None:
        self.text = text
        if advice is not None:
            self.advice = advice
        super().__init__(text)

    def __str__(self) -> str:
        return f"{self.text} ({self.code}: {self.advice})"


class InvalidArgument(KvtierError):
    """The call can never work; the text names the field and the limit."""

    code = "INVALID_ARGUMENT"
    advice = "fix the program, do not retry"


class NotFound(KvtierError):
    """No such namespace, session, lease or ticket."""

    code = "NOT_FOUND"
    advice = "go on as after a miss; for a session wait until it is attached again"


class FailedPrecondition(KvtierError):
    """A handle of an earlier session or daemon, or a version that is not spoken."""

    code = "FAILED_PRECONDITION"
    advice = "look up again with all tokens once the session is attached"


#: Raised without asking the daemon for a handle of an earlier generation of the session.
StaleHandle = FailedPrecondition


class ResourceExhausted(KvtierError):
    """Over a limit at this moment."""

    code = "RESOURCE_EXHAUSTED"
    advice = "go on as after a miss, retry later with less"


class DeadlineExceeded(KvtierError):
    """Not answered in time. Memory of an operation stays the daemon's until `Op.finished()`."""

    code = "DEADLINE_EXCEEDED"
    advice = "go on as after a miss; blocks of an operation may be reused once it is finished"


class Cancelled(KvtierError):
    """The caller cancelled. Memory of an operation stays the daemon's until `Op.finished()`."""

    code = "CANCELLED"
    advice = "blocks of the operation may be reused once it is finished"


class Aborted(KvtierError):
    """Ticket or lease ended meanwhile, or the namespace was reset."""

    code = "ABORTED"
    advice = "forget the handle, go on as after a miss"


class Unavailable(KvtierError):
    """The daemon stops, is gone, or was never there."""

    code = "UNAVAILABLE"
    advice = "compute without the cache; sessions attach again by themselves"


class NotAttached(Unavailable):
    """The session has no daemon at this moment; it attaches again by itself."""


class PermissionDenied(KvtierError):
    """An admin verb on the main socket, or somebody else's handle."""

    code = "PERMISSION_DENIED"
    advice = "use the admin socket, or your own handle"


class Unimplemented(KvtierError):
    """The daemon does not know the method, or the message was compressed."""

    code = "UNIMPLEMENTED"
    advice = "update the daemon"


class Internal(KvtierError):
    """A bug in the daemon."""

    code = "INTERNAL"
    advice = "report it"


_BY_CODE: dict[grpc.StatusCode, type[KvtierError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.INTERNAL: Internal,
}


def from_status(code: grpc.StatusCode, details: str | None) -> KvtierError:
    """The exception of a gRPC status; a code that the API does not use is a KvtierError."""
    text = details or "the daemon gave no reason"
    found = _BY_CODE.get(code)
    if found is not None:
        return found(text)
    error = KvtierError(text)
    error.code = code.name
    return error


def from_rpc(error: Any) -> KvtierError:
    """The exception of the grpc.RpcError that a call raised; such an error is the call, too, and
    knows its status."""
    return from_status(error.code(), error.details())
