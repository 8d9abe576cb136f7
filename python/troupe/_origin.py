"""Exceptions across the border: what a worker raised, and what its caller sees of it."""

from __future__ import annotations

import sys
from typing import Any

import msgpack

from . import _errors

_MOST_STACK = 8000  # bytes; the core keeps little more
_CODE = "application"


def describe(err: BaseException) -> dict[str, Any]:
    """An exception as the wire says it. It never fails: the exception is anybody's, and so are its __str__, its attributes and the type
    of each. What cannot be shown is named."""
    try:
        return _own(err) if issubclass(type(err), _errors.Error) else _others(err)
    except BaseException:  # an attribute of it is a trap
        return _fields(_CODE, _errors.text_of(err), "", _type(err))


def _own(err: Any) -> dict[str, Any]:
    text = _errors.text_of(err if err.role and isinstance(err.role, str) else err.message)
    details = {}
    if isinstance(err.details, dict):
        details = {_errors.text_of(k, 256): _errors.text_of(v) for k, v in list(err.details.items())[:64]}
    code = err.code if isinstance(err.code, str) else _CODE
    return _fields(_errors.plain(code, 64), text, _stack(err, text), {**details, **_type(err)})


def _others(err: BaseException) -> dict[str, Any]:
    code, message = _CODE, _errors.text_of(err)
    if issubclass(type(err), TypeError) and _is_call_mistake(err, message):
        code = "refused"
    if issubclass(type(err), (SyntaxError, ImportError)):
        message = _alone(err) or message
    return _fields(code, message or _errors.type_name(err), _stack(err, message), _type(err))


def _fields(code: str, message: str, stack: str, details: dict[str, str]) -> dict[str, Any]:
    return {"code": code, "message": message, "stack": stack, "details": details, "rank": -1}


def encode(err: BaseException) -> bytes:
    """An exception as the body of a failed call."""
    return bytes(msgpack.packb(describe(err)))


def _type(err: BaseException) -> dict[str, str]:
    try:
        module = _errors.plain(type(err).__module__, 256)
    except BaseException:
        module = ""
    return {"type": _errors.type_name(err), "module": module}


def _alone(err: BaseException) -> str:
    """The last lines of a traceback: of a syntax error also where it is."""
    import traceback

    try:
        return _errors.plain("".join(traceback.format_exception_only(type(err), err)).strip())
    except BaseException:
        return ""


def _stack(err: BaseException, message: str) -> str:
    """The traceback. Where the messages in it leave no room for its frames, or cannot be shown, the frames alone and the message."""
    import traceback

    try:
        text = "".join(traceback.format_exception(type(err), err, err.__traceback__))
        if len(text) <= 2 * _MOST_STACK:
            return _last(text)
    except BaseException:
        pass
    try:
        frames = _last(_frames(err), _MOST_STACK // 2)
        return f"Traceback (most recent call last):\n{frames}{_errors.type_name(err)}: {_errors.plain(message, _MOST_STACK // 4)}\n"
    except BaseException:
        return ""


def _frames(err: BaseException) -> str:
    """The frames of a traceback, without their lines where a file cannot be read for them."""
    import traceback

    try:
        return "".join(traceback.format_tb(err.__traceback__))
    except Exception:
        at = ((frame.f_code, line) for frame, line in traceback.walk_tb(err.__traceback__))
        return "".join(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n' for code, line in at)


def _last(text: str, most: int = _MOST_STACK) -> str:
    return text.encode("utf-8", "backslashreplace")[-most:].decode(errors="ignore")


def _is_call_mistake(err: BaseException, message: str) -> bool:
    """Whether the arguments did not fit: the error arose in the host's own call, before the method's first line."""
    tb = err.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_globals.get("__name__") in ("troupe.worker", "troupe._serve") and "argument" in message


def chain(error: _errors.Error, trusted: bool) -> _errors.Error:
    """Gives an application's error its original exception as the cause, where its type is known here. A worker that was lost
    because its class could not be made has one too."""
    if error.code not in ("application", "refused", "panic", "worker_lost"):
        return error
    try:
        kind = _find(error.details.get("module", ""), error.details.get("type", ""), trusted)
        if kind is not None:
            error.__cause__ = kind(error.message)
    except (Exception, SystemExit):  # what is done here for a name or a text is its module's
        pass
    return error


def _find(module: str, name: str, trusted: bool) -> type[Exception] | None:
    found: Any = sys.modules.get(module)
    if found is None and trusted and module:
        import importlib

        try:
            found = importlib.import_module(module)
        except Exception:
            return None
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, _errors.Error):
        return found
    return None
