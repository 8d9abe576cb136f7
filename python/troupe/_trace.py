"""The trace that calls and spans of this process continue.

The core carries a trace through this process. If the program has loaded opentelemetry-api, its current span is the
parent of calls and spans, and Troupe's method executions and spans become its current span while their code runs. This
module never imports it.
"""

from __future__ import annotations

import ctypes
import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from . import _call
from ._seam import CallScope

if TYPE_CHECKING:
    from contextvars import Token

    from . import _core

_ROOM = 64  # bytes; a traceparent has 55

# The number of the innermost open span of the current context; 0: none.
span: ContextVar[int] = ContextVar("troupe_span", default=0)


def where() -> bytes:
    """Encodes the context of a call or a new span for the core (a CallScope); empty if there is none."""
    serving, number = _call.current.get(), span.get()
    telemetry = sys.modules.get("opentelemetry.trace")
    parent = b"" if telemetry is None else _parent(telemetry)
    if serving is None and not number and not parent:
        return b""
    return CallScope.layout.pack(0 if serving is None else serving[1], number) + parent


def _parent(telemetry: Any) -> bytes:
    """Returns the traceparent of OpenTelemetry's current span, or b""."""
    try:
        context = telemetry.get_current_span().get_span_context()
        return (
            b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)
            if context.is_valid
            else b""
        )
    except Exception:  # another module of that name, or one still being imported: the call must not fail
        return b""


def attach(traceparent: str) -> object:
    """Makes a span of Troupe the current one of OpenTelemetry. Returns a token for detach; None if the program has not
    loaded OpenTelemetry."""
    telemetry, context = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.context")
    if telemetry is None or context is None:
        return None
    try:
        _, trace_id, span_id, flags = traceparent.split("-")[:4]
        made = telemetry.SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=telemetry.TraceFlags(int(flags, 16))
        )
        return context.attach(telemetry.set_span_in_context(telemetry.NonRecordingSpan(made)))
    except Exception:  # as above, or the caller sent an invalid traceparent
        return None


def detach(token: object) -> None:
    """Undoes attach."""
    if token is not None:
        sys.modules["opentelemetry.context"].detach(token)


def enter(core: _core.Core, number: int) -> tuple[Token[int], object]:
    """Makes a span the parent of what follows in this context. Returns the argument for leave."""
    attached = None
    if "opentelemetry.trace" in sys.modules:
        text = ctypes.create_string_buffer(_ROOM)
        n = core.lib.troupe_span_trace(number, text, _ROOM)
        if 0 < n <= _ROOM:
            attached = attach(text.raw[:n].decode())
    return span.set(number), attached


def leave(marks: tuple[Token[int], object]) -> None:
    """Undoes enter."""
    try:
        span.reset(marks[0])
    except ValueError:  # the span ends in a context other than the one it began in
        pass
    detach(marks[1])
