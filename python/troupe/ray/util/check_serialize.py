"""Finds which variable makes a value impossible to pickle."""

from __future__ import annotations

import inspect
import io
import types
from collections.abc import Iterator, Mapping
from typing import TextIO

import cloudpickle

_DEPTH = 8  # steps from a value of a call to the variable
_SHOWN = 200  # characters of a value in a message


class FailureTuple:
    """A value that cannot be pickled, the names that lead to it, and what refers to it."""

    def __init__(self, obj: object, path: tuple[str, ...], parent: object) -> None:
        self.obj, self.path, self.parent = obj, path, parent

    def __repr__(self) -> str:
        name = self.path[-1] if self.path else "unknown"
        path = " -> ".join(self.path)
        return f"FailTuple({name} [path={path}, obj={_shown(self.obj)}, parent={_shown(self.parent)}])"


def inspect_serializability(
    base_obj: object, name: str | None = None, depth: int = 3, print_file: TextIO | None = None
) -> tuple[bool, set[FailureTuple]]:
    """Returns whether a value can be pickled, and the variable inside of it that cannot, which it also prints. depth is
    the number of steps into closures, classes, attributes and containers."""
    path = () if name is None else (name,)
    line = "=" * 80
    print(f"{line}\nChecking Serializability of {_shown(base_obj)}\n{line}", file=print_file)
    error = _error_of(base_obj)
    if error is None:
        return True, set()
    print(f"!!! FAIL serialization: {error}", file=print_file)
    found = _search(base_obj, path, None, depth)
    print(
        f"Variable: \n\n\t{found}\n\nwas found to be non-serializable. There may be others that were not looked at.\n"
        "Make it where it is used, inside of the function or the class, or leave it out of the value (__reduce__).\n"
        f"{line}",
        file=print_file,
    )
    return False, {found}


def could_not_serialize(what: str, value: object) -> TypeError:
    """Returns the error for a value that cannot be pickled."""
    report = io.StringIO()
    inspect_serializability(value, depth=_DEPTH, print_file=report)
    return TypeError(f"Could not serialize {what}:\n{report.getvalue()}")


def argument_error(title: str, args: tuple[object, ...], kwargs: Mapping[str, object], error: TypeError) -> TypeError:
    """Returns the error for the arguments of a call that could not be pickled."""
    for value in (*args, *kwargs.values()):
        if _error_of(value) is not None:
            return could_not_serialize(f"the argument {_shown(value)} for a task or actor {title}", value)
    return error


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _error_of(value: object) -> Exception | None:
    try:
        cloudpickle.dumps(value, protocol=5, buffer_callback=lambda _: False)
    except Exception as err:
        return err
    return None


def _search(value: object, path: tuple[str, ...], parent: object, depth: int) -> FailureTuple:
    """Returns the innermost variable that cannot be pickled, of a value that cannot."""
    if depth > 0:
        for name, part in _parts(value):
            if part is not value and _error_of(part) is not None:
                return _search(part, (*path, name), value, depth - 1)
    return FailureTuple(value, path, parent)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Iterates over what a value is pickled with, by name."""
    if inspect.isfunction(value):
        yield from _closure(value)
    elif inspect.ismethod(value):
        yield from (("__self__", value.__self__), ("__func__", value.__func__))
    elif isinstance(value, type):
        for name, part in vars(value).items():
            if inspect.isfunction(part) or not name.startswith("__"):
                yield name, part.__func__ if isinstance(part, (staticmethod, classmethod)) else part
    elif isinstance(value, dict):
        yield from ((repr(key), part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    else:
        yield from getattr(value, "__dict__", {}).items()
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield name, getattr(value, name)


def _closure(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable of the enclosing function is not set yet
        return
    yield from variables.globals.items()
    yield from variables.nonlocals.items()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default
