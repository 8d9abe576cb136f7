"""Exceptions across the border: what a worker raised, and what its caller sees of it."""

from __future__ import annotations

import sys
from typing import Any

from . import _errors


def describe(err: BaseException) -> dict[str, Any]:
    """An exception as the wire says it."""
    import traceback

    if isinstance(err, _errors.Error):
        text = str(err.message) if not err.role else str(err)
        return {"code": err.code, "message": text, "stack": _stack(err), "details": {**err.details, **_type(err)}, "rank": -1}
    code, message = "application", str(err)
    if isinstance(err, TypeError) and _is_call_mistake(err):
        code = "refused"
    if isinstance(err, (SyntaxError, ImportError)):
        message = "".join(traceback.format_exception_only(type(err), err)).strip()
    return {"code": code, "message": message or type(err).__name__, "stack": _stack(err), "details": _type(err), "rank": -1}


def _type(err: BaseException) -> dict[str, str]:
    kind = type(err)
    return {"type": kind.__qualname__, "module": kind.__module__}


def _stack(err: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(type(err), err, err.__traceback__))[-8000:]


def _is_call_mistake(err: TypeError) -> bool:
    """Whether the arguments did not fit: the error arose in the host's own call, before the method's first line."""
    tb = err.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_globals.get("__name__") in ("troupe.worker", "troupe._serve") and "argument" in str(err)


def chain(error: _errors.Error, trusted: bool) -> _errors.Error:
    """Gives an application's error its original exception as the cause, where its type is known here. A worker that was lost
    because its class could not be made has one too."""
    if error.code not in ("application", "refused", "panic", "worker_lost"):
        return error
    kind = _find(error.details.get("module", ""), error.details.get("type", ""), trusted)
    if kind is None:
        return error
    try:
        original = kind(error.message)
    except Exception:
        return error
    error.__cause__ = original
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
