"""The trace that calls and spans of this process continue.

A trace is continued through this process by the core. Where a program has loaded opentelemetry-api, its current span is the parent of calls
and spans, and runs and spans of Troupe are its current span while their code runs. It is never imported here."""

from __future__ import annotations

import ctypes
import struct
import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from . import _call

if TYPE_CHECKING:
    from contextvars import Token

    from . import _core

_WHERE = struct.Struct("<QQ")
_ROOM = 64  # a traceparent has 55 bytes

# The number of the innermost open span of the current context; 0: none.
span: ContextVar[int] = ContextVar("troupe_span", default=0)


def where() -> bytes:
    """Where code makes a call or begins a span, as the core reads it (scopeOf in cmd/libtroupe); empty: nowhere in particular."""
    serving, number = _call.current.get(), span.get()
    telemetry = sys.modules.get("opentelemetry.trace")
    parent = b"" if telemetry is None else _parent(telemetry)
    if serving is None and not number and not parent:
        return b""
    return _WHERE.pack(0 if serving is None else serving[1], number) + parent


def _parent(telemetry: Any) -> bytes:
    """The traceparent of OpenTelemetry's current span; empty: there is none."""
    try:
        context = telemetry.get_current_span().get_span_context()
        return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags) if context.is_valid else b""
    except Exception:  # a module of that name that is something else, or is being imported: no reason to fail a call
        return b""


def attach(traceparent: str) -> Any:
    """Makes a span of Troupe the current one of OpenTelemetry; the result is for detach. None: the program has not loaded it."""
    telemetry, context = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.context")
    if telemetry is None or context is None:
        return None
    try:
        _, trace_id, span_id, flags = traceparent.split("-")[:4]
        made = telemetry.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=telemetry.TraceFlags(int(flags, 16)))
        return context.attach(telemetry.set_span_in_context(telemetry.NonRecordingSpan(made)))
    except Exception:  # as above, or a caller's text that is no traceparent
        return None


def detach(token: Any) -> None:
    """Ends what attach began."""
    if token is not None:
        sys.modules["opentelemetry.context"].detach(token)


def enter(core: _core.Core, number: int) -> tuple[Token[int], Any]:
    """Makes a span the parent of what follows in this context; the result is for leave."""
    attached = None
    if "opentelemetry.trace" in sys.modules:
        text = ctypes.create_string_buffer(_ROOM)
        n = core.lib.troupe_span_trace(number, text, _ROOM)
        if 0 < n <= _ROOM:
            attached = attach(text.raw[:n].decode())
    return span.set(number), attached


def leave(marks: tuple[Token[int], Any]) -> None:
    """Ends what enter began."""
    try:
        span.reset(marks[0])
    except ValueError:  # it ends in another context than it began in, which has not seen it
        pass
    detach(marks[1])
