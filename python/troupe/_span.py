"""Spans: sections of a program in the timeline of its process."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, TypeVar

from . import _core, _errors, _trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

F = TypeVar("F", bound="Callable[..., Any]")

_GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x200  # flags of a code object


class span:
    """Marks a section of a driver, or of a worker's method, in `troupe timeline`.

        with troupe.span("generate"):
            ...

        @troupe.span("load")
        def load(self): ...

    Calls and spans inside the section are its children in OpenTelemetry traces. A section that ends with an exception
    is marked as failed. Without a session, and in forked children, nothing is recorded.
    """

    __slots__ = ("_core", "_marks", "_name", "_number")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise _errors.InvalidError(f"span(name): name must be a text that is not empty, not {name!r}")
        self._name = name.encode("utf-8", "replace")
        self._number = 0

    def __enter__(self) -> span:
        core = _core._core
        if core is None or core._pid != os.getpid():
            return self
        if self._number:
            raise _errors.InvalidError(
                f"the span {self._name.decode()!r} is open already; make another one: with troupe.span(…)"
            )
        self._core = core
        where = _trace.where()
        self._number = core.lib.troupe_span(where, len(where), self._name, len(self._name))
        if self._number:
            self._marks = _trace.enter(core, self._number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        number, self._number = self._number, 0
        if number:
            _trace.leave(self._marks)
            if self._core._pid == os.getpid():
                self._core.lib.troupe_span_end(number, kind is not None)

    def __call__(self, function: F) -> F:
        """Makes every execution of a function, which may be async, a span. Generators are refused, because their code
        runs in pieces."""
        name, flags = self._name.decode(), getattr(getattr(function, "__code__", None), "co_flags", 0)
        if flags & (_GENERATOR | _ASYNC_GENERATOR):
            raise _errors.InvalidError(
                f"@span({name!r}): {getattr(function, '__qualname__', function)} is a generator; use `with "
                "troupe.span(…)` inside it"
            )
        if flags & _COROUTINE:

            @functools.wraps(function)
            async def run_async(*args: object, **kwargs: object) -> object:
                with span(name):
                    return await function(*args, **kwargs)

            return run_async  # type: ignore[return-value]

        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            with span(name):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]
