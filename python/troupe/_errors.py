"""Exceptions. One class for each code of the wire, all under Error.

    Error
    ├── ApplicationError      the method raised; the error is also an instance of the original type where that is known here
    │   └── PanicError        the worker's method crashed in a way its language calls a panic
    ├── RefusedError          the receiver would not take it: bad argument, wrong state, no right
    ├── BusyError             a bounded queue is full; try again later
    ├── NotFoundError         no such role, method, object
    ├── ExistsError           the name is taken
    ├── ConflictError         another process wrote in between
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

from . import _traceback

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

    @property
    def original(self) -> BaseException | None:
        """The exception that the remote method raised, rebuilt here; None if its type is not known here, or none was raised."""
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
        """The message behind the name of the remote exception's type, if there was one."""
        name = str(self.details.get("type", ""))
        message = self.message if isinstance(self.message, str) else text_of(self.message)
        lost = f" ({self.details['not_rebuilt']})" if self.details.get("not_rebuilt") else ""
        if not name or not isinstance(name, str) or name == type(self).__name__ or name in message.partition("\n")[0]:
            return message + lost
        return f"{name}: {message}{lost}"

    def _again(self) -> Error:
        """A copy to be raised. A raised exception refers to the frames that it passed, and those often to the future that keeps the
        original: a reference cycle that would keep the arguments of the call alive."""
        return _rebuild(type(self), self.message, self.__dict__)._caused_by(self.__cause__)

    def _caused_by(self, cause: BaseException | None) -> Error:
        if cause is not None:
            self.__cause__ = cause
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, {k: v for k, v in self.__dict__.items() if k != "message"}))


def _rebuild(cls: type[Error], message: str, state: dict[str, Any]) -> Error:
    error = cls(message)
    error.__dict__.update(state)
    return error


class _Dual:
    """Mixed into the class of an error that is also of the type that the remote method raised. `_error` is the error without that
    type; attributes of the original exception take precedence over the error's own."""

    _error: Error
    _original: BaseException

    @property
    def original(self) -> BaseException:
        return self._original

    def __str__(self) -> str:
        return str(self._error)

    def _again(self) -> Error:
        return with_original(self._error, self._original)

    def __reduce__(self) -> tuple[Any, ...]:
        return (with_original, (self._error, self._original))


_duals: dict[tuple[type, type], type] = {}


def with_original(error: Error, original: BaseException) -> Error:
    """The error as an instance of the original exception's class too, so that `except ValueError` catches it. It has the original's
    arguments, attributes and __cause__. Where Python cannot make such a class, the original is the __cause__ of the error."""
    try:
        dual: Any = _new(_dual_class(type(error), type(original)), original.args)
        dual.__dict__.update({**error.__dict__, **original.__dict__, "_error": error, "_original": original})
        copy_fields(fields_of(original), dual)
        dual.__cause__ = original.__cause__
        dual.__suppress_context__ = True
        result: Error = dual
        return result
    except Exception as err:  # a metaclass, __init_subclass__ or __slots__ of the original's class
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


def _new(kind: type, args: tuple[Any, ...]) -> BaseException:
    """An exception with these arguments, made without its class's own constructor, which may take others."""
    builtin: Any = next(c for c in kind.__mro__ if c.__module__ == "builtins")
    try:
        made: BaseException = builtin.__new__(kind, *args)
        builtin.__init__(made, *args)
    except TypeError:  # a class such as UnicodeDecodeError whose subclass gave other arguments
        made = BaseException.__new__(kind, *args) if builtin in (Exception, BaseException) else builtin.__new__(kind)
    made.args = args
    return made


_MOST_DUALS = 1000


def _field_names(err: BaseException) -> tuple[str, ...]:
    """Attributes of built-in types that are neither arguments nor in __dict__."""
    return ("name", "path") if isinstance(err, ImportError) else ("filename", "filename2") if isinstance(err, OSError) else ()


def fields_of(err: BaseException) -> dict[str, Any]:
    return {name: value for name in _field_names(err) if (value := getattr(err, name, None)) is not None}


def copy_fields(fields: dict[str, Any], err: BaseException) -> None:
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
