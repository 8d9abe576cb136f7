"""Logs errors of calls that the program never gets to see."""

from __future__ import annotations

import atexit
import os
import weakref

from . import _errors, _traceback

_LINES = 6  # last lines of the worker's traceback in the log
_INTENDED = ("cancelled", "closed")  # codes of errors that the program has caused itself


class Unread:
    """The error of a future, which refers to this object. It is logged, once, if the future is dropped or the process
    ends before the program got the error."""

    __slots__ = ("__weakref__", "_error")

    def __init__(self, error: _errors.Error) -> None:
        self._error: _errors.Error | None = error
        _all.add(self)

    def seen(self) -> None:
        """Notes that the program got the error."""
        self._error = None

    def log(self) -> None:
        error, self._error = self._error, None
        if error is not None and os.getpid() == _pid:
            import logging

            logging.getLogger("troupe").error(_text(error))

    def __del__(self) -> None:
        try:
            self.log()
        except Exception:  # the interpreter is ending
            pass


def of(error: _errors.Error | None) -> Unread | None:
    """Returns the note of an error; None if there is none, or if the program has caused it itself."""
    return None if error is None or error.code in _INTENDED else Unread(error)


def _text(error: _errors.Error) -> str:
    said = str(error).partition("\n--- the worker's traceback")[0]
    frames = _traceback.fold_text(error.remote_traceback).rstrip().splitlines()[-_LINES:]
    return "\n".join([f"a call failed, and its future was never read: {said}", *(f"    {line}" for line in frames)])


_all: weakref.WeakSet[Unread] = weakref.WeakSet()
_pid = os.getpid()


@atexit.register
def _log_all() -> None:
    for one in list(_all):
        one.log()
