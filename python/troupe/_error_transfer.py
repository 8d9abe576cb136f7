"""Transfers exceptions between processes: a worker describes what was raised, and its caller rebuilds it."""

from __future__ import annotations

import sys
from typing import Any

import msgpack

from . import _codec, _errors

_MOST_STACK = 8000  # bytes; the core keeps little more
_MOST_STATE = 10_000  # bytes of arguments and attributes; the core keeps 16 KiB of each detail
_MOST_VALUE = 4_000  # bytes of one argument or attribute
_MOST_PARTS = 32
_MOST_CAUSES = 8
_NOT_SENT = {"__notes__"}  # notes are part of the traceback
_CODE = "application"


def describe(err: BaseException, codec: _codec.Codec | None = None) -> dict[str, Any]:
    """Describes an exception in wire format. It never fails, although the exception's __str__, its attributes and their
    types are arbitrary user code: a part that cannot be shown is named instead."""
    try:
        ours = issubclass(type(err), _errors.Error)
        fields = _own(err) if ours else _others(err)
        raised = getattr(err, "_original", None) if ours else err
        if raised is not None:
            fields["details"] = {**fields["details"], **_type(raised), **_state(raised, codec or _codec.Codec())}
        return fields
    except BaseException:  # one of its attributes raises
        return _fields(_CODE, _errors.text_of(err), "", _type(err))


def _own(err: Any) -> dict[str, Any]:
    err = getattr(err, "_error", err)  # unwraps an error that is also an instance of the original's type
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


def encode(err: BaseException, codec: _codec.Codec | None = None) -> bytes:
    """Encodes an exception as the body of a failed call; codec is the one for the caller's values."""
    return bytes(msgpack.packb(describe(err, codec)))


def _type(err: BaseException) -> dict[str, str]:
    try:
        module = _errors.plain(type(err).__module__, 256)
    except BaseException:
        module = ""
    return {"type": _errors.type_name(err), "module": module}


def _alone(err: BaseException) -> str:
    """Returns the last lines of a traceback, which for a syntax error include its location."""
    import traceback

    try:
        return _errors.plain("".join(traceback.format_exception_only(type(err), err)).strip())
    except BaseException:
        return ""


def _stack(err: BaseException, message: str) -> str:
    """Returns the traceback. If its messages leave no room for the frames, or cannot be shown, returns the frames and
    the message only."""
    import traceback

    try:
        text = "".join(traceback.format_exception(type(err), err, err.__traceback__))
        if len(text) <= 2 * _MOST_STACK:
            return _last(text)
    except BaseException:
        pass
    try:
        frames = _last(_frames(err), _MOST_STACK // 2)
        return (
            f"Traceback (most recent call last):\n{frames}{_errors.type_name(err)}: "
            f"{_errors.plain(message, _MOST_STACK // 4)}\n"
        )
    except BaseException:
        return ""


def _frames(err: BaseException) -> str:
    """Formats the frames of a traceback, without source lines if a file cannot be read."""
    import traceback

    try:
        return "".join(traceback.format_tb(err.__traceback__))
    except Exception:
        at = ((frame.f_code, line) for frame, line in traceback.walk_tb(err.__traceback__))
        return "".join(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n' for code, line in at)


def _last(text: str, most: int = _MOST_STACK) -> str:
    return text.encode("utf-8", "backslashreplace")[-most:].decode(errors="ignore")


def _is_call_mistake(err: BaseException, message: str) -> bool:
    """Returns whether the arguments did not fit the method: the error arose in the host's own call, before the method's
    first line."""
    tb = err.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return (
        tb is not None
        and tb.tb_frame.f_globals.get("__name__") in ("troupe.worker", "troupe._serve")
        and "argument" in message
    )


# The state of an exception: its arguments, attributes and causes, in the details of its error.


def _state(err: BaseException, codec: _codec.Codec) -> dict[str, str]:
    """Returns the details from which the caller rebuilds the exception; empty if they cannot be read. Arguments and
    attributes that cannot be sent are replaced by their text and listed."""
    import base64

    try:
        lost: list[str] = []
        chain: list[list[Any]] = []
        one: BaseException | None = err
        while one is not None and len(chain) < _MOST_CAUSES:
            module, name = _type(one)["module"], _type(one)["type"]
            args = [
                _sendable(codec, arg, f"argument {i + 1} of {name}", lost)
                for i, arg in enumerate(list(one.args)[:_MOST_PARTS])
            ]
            fields = list({**one.__dict__, **_errors.fields_of(one)}.items())[:_MOST_PARTS]
            state = {k: _sendable(codec, v, f"attribute {k} of {name}", lost) for k, v in fields if k not in _NOT_SENT}
            chain.append([module, name, args, state])
            one = one.__cause__
        body = codec.encode(chain)
        data = body if isinstance(body, bytes) else body.join()
        if len(data) > _MOST_STATE:
            return {"not_rebuilt": "its arguments and attributes are too large to be sent"}
        out = {"exception": base64.b64encode(data).decode()}
        return {**out, "not_rebuilt": _errors.plain("; ".join(lost), 1000)} if lost else out
    except BaseException:  # attributes and their types are user code
        return {}


def _sendable(codec: _codec.Codec, value: object, what: str, lost: list[str]) -> object:
    """Returns the value, or its text if it cannot be sent."""
    why = "could not be sent"
    try:
        body = codec.encode(value)
        if len(body) <= _MOST_VALUE:
            codec.decode(bytearray(body if isinstance(body, bytes) else body.join()))
            return value
        why = f"is too large to be sent ({len(body)} bytes)"
    except BaseException:
        pass
    lost.append(f"{what}, a {_errors.type_name(value)}, {why}")
    return _errors.text_of(value, 200)


def rebuild(error: _errors.Error, codec: _codec.Codec) -> _errors.Error:
    """Returns the error as an instance of the original exception's type too, if that type is known here. The error's
    message says what could not be rebuilt."""
    packed = error.details.pop("exception", "")
    if error.code not in ("application", "refused", "panic", "worker_lost") or not error.details.get("type"):
        return error
    try:
        original = _rebuild_chain(_unpack(packed, codec) or [_from_text(error)], codec)
    except (Exception, SystemExit) as err:  # runs code of the exception's module
        return _not_rebuilt(error, f"it could not be rebuilt here: {_errors.text_of(err, 200)}")
    if original is None:
        module, name = error.details.get("module", ""), error.details["type"]
        if module in ("builtins", "troupe", "troupe._errors"):
            return error  # SystemExit and the like, or a Troupe error
        return _not_rebuilt(
            error, f"its type {module}.{name} is not known here" if module else "its type is not known here"
        )
    return _errors.with_original(error, original)


def _not_rebuilt(error: _errors.Error, why: str) -> _errors.Error:
    error.details["not_rebuilt"] = "; ".join(t for t in (error.details.get("not_rebuilt", ""), why) if t)
    return error


def _from_text(error: _errors.Error) -> list[object]:
    return [error.details.get("module", ""), error.details.get("type", ""), [error.message], {}]


def _unpack(packed: str, codec: _codec.Codec) -> list[object]:
    import base64

    try:
        return list(codec.decode(bytearray(base64.b64decode(packed)))) if packed else []
    except Exception:
        return []


def _rebuild_chain(chain: list[Any], codec: _codec.Codec) -> BaseException | None:
    """Returns the first exception of the chain with the others as its causes, or None if its type is not known here."""
    cause: BaseException | None = None
    for module, name, args, state in reversed(chain):
        kind = _find(module, name, codec.pickle)
        if kind is None:
            if chain[0][:2] == [module, name]:
                return None
            cause = _errors.ApplicationError(
                ": ".join([name, *(_errors.text_of(a) for a in args)]), details={"type": name, "module": module}
            )
            continue
        one = _errors._new(kind, tuple(args))
        _errors.copy_fields(state, one)
        one.__dict__.update({k: v for k, v in state.items() if k not in _errors.fields_of(one)})
        if cause is not None:
            one.__cause__ = cause
        cause = one
    return cause


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
