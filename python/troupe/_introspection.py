"""What dir(), help() and the completion of notebooks show of handles: public names, and the worker's own docstrings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Public names that only other modules of this package use.
_INTERNAL = {"arrived", "big", "deliver", "received", "reference", "take_references", "uncounted", "wire"}


class PublicNames:
    """Restricts dir() of an object, and so its completion, to the names that users need."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        return sorted(n for n in super().__dir__() if not n.startswith("_") and n not in _INTERNAL)


class Documentation:
    """The __doc__ of a Method: the docstring of the worker's method. The class Method itself, and methods whose class
    is not known in this process, have a text of their own."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, method: Any, owner: type) -> str | None:
        import inspect  # imported in functions, because workers do not need it

        function = None if method is None else method._function()
        return self._text if function is None else inspect.getdoc(function)


class Signature:
    """The __signature__ of a Method: that of the worker's method, or of the Method's __call__ if the worker's class is
    not known in this process."""

    def __get__(self, method: Any, owner: type) -> object:
        import inspect

        if method is None:
            raise AttributeError("__signature__")
        try:
            return inspect.signature(method._function())
        except (TypeError, ValueError):  # it is not known, or a built-in function
            return inspect.signature(method.__call__)


class Wrapped:
    """The __wrapped__ of a Method: the worker's method, whose source `method??` shows."""

    def __get__(self, method: Any, owner: type) -> object:
        function = None if method is None else method._function()
        if function is None:
            raise AttributeError("__wrapped__")
        return function


def find_function(cls: type | str | None, name: str) -> Callable[..., object] | None:
    """Returns a method of a class as its caller sees it, without self. Returns None if the class or the method is not
    known in this process."""
    import inspect

    found = _imported(cls) if isinstance(cls, str) else cls
    if found is None:
        return None
    static = inspect.getattr_static(found, name, None)
    bind = getattr(type(static), "__get__", None)
    if bind is None or not (callable(static) or isinstance(static, classmethod)):  # a property runs code
        return None
    try:
        function = bind(static, _Caller(), found)  # a bound method has no self in its signature
    except Exception:  # a descriptor of the user's
        return None
    return function if callable(function) else None


class _Caller:
    """Stands for the worker, which lives in another process, in bound methods that are only described."""


def _imported(path: str) -> type | None:
    """Returns the class at an import path if this process has imported its module."""
    module, _, name = path.replace(":", ".").rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
