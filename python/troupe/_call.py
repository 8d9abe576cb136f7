"""The call that code in this process serves: its metadata from the core, and access to it."""

from __future__ import annotations

import time
from contextvars import ContextVar

from . import _core, _errors
from ._seam import META_NO_DATA, CallMeta

_TRACE, _SHARED = CallMeta.trace, CallMeta.flags  # what calls of one caller to one method share begins with the flags
unpack = CallMeta.layout.unpack_from  # sequence, deadline, length of the trace, flags, lengths of the texts


def key_of(meta: bytes) -> bytes:
    """Returns the part of the metadata that all calls of one caller to one method share: all but sequence, deadline and
    trace. A trace of 256 bytes or more would stay part of it."""
    return meta[_SHARED : len(meta) - meta[_TRACE]]


def id_of(meta: bytes) -> tuple[str, int]:
    """Returns the caller's session and the number of the call there."""
    sequence, _, _, _, session, _, _, _ = unpack(meta)
    return meta[CallMeta.size : CallMeta.size + session].decode(errors="replace"), sequence


def trace_of(meta: bytes) -> str:
    """Returns the traceparent of a call."""
    return meta[len(meta) - meta[_TRACE] :].decode(errors="replace") if meta[_TRACE] else ""


class IncomingCall:
    """A call that this process serves. `_token` is its number in the core."""

    __slots__ = ("_core", "_meta", "_token", "method", "no_data", "object")

    def __init__(self, core: _core.Core, token: int, meta: bytes) -> None:
        self._core = core
        self._token = token
        self._meta = meta
        _, _, _, flags, k, n, m, _ = unpack(meta)
        at = CallMeta.size + k
        self.method = meta[at : at + n].decode()
        self.object = meta[at + n : at + n + m].decode() if m else ""
        self.no_data = bool(flags & META_NO_DATA)

    def _text(self, i: int) -> str:
        _, _, trace, _, *lengths = unpack(self._meta)
        lengths.append(trace)
        start = CallMeta.size + sum(lengths[:i])
        return self._meta[start : start + lengths[i]].decode(errors="replace")

    @property
    def caller(self) -> str:
        """A readable description of the caller."""
        return self._text(3)

    @property
    def session(self) -> str:
        """The caller's session id."""
        return self._text(0)

    @property
    def trace(self) -> str:
        """The W3C traceparent of this execution of the method if traces are exported, otherwise that of the caller; or
        an empty string."""
        return self._text(4)

    @property
    def remaining(self) -> float | None:
        """Seconds until the call's deadline; None without a deadline."""
        end: int = unpack(self._meta)[1]
        return end / 1e6 - time.time() if end else None

    @property
    def deadline(self) -> float | None:
        """The call's deadline on the clock of time.monotonic(); None without one."""
        left = self.remaining
        return None if left is None else time.monotonic() + left

    @property
    def cancelled(self) -> bool:
        """Whether the caller cancelled the call, its deadline has passed, or the worker is stopping. The core updates
        it while Python computes."""
        return self._token in aborted or int(self._core.lib.troupe_cancelled(self._token)) != 0

    def check(self) -> None:
        """Raises CancelledError if the call should end. It is for loops in long-running methods."""
        if self.cancelled:
            raise _errors.CancelledError("the call was cancelled")


# Tokens of calls whose pipeline item was aborted. Their methods may still return a partial result.
aborted: set[int] = set()

# The arguments of IncomingCall for the call that the current context serves. The object is created only when code asks
# for it.
current: ContextVar[tuple[_core.Core, int, bytes] | None] = ContextVar("troupe_call", default=None)
