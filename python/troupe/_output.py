"""Shows the output of workers in the driver's terminal or notebook: a thread writes it to sys.stdout and sys.stderr."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from . import _check, _core, _errors

MODES = ("all", "errors", "none", "raw")
_MARK, _STDERR = 0, 2  # kinds of records, as in output.go
_END = 3.0  # seconds for writing the last lines when a session ends


def mode(value: Any, name: str = "output") -> str:
    """Checks an output mode."""
    if value not in MODES:
        hint = _check.suggestion(value, MODES) if isinstance(value, str) else ""
        raise _errors.InvalidError(f"{name}={value!r} is none of {', '.join(MODES)}{hint}")
    return str(value)


def of_session(value: str | None) -> dict[str, Any]:
    """Returns the output settings of a session, for the core."""
    chosen = mode(value, "output") if value is not None else mode(os.environ.get("TROUPE_OUTPUT") or "all", "TROUPE_OUTPUT")
    terminal = _is_terminal(sys.stdout)
    return {"mode": chosen, "terminal": terminal, "color": terminal and not os.environ.get("NO_COLOR")}


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # None, or a closed stream
        return False


class Reader:
    """The thread that reads the pipe to which the core writes. It shares nothing with the threads that make calls."""

    def __init__(self, core: _core.Core) -> None:
        self._fd: int = core.lib.troupe_output()
        if self._fd < 0:
            raise core.fail(self._fd)
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="troupe-output").start()

    def join(self) -> None:
        """Waits, for a few seconds at most, until the output from before the end of the session has been written."""
        self._ended.wait(_END)

    def _run(self) -> None:
        try:
            while True:
                head = self._read(8)
                kind, length = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
                if kind == _MARK:
                    return
                data = self._read(length)
                show(data, sys.stderr if kind == _STDERR else sys.stdout)
        except OSError:  # the pipe is closed: this is a forked child, or the interpreter is exiting
            return
        finally:
            self._ended.set()

    def _read(self, length: int) -> bytes:
        parts = []
        while length > 0:
            part = os.read(self._fd, length)
            if not part:
                raise OSError("the pipe is closed")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def show(data: bytes, out: Any) -> None:
    """Writes to a stream of the driver; as raw bytes if the data is not valid text or the stream's encoding lacks a character. Errors of the stream
    are ignored."""
    try:
        try:
            out.write(data.decode())
        except (UnicodeDecodeError, UnicodeEncodeError):
            raw = getattr(out, "buffer", None)
            if raw is None:
                out.write(data.decode(errors="replace"))
            else:
                out.flush()
                raw.write(data)
        out.flush()
    except Exception:
        return
