"""Exceptions: one class for each error code of the wire, all derived from Error.

Error
├── ApplicationError      the method raised; the error is also an instance of the original type, if that type is known
here │   └── PanicError        the worker's method crashed in a way that its language calls a panic ├── RefusedError
the receiver rejected the request: bad argument, wrong state, missing permission ├── BusyError             a bounded
queue is full; try again later ├── NotFoundError         the role, method or object does not exist ├── ExistsError
the name is taken ├── ConflictError         another process wrote in between ├── FencedError           the token is
stale ├── TimedOutError         the deadline passed (also a TimeoutError) ├── CancelledError        the caller cancelled
the call, or a sibling failed first ├── WorkerLostError       the worker is known to be dead ├── OutcomeUnknownError
the operation may or may not have taken effect ├── NoSpaceError          the head's store is full; nothing was written
(also an OSError) ├── UnavailableError      the head cannot be reached (also a ConnectionError) ├── ClosedError
this side has been closed ├── VersionError          the peer uses another version of the wire protocol ├──
MalformedError        the frame or body violates the wire protocol ├── InvalidError          the caller's input is
wrong; nothing was sent (also a ValueError) │   └── EncodeError       the value cannot be encoded (also a TypeError) └──
InternalError         a bug on the other side, or in the Go core
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _traceback

MOST_TEXT = 8 << 10  # bytes of a message; the core keeps at most twice as many


class Error(Exception):
    """The failure of a call or another operation: what went wrong, and in which role, rank, node and method."""

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
        """The signal that killed the worker ("SIGKILL"), or an empty string."""
        return self.details.get("signal", "")

    @property
    def exit_code(self) -> int | None:
        """The exit code of the worker's process, or None if it did not exit with one."""
        text = self.details.get("exit_code", "")
        return int(text) if text.lstrip("-").isdigit() else None

    @property
    def last_lines(self) -> list[str]:
        """The last lines that a lost worker printed."""
        return [line for line in self.details.get("last_lines", "").split("\n") if line]

    @property
    def original(self) -> BaseException | None:
        """The exception that the remote method raised, rebuilt here. None if its type is not known here, or if no
        method raised."""
        return None

    def __str__(self) -> str:
        where = self.role
        if where and self.rank is not None and self.rank >= 0:
            where += f"[{self.rank}]"
        if self.method:
            where = f"{where} {self.method}".strip()
        if self.node:
            where += f" on {self.node}"
        text = f"{where}: {self._typed_message()}" if where else self._typed_message()
        if self.remote_traceback:
            text += "\n--- the worker's traceback\n" + _traceback.fold_text(self.remote_traceback).rstrip()
        return text

    def _typed_message(self) -> str:
        """Returns the message, preceded by the type name of the remote exception if there was one."""
        name = str(self.details.get("type", ""))
        message = self.message if isinstance(self.message, str) else text_of(self.message)
        lost = f" ({self.details['not_rebuilt']})" if self.details.get("not_rebuilt") else ""
        if not name or not isinstance(name, str) or name == type(self).__name__ or name in message.partition("\n")[0]:
            return message + lost
        return f"{name}: {message}{lost}"

    def _again(self) -> Error:
        """Returns a copy to raise. A raised exception refers to the frames that it passed, and these often refer to the
        future that keeps the original: a reference cycle that would keep the arguments of the call alive."""
        return _rebuild(type(self), self.message, self.__dict__)._caused_by(self.__cause__)

    def _caused_by(self, cause: BaseException | None) -> Error:
        if cause is not None:
            self.__cause__ = cause
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, {k: v for k, v in self.__dict__.items() if k != "message"}))


def _rebuild(cls: type[Error], message: str, state: Mapping[str, object]) -> Error:
    error = cls(message)
    error.__dict__.update(state)
    return error


class _Dual:
    """Mixin for an error that is also an instance of the type that the remote method raised. `_error` is the error
    without that type. Attributes of the original exception take precedence over those of the error."""

    _error: Error
    _original: BaseException

    @property
    def original(self) -> BaseException:
        return self._original

    def __str__(self) -> str:
        return str(self._error)

    def _again(self) -> Error:
        return with_original(self._error, self._original)

    def __reduce__(self) -> tuple[object, ...]:
        return (with_original, (self._error, self._original))


_duals: dict[tuple[type, type], type] = {}


def with_original(error: Error, original: BaseException) -> Error:
    """Returns the error as an instance of the original exception's class too, so that `except ValueError` catches it.
    It has the original's arguments, attributes and __cause__. If Python cannot create such a class, returns the error
    with the original as its __cause__."""
    try:
        dual: Any = _new(_dual_class(type(error), type(original)), original.args)
        dual.__dict__.update({**error.__dict__, **original.__dict__, "_error": error, "_original": original})
        copy_fields(fields_of(original), dual)
        dual.__cause__ = original.__cause__
        dual.__suppress_context__ = True
        result: Error = dual
        return result
    except Exception as err:  # a metaclass, __init_subclass__ or __slots__ of the original's class prevents it
        name = type_name(original)
        error.details = {**error.details, "not_rebuilt": f"`except {name}` does not catch this: {text_of(err, 200)}"}
        return error._caused_by(original)


def _dual_class(kind: type[Error], original: type[BaseException]) -> type:
    found = _duals.get((kind, original))
    if found is None:
        if len(_duals) >= _MOST_DUALS:
            _duals.clear()
        name = f"{kind.__name__}[{original.__qualname__}]"
        found = type(name, (_Dual, kind, original), {"__module__": "troupe", "__qualname__": name})
        _duals[kind, original] = found
    return found


def _new(kind: type, args: tuple[object, ...]) -> BaseException:
    """Creates an exception with these arguments without calling its class's own constructor, which may take others."""
    builtin: Any = next(c for c in kind.__mro__ if c.__module__ == "builtins")
    # MemoryError.__new__ refuses classes whose first base is another; they have the layout of every exception.
    allocate: Any = BaseException if builtin is MemoryError and issubclass(kind, Error) else builtin
    try:
        made: BaseException = allocate.__new__(kind, *args)
        builtin.__init__(made, *args)
    except TypeError:  # a subclass of a class such as UnicodeDecodeError with other arguments
        made = BaseException.__new__(kind, *args) if builtin in (Exception, BaseException) else builtin.__new__(kind)
    made.args = args
    return made


_MOST_DUALS = 1000


def _field_names(err: BaseException) -> tuple[str, ...]:
    """Returns the attributes of built-in types that are neither arguments nor in __dict__."""
    return (
        ("name", "path")
        if isinstance(err, ImportError)
        else ("filename", "filename2")
        if isinstance(err, OSError)
        else ()
    )


def fields_of(err: BaseException) -> dict[str, object]:
    return {name: value for name in _field_names(err) if (value := getattr(err, name, None)) is not None}


def copy_fields(fields: Mapping[str, object], err: BaseException) -> None:
    for name in _field_names(err):
        if name in fields:
            setattr(err, name, fields[name])


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


class MembershipChanged(WorkerLostError):
    """A rank that ran the call was replaced, on request or because it stalled. The call may have run, and is not made
    again."""

    @property
    def left(self) -> list[int]:
        """The ranks whose processes have left the role."""
        return [int(rank) for rank in self.details.get("left", "").split(",") if rank]

    @property
    def came(self) -> list[int]:
        """The ranks that get another process, with the next generation: the same ones."""
        return self.left


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
        ApplicationError,
        PanicError,
        RefusedError,
        BusyError,
        NotFoundError,
        ExistsError,
        ConflictError,
        FencedError,
        TimedOutError,
        CancelledError,
        WorkerLostError,
        OutcomeUnknownError,
        NoSpaceError,
        UnavailableError,
        ClosedError,
        VersionError,
        MalformedError,
        InvalidError,
        InternalError,
    )
}


def from_wire(fields: dict[str, Any]) -> Error:
    """Creates the exception for an error in wire format."""
    cls = _CLASSES.get(fields.get("code", ""), InternalError)
    if cls is WorkerLostError and "left" in (fields.get("details") or {}):
        cls = MembershipChanged
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


def from_body(body: object) -> Error:
    """Creates the exception for an encoded error. Invalid UTF-8 is escaped, because the reader of completions must not
    fail."""
    import msgpack

    return from_wire(
        msgpack.unpackb(body, strict_map_key=False, unicode_errors="backslashreplace", ext_hook=msgpack.ExtType)
    )


def text_of(value: object, most: int = MOST_TEXT) -> str:
    """Returns the text of a value, usually an exception, whatever its __str__ does: encodable and bounded. If __str__
    fails, the text says which type failed and why."""
    try:
        return plain(str(value), most)
    except BaseException as err:  # SystemExit too: formatting a message must not end the process
        return f"a {type_name(value)} whose text cannot be shown: its __str__ raised {type_name(err)}"


def type_name(value: object) -> str:
    """Returns the name of a value's type, which a metaclass or an assignment may have replaced by anything."""
    try:
        return plain(type(value).__qualname__, 256)
    except BaseException:
        return "value of a type without a name"


def plain(text: object, most: int = MOST_TEXT) -> str:
    """Makes a text encodable: escapes lone surrogates, and cuts the middle out of a text longer than `most` bytes."""
    if not isinstance(text, str):
        raise TypeError(f"text of type {type(text).__name__}")
    length = str.__len__(text)
    if length > 2 * most:
        text = str.__getitem__(text, slice(most)) + str.__getitem__(text, slice(length - most, None))
    data = str.encode(text, "utf-8", "backslashreplace")
    if length <= 2 * most and len(data) <= most:
        return data.decode()
    half = most // 2
    return (
        f"{data[:half].decode(errors='ignore')} … ({length} characters, cut) … {data[-half:].decode(errors='ignore')}"
    )
