"""Exceptions. One class for each code of the wire, all under Error.

    Error
    ├── ApplicationError      the method raised; __cause__ is the original exception where its type is known here
    │   └── PanicError        the worker's method crashed in a way its language calls a panic
    ├── RefusedError          the receiver would not take it: bad argument, wrong state, no right
    ├── BusyError             a bounded queue is full; try again later
    ├── NotFoundError         no such role, method, object
    ├── ExistsError           the name is taken
    ├── ConflictError         somebody wrote in between
    ├── FencedError           a stale token
    ├── TimedOutError         the deadline passed (also a TimeoutError)
    ├── CancelledError        the caller gave up, or a sibling failed first
    ├── WorkerLostError       the worker is known to be dead
    ├── OutcomeUnknownError   it may or may not have happened
    ├── NoSpaceError          the head's store is full; nothing was written (also an OSError)
    ├── UnavailableError      the head cannot be reached (also a ConnectionError)
    ├── ClosedError           this side has been closed
    ├── VersionError          the peer speaks another version of the wire
    ├── MalformedError        the frame or body is not what the wire allows
    ├── InvalidError          the caller's own input is wrong; nothing was sent (also a ValueError)
    │   └── EncodeError       a value that cannot travel (also a TypeError)
    └── InternalError         a bug on the other side, or in the Go core
"""

from __future__ import annotations

from typing import Any

MOST_TEXT = 8 << 10  # bytes of a message; the core keeps no more than twice as many


class Error(Exception):
    """What went wrong with a call, and where."""

    code = "internal"

    def __init__(
        self,
        message: str = "",
        *,
        role: str = "",
        rank: int | None = None,
        node: str = "",
        method: str = "",
        remote_traceback: str = "",
        details: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.role = role
        self.rank = rank
        self.node = node
        self.method = method
        self.remote_traceback = remote_traceback
        self.details = details or {}

    @property
    def signal(self) -> str:
        """The signal that ended the worker ("SIGKILL"), or an empty text."""
        return self.details.get("signal", "")

    @property
    def exit_code(self) -> int | None:
        """The exit code of the worker's process, if it ended by one."""
        text = self.details.get("exit_code", "")
        return int(text) if text.lstrip("-").isdigit() else None

    @property
    def last_lines(self) -> list[str]:
        """The last lines that a lost worker printed."""
        return [line for line in self.details.get("last_lines", "").split("\n") if line]

    def __str__(self) -> str:
        where = self.role
        if where and self.rank is not None and self.rank >= 0:
            where += f"[{self.rank}]"
        if self.method:
            where = f"{where} {self.method}".strip()
        if self.node:
            where += f" on {self.node}"
        text = f"{where}: {self.message}" if where else self.message
        if self.remote_traceback:
            text += "\n--- the worker's traceback\n" + self.remote_traceback.rstrip()
        return text

    def _again(self) -> Error:
        """Another one like it, to be raised. What was raised refers to the frames that it went through, and they mostly to whoever
        keeps it: a circle, in which the arguments of the call would stay."""
        error = _rebuild(type(self), self.message, self.__dict__)
        error.__cause__ = self.__cause__
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, {k: v for k, v in self.__dict__.items() if k != "message"}))


def _rebuild(cls: type[Error], message: str, state: dict[str, Any]) -> Error:
    error = cls(message)
    error.__dict__.update(state)
    return error


class ApplicationError(Error):
    code = "application"


class PanicError(ApplicationError):
    code = "panic"


class RefusedError(Error):
    code = "refused"


class BusyError(Error):
    code = "busy"


class NotFoundError(Error):
    code = "not_found"


class ExistsError(Error):
    code = "exists"


class ConflictError(Error):
    code = "conflict"


class FencedError(Error):
    code = "fenced"


class TimedOutError(Error, TimeoutError):
    code = "timed_out"


class CancelledError(Error):
    code = "cancelled"


class WorkerLostError(Error):
    code = "worker_lost"


class OutcomeUnknownError(Error):
    code = "outcome_unknown"


class NoSpaceError(Error, OSError):
    code = "no_space"


class UnavailableError(Error, ConnectionError):
    code = "unavailable"


class ClosedError(Error):
    code = "closed"


class VersionError(Error):
    code = "version"


class MalformedError(Error):
    code = "malformed"


class InvalidError(Error, ValueError):
    code = "invalid"


class EncodeError(InvalidError, TypeError):
    pass


class InternalError(Error):
    code = "internal"


_CLASSES: dict[str, type[Error]] = {
    c.code: c
    for c in (
        ApplicationError, PanicError, RefusedError, BusyError, NotFoundError, ExistsError, ConflictError, FencedError,
        TimedOutError, CancelledError, WorkerLostError, OutcomeUnknownError, NoSpaceError, UnavailableError, ClosedError, VersionError,
        MalformedError, InvalidError, InternalError,
    )
}  # fmt: skip


def from_wire(fields: dict[str, Any]) -> Error:
    """The exception of an error as the wire says it."""
    cls = _CLASSES.get(fields.get("code", ""), InternalError)
    error = cls(
        fields.get("message", ""),
        role=fields.get("role", ""),
        rank=fields.get("rank", -1),
        node=fields.get("node", ""),
        method=fields.get("method", ""),
        remote_traceback=fields.get("stack", ""),
        details=fields.get("details") or {},
    )
    if error.rank is not None and error.rank < 0:
        error.rank = None
    return error


def from_body(body: Any) -> Error:
    """The exception of an encoded error. Bytes that are no text are shown as such: the reader of completions must not fail."""
    import msgpack

    return from_wire(msgpack.unpackb(body, strict_map_key=False, unicode_errors="backslashreplace", ext_hook=msgpack.ExtType))


def text_of(value: object, most: int = MOST_TEXT) -> str:
    """The text of a value, usually an exception, whatever its __str__ does: plain, encodable and bounded. Where there is none, it
    says which type has none, and why."""
    try:
        return plain(str(value), most)
    except BaseException as err:  # SystemExit too: a text that is asked for ends no process
        return f"a {type_name(value)} whose text cannot be shown: its __str__ raised {type_name(err)}"


def type_name(value: object) -> str:
    """The name of a value's type, which a metaclass or an assignment may have made into anything."""
    try:
        return plain(type(value).__qualname__, 256)
    except BaseException:
        return "value of a type without a name"


def plain(text: object, most: int = MOST_TEXT) -> str:
    """A text as one that can be encoded: lone surrogates are escaped, and what is longer than so many bytes loses its middle."""
    if not isinstance(text, str):
        raise TypeError(f"text of type {type(text).__name__}")
    length = str.__len__(text)
    if length > 2 * most:
        text = str.__getitem__(text, slice(most)) + str.__getitem__(text, slice(length - most, None))
    data = str.encode(text, "utf-8", "backslashreplace")
    if length <= 2 * most and len(data) <= most:
        return data.decode()
    half = most // 2
    return f"{data[:half].decode(errors='ignore')} … ({length} characters, cut) … {data[-half:].decode(errors='ignore')}"
