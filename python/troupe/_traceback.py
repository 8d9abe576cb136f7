"""Hides the frames of this package in tracebacks. TROUPE_TRACEBACK=full shows them."""

from __future__ import annotations

import os
import re
import sys
import threading
import types
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep  # of this package
# Consecutive frames of this package in the text of a traceback, local or from a worker, with their source and marker
# lines.
_FRAME = re.compile(
    r'(?:  File "[^"\n]*[/\\]troupe[/\\](?:worker|_[a-z_]+)\.py", line \d+, in [^\n]*\n(?:    [^\n]*\n)*)+'
)


def user_stacklevel() -> int:
    """Returns the stacklevel that makes a warning issued by the caller point to user code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOLDER):
        level, frame = level + 1, frame.f_back
    return level


def is_full() -> bool:
    return os.environ.get("TROUPE_TRACEBACK") == "full"


def fold_text(text: str) -> str:
    """Replaces each run of this package's frames in the text of a traceback by one line. Frames at its beginning, which
    call the user's method, are removed."""
    if is_full():
        return text

    def replaced(found: re.Match[str]) -> str:
        if text[: found.start()].rstrip().endswith("(most recent call last):"):
            return ""
        count = found.group().count('  File "')
        return f"  … {count} frame{'s' * (count > 1)} of troupe\n"

    return _FRAME.sub(replaced, text)


def fold(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without the frames of this package; unchanged if no frame would be left."""
    if is_full():
        return tb
    kept = []
    at = tb
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith(FOLDER):
            kept.append(at)
        at = at.tb_next
    folded: types.TracebackType | None = None
    for entry in reversed(kept):
        folded = types.TracebackType(folded, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return folded if kept else tb


def fold_all(err: BaseException) -> None:
    """Folds the tracebacks of an exception and of its causes and contexts."""
    seen: set[int] = set()
    left: list[BaseException | None] = [err]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = fold(one.__traceback__)
        left += [one.__cause__, one.__context__]


_installed = False


def install(*kinds: type[BaseException]) -> None:
    """Shows uncaught exceptions of these kinds folded: on the main thread, on other threads and in IPython."""
    global _installed
    if not _installed:
        _installed = True
        _install_hooks(kinds)
    _install_in_ipython(kinds)


def _install_hooks(kinds: tuple[type[BaseException], ...]) -> None:
    hook, thread_hook = sys.excepthook, threading.excepthook

    def show(type: type[BaseException], err: BaseException, tb: types.TracebackType | None) -> object:
        if isinstance(err, kinds):
            fold_all(err)
            tb = fold(tb)
        return hook(type, err, tb)

    def show_in_thread(args: Any) -> Any:
        if isinstance(args.exc_value, kinds):
            fold_all(args.exc_value)
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, fold(args.exc_traceback), args.thread))
        return thread_hook(args)

    sys.excepthook, threading.excepthook = show, show_in_thread


def _install_in_ipython(kinds: tuple[type[BaseException], ...]) -> None:
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if shell is None or shell.custom_exceptions:
        return  # keep the existing handler

    def show(self: Any, type: Any, err: BaseException, tb: Any, tb_offset: Any = None) -> Any:
        fold_all(err)
        return self.showtraceback((type, err, fold(tb)), tb_offset=tb_offset, running_compiled_code=True)

    shell.set_custom_exc(kinds, show)


def cut(err: E) -> E:
    """Returns the exception without the frames that it has passed so far, for a public function to raise again."""
    return err if is_full() else err.with_traceback(None)
