"""Shows the output of workers in the driver's terminal or notebook: a thread writes it to sys.stdout and sys.stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from . import _check, _core, _errors, _seam
from ._seam import OutputHead

MODES = ("all", "errors", "none", "raw")
_END = 3.0  # seconds for writing the last lines when a session ends
_CELL_END = 1.5  # seconds that a notebook cell waits for the output of its workers


def mode(value: object, name: str = "output") -> str:
    """Checks an output mode."""
    if value not in MODES:
        hint = _check.suggestion(value, MODES) if isinstance(value, str) else ""
        raise _errors.InvalidError(f"{name}={value!r} is none of {', '.join(MODES)}{hint}")
    return str(value)


def of_session(value: str | None) -> dict[str, object]:
    """Returns the output settings of a session, for the core."""
    chosen = (
        mode(value, "output") if value is not None else mode(os.environ.get("TROUPE_OUTPUT") or "all", "TROUPE_OUTPUT")
    )
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
        self._core = core
        self._runtime = 0
        self._ended = threading.Event()
        self._flushed = threading.Event()

    def start(self, runtime: int) -> None:
        """Starts the thread. In a notebook, every cell then ends after the output of its calls. Otherwise the lines
        that workers print last come after the end of the cell: programs that run notebooks drop them, and a front end
        may show them under the next cell."""
        self._runtime = runtime
        threading.Thread(target=self._run, daemon=True, name="troupe-output").start()
        if _notebook() is not None:
            _notebook().events.register("post_run_cell", self._flush)

    def join(self) -> None:
        """Waits, for a few seconds at most, until the output from before the end of the session has been written."""
        if _notebook() is not None:
            _notebook().events.unregister("post_run_cell", self._flush)
        self._ended.wait(_END)

    def _flush(self, *_: object) -> None:
        """Waits until what the workers have printed so far has been written. After a timeout, or if the core fails, the
        rest of it follows later."""
        deadline = time.monotonic() + _CELL_END
        self._flushed.clear()
        if self._core.wait(self._core.ask(_seam.flush_output(runtime=self._runtime)), deadline):
            self._flushed.wait(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            while True:
                kind, length = OutputHead.layout.unpack(self._read(OutputHead.size))
                if kind == _seam.OUTPUT_END:
                    return
                if kind == _seam.OUTPUT_FLUSHED:
                    self._flushed.set()
                    continue
                data = self._read(length)
                show(data, sys.stderr if kind == _seam.OUTPUT_STDERR else sys.stdout)
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


def _notebook() -> Any:
    """Returns the IPython shell of this process if it is the kernel of a notebook, or None."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


class StatusLine:
    """A line below the output of workers, on standard error, that is rewritten in place and erased at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while a thread writes output or the line
        self._text = ""

    def set(self, text: str) -> None:
        """Replaces the line; "" erases it."""
        import shutil

        width = 120 if _notebook() is not None else shutil.get_terminal_size().columns - 1
        text = text if len(text) <= width else text[: width - 1] + "…"
        with self._lock:
            if text != self._text:
                self._erase()
                self._text = text
                self._write(text)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Erases the line while other output is written."""
        with self._lock:
            self._erase()
            yield
            self._write(self._text)

    def _erase(self) -> None:
        if self._text:
            self._write(f"\r{' ' * len(self._text)}\r")

    def _write(self, text: str) -> None:
        if text:
            _write(text.encode(), sys.stderr)


status = StatusLine()


def shows_status() -> bool:
    """Returns whether standard error is a terminal or the output of a notebook's cell, which can show a status line."""
    return _is_terminal(sys.stderr) or _notebook() is not None


def show(data: bytes, out: object) -> None:
    """Writes to a stream of the driver, above the status line."""
    with status.hidden():
        _write(data, out)


def _write(data: bytes, out: Any) -> None:
    """Writes to a stream; as raw bytes if the data is not valid text or the stream's encoding lacks a character. Errors
    of the stream are ignored."""
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
