"""How the session of this process was opened: by which call, where in the program, and with which settings."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from . import _traceback

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_LEASE = 15.0  # seconds; the core's
_SECRET = {"token"}
_OF_THE_CALL = {"timeout"}  # settings that do not last longer than the call of init
_PLACES = {"url", "namespace"}

# The arguments that the running call of init was given, as opposed to those that have their default value.
given: ContextVar[Mapping[str, Any]] = ContextVar("troupe_given", default=types.MappingProxyType({}))


def noting_given(function: Callable[P, R]) -> Callable[P, R]:
    """Sets `given` while the function runs. Its signature and docstring stay."""
    names = function.__code__.co_varnames

    @functools.wraps(function)
    def noting(*args: P.args, **kwargs: P.kwargs) -> R:
        mark = given.set({**dict(zip(names, args, strict=False)), **kwargs})
        try:
            return function(*args, **kwargs)
        finally:
            given.reset(mark)

    return noting


class Opening:
    """The call that opened a session, and the settings in effect."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.by = _user_call()
        self.settings = dict(settings)

    def differences(self, asked: Mapping[str, object]) -> list[str]:
        """Describes the settings that differ from those in effect. None means that a setting was not asked for."""
        found = []
        for name, value in asked.items():
            if name in _OF_THE_CALL or name in _PLACES or value is None:
                continue
            value, now = normal(name, value), self.settings.get(name)
            if value != now:
                found.append(f"{name} is another" if name in _SECRET else f"{name} is {now!r}, not {value!r}")
        return found


def normal(name: str, value: Any) -> object:
    """Returns a setting in the form in which two of them are compared."""
    if name in ("working_dir", "token_file", "creds_file", "ca_file") and value is not None:
        return os.path.abspath(value)
    return (value or DEFAULT_LEASE) if name == "lease" else value


def _user_call() -> str:
    """Returns the call of this package that the program has made, and its place: `Cluster(…) at train.py:12`."""
    ours, frame = sys._getframe(1), sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_traceback.FOLDER):
        ours, frame = frame, frame.f_back
    name = "init" if ours.f_code.co_name == "noting" else ours.f_code.co_name
    if name == "__init__":
        name = type(ours.f_locals.get("self")).__name__
    return f"{name}(…) at {frame.f_code.co_filename}:{frame.f_lineno}"
