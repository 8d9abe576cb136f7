"""Shows the progress of a start that takes longer than a second: on a terminal, in a notebook or in the log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from . import _core, _output, _seam, _session, _traceback

_SILENT = 1.0  # seconds of a start that shows nothing
_EVERY = 1.0  # seconds between two requests for the progress
_LOOK = 0.2  # seconds between two looks for the answer
_LOG_EVERY = 10.0  # seconds between two lines of the log, unless more ranks are ready


def wait(session: _session.Session, name: str, start: _core.Waited, deadline: float | None) -> bool:
    """Waits for the start of a role, as core.wait does, and shows its progress."""
    show = _display()
    begun = time.monotonic()
    if show is None or session.core.wait(start, _earlier(deadline, begun + _SILENT)):
        return session.core.wait(start, deadline)
    asked, asked_at = _ask(session, name), time.monotonic()
    try:
        while not session.core.wait(start, _earlier(deadline, time.monotonic() + _LOOK)):
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            if asked._done and asked._error is None:
                show(_text(name, asked._value, now - begun), asked._value)
            if asked._done and now - asked_at >= _EVERY:
                asked, asked_at = _ask(session, name), now
        return True
    finally:
        _output.status.set("")


def _earlier(deadline: float | None, moment: float) -> float:
    return moment if deadline is None else min(deadline, moment)


def _ask(session: _session.Session, name: str) -> _core.Ask:
    return session.core.ask(_seam.progress(runtime=session.id, name=name))


def _display() -> Any:
    """Returns the function that shows a text, or None if nothing would show it."""
    if _output.shows_status():
        return lambda text, _: _output.status.set(text)
    logging = sys.modules.get("logging")
    if logging is not None and logging.getLogger("troupe").isEnabledFor(logging.INFO):
        return _Log(logging.getLogger("troupe"))
    return None


class _Log:
    """Writes the progress to a logger: when it changes, and every few seconds."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._said: Any = None
        self._at = 0.0

    def __call__(self, text: str, progress: dict[str, Any]) -> None:
        what, now = (progress["step"], progress["ready"]), time.monotonic()
        if what != self._said or now - self._at >= _LOG_EVERY:
            self._said, self._at = what, now
            self._logger.info("%s", text)


def _text(name: str, progress: Mapping[str, Any], seconds: float) -> str:
    step, world, ready = progress["step"], progress["world"], progress["ready"]
    if step == "name":
        text = "waits until its name is free"
    elif step == "placement":
        text = f"{world} ranks wait for their resources"
    elif step == "barrier":
        text = f"{ready} of {world} ranks ready"
    else:
        slowest = progress["slowest"]
        text = f"{ready} of {world} ranks ready; rank {slowest['rank']} on {slowest['node']} {_activity(slowest)}"
    return f"troupe: {name} starts ({seconds:.0f} s): {text}"


def _activity(worker: dict[str, Any]) -> str:
    """Describes what a worker that is not ready does: the innermost line of the user's code on its main thread."""
    threads = worker["threads"] or []
    main = next((t for t in threads if t["name"] == "MainThread"), threads[0] if threads else {"frames": []})
    frames = [f for f in main["frames"] or [] if not f["file"].startswith((_traceback.FOLDER, "<frozen"))]
    own = [f for f in frames if not f["file"].startswith(_installed())]
    if not frames:
        return "starts its process"
    frame = own[0] if own else frames[-1]
    place = frame["code"] or f"{os.path.basename(frame['file'])}, line {frame['line']}"
    return f"is in {frame['function']}: {place}"


def _installed() -> tuple[str, ...]:
    """Returns the folders of Python's own modules and of installed packages. Workers have the same interpreter."""
    import sysconfig

    paths = sysconfig.get_paths()
    return tuple({paths[kind] + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
