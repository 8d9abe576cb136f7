"""Inspection of a worker: stacks, interrupts and breakpoints, over a socket in the worker's private directory to which
its agent connects.

A dedicated thread answers, so that calls have no overhead. It cannot answer while native code holds the interpreter
lock; the agent then sends a signal, on which faulthandler writes the stacks to a file without the lock.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import linecache
import os
import queue
import signal
import socket
import sys
import threading
from types import CodeType, FrameType
from typing import Any

from . import _core, _serve
from ._traceback import FOLDER

STACKS = signal.SIGRTMAX - 1  # as in nodes/inspect.go
INTERRUPT = signal.SIGRTMAX - 2
_SOCKET, _FILE = "debug.sock", "stacks.txt"
_DEPTH = 100  # frames of a stack
_TEXT = 200  # characters of an argument's description
_WAIT = 30.0  # seconds to wait for a silent client
_SERVES: tuple[CodeType, ...] = (_serve.Server.serve.__code__, _serve.Server.invoke_async.__code__)


def start(folder: str, name: str) -> None:
    """Starts inspection for the worker with that private directory. Must be called on the main thread."""
    path = os.path.join(folder, _FILE)
    file = open(path + ".new", "ab", buffering=0)  # noqa: SIM115 - it stays open for faulthandler
    faulthandler.register(STACKS, file=file, all_threads=True)
    os.rename(
        file.name, path
    )  # the agent sends the signal once it finds the file, and without a handler that would kill the process
    signal.signal(INTERRUPT, _interrupt_main)
    server = _Server(folder, name)
    sys.breakpointhook = server.breakpoint
    threading.Thread(target=server.run, daemon=True, name="troupe-debug").start()


class _Server:
    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self.waiting: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self.stopped: list[str] = []  # locations of threads that wait for a debugger
        at = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(f"/proc/self/fd/{at}/{_SOCKET}")  # short, because a socket's path has at most 107 bytes
        self.socket.listen(16)
        os.close(at)

    def run(self) -> None:
        while True:
            try:
                peer, _ = self.socket.accept()
            except OSError:  # this is a forked child, or the process is exiting
                return
            try:
                self.answer(peer)
            except Exception:
                peer.close()

    def answer(self, peer: socket.socket) -> None:
        peer.settimeout(_WAIT)
        asked = peer.makefile("r").readline().strip()
        if asked == "debug" and self.stopped:
            self.waiting.put(peer)
            return
        found: dict[str, Any]
        if asked == "stacks":
            found = stacks()
        elif asked == "interrupt":
            found = {"interrupted": interrupt()}
        else:
            found = {"error": "no thread of this worker is stopped at a breakpoint()"}
        peer.sendall(json.dumps(found).encode() + b"\n")
        peer.close()

    def breakpoint(self, *_: object, **__: object) -> None:
        """Replaces sys.breakpointhook: waits for `troupe debug`, and runs a debugger on its terminal."""
        frame = sys._getframe(1)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        sys.stderr.write(f"breakpoint at {where}: attach with `troupe debug {self.name}`\n")
        sys.stderr.flush()
        self.stopped.append(where)
        try:
            peer = self.waiting.get()
        finally:
            self.stopped.remove(where)
        from ._debugger import Debugger  # imported here, because importing pdb takes as long as the rest of a worker

        peer.settimeout(None)
        Debugger(peer).set_trace(frame)


# Stacks.


def stacks() -> dict[str, object]:
    """Returns the stacks of all threads and of the tasks in event loops that serve calls, and the methods that they
    run."""
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = sys._current_frames()
    own = threading.get_ident()
    threads, calls = [], []
    for ident, frame in frames.items():
        if ident == own:
            continue
        chain = _chain(frame)
        threads.append({"name": names.get(ident, "unknown"), "frames": [_describe(f) for f in chain[:_DEPTH]]})
        calls += _calls(chain, names.get(ident, "unknown"))
    for name, chain in _tasks():
        threads.append({"name": name, "frames": [_describe(f) for f in chain[:_DEPTH]]})
        calls += _calls(chain, name)
    return {"by": "python", "threads": threads, "calls": calls}


def _chain(frame: FrameType | None) -> list[FrameType]:
    """Returns a frame and its callers, innermost first."""
    out = []
    while frame is not None:
        out.append(frame)
        frame = frame.f_back
    return out


def _tasks() -> list[tuple[str, list[FrameType]]]:
    out: list[tuple[str, list[FrameType]]] = []
    if not _core.serving_loops:
        return out
    import asyncio

    for loop in list(_core.serving_loops):
        for task in asyncio.all_tasks(loop):
            chain, at = [], task.get_coro()
            while (frame := getattr(at, "cr_frame", None)) is not None:
                chain.append(frame)
                at = at.cr_await  # type: ignore[union-attr]
            if any(f.f_code in _SERVES for f in chain):
                out.append((f"task {task.get_name()}", chain[::-1]))
    return out


def _describe(frame: FrameType) -> dict[str, object]:
    code = frame.f_code
    return {
        "file": code.co_filename, "line": frame.f_lineno, "function": getattr(code, "co_qualname", code.co_name),
        "code": linecache.getline(code.co_filename, frame.f_lineno).strip(),
    }  # fmt: skip


def _calls(chain: list[FrameType], thread: str) -> list[dict[str, object]]:
    """Returns the methods that a stack runs, with short descriptions of their arguments."""
    out = []
    for inner, frame in zip([None, *chain], chain):  # noqa: B905 - the last has nothing inside
        if frame.f_code not in _SERVES or (inner is not None and inner.f_code.co_filename.startswith(FOLDER)):
            continue
        known = frame.f_locals
        method = getattr(known.get("method"), "__name__", None)
        if method is None:
            continue
        args, kwargs = known.get("args") or [], known.get("kwargs") or {}
        words = [summary(a) for a in args] + [f"{k}={summary(v)}" for k, v in kwargs.items()]
        out.append({"method": method, "args": ", ".join(words)[: 5 * _TEXT], "thread": thread})
    return out


def summary(value: object, depth: int = 2) -> str:
    """Describes a value briefly: arrays and tensors by type and shape, others by their beginning."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        device = getattr(value, "device", None)
        at = f" on {device}" if device is not None and str(device) != "cpu" else ""
        return f"{type(value).__name__} {str(dtype).rpartition('.')[2]}{list(shape)}{at}"
    if isinstance(value, (str, bytes)) and len(value) > 40:
        return f"{type(value).__name__} of {len(value)}: {value[:20]!r}…"
    if isinstance(value, (int, float, bool, str, bytes, type(None))):
        return repr(value)[:_TEXT]
    if isinstance(value, dict):
        inside = ", ".join(f"{k!r}: {summary(v, depth - 1)}" for k, v in list(value.items())[:8]) if depth else ""
        return f"dict of {len(value)}" + (f" {{{inside}}}"[:_TEXT] if inside else "")
    if isinstance(value, (list, tuple)):
        inside = ", ".join(summary(v, depth - 1) for v in value[:3]) if depth else ""
        return f"{type(value).__name__} of {len(value)}" + (f" [{inside}]"[:_TEXT] if inside else "")
    return type(value).__qualname__


# Interrupts.


def _in_method(frame: FrameType | None) -> str | None:
    """Returns the method that a stack runs, if it is in user code and not in Troupe's."""
    while frame is not None and frame.f_back is not None:
        if frame.f_back.f_code is _serve.Server.serve.__code__ and not frame.f_code.co_filename.startswith(FOLDER):
            return str(getattr(frame.f_back.f_locals.get("method"), "__name__", "a method"))
        frame = frame.f_back
    return None


def _interrupt_main(_: int, frame: FrameType | None) -> None:
    if _in_method(frame) is not None:
        raise KeyboardInterrupt


def interrupt() -> list[str]:
    """Interrupts the running methods and returns their names. Raises KeyboardInterrupt in sync methods, on the main
    thread by a signal, and cancels the tasks of async ones."""
    main = threading.main_thread().ident
    out = []
    for ident, frame in sys._current_frames().items():
        method = _in_method(frame)
        if method is None or ident == threading.get_ident():
            continue
        out.append(method)
        if ident == main:
            signal.pthread_kill(ident, INTERRUPT)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt))
    if not _core.serving_loops:
        return out
    import asyncio

    for loop in list(_core.serving_loops):
        for task in asyncio.all_tasks(loop):
            coro = task.get_coro()
            if getattr(coro, "__name__", "") == "serve_async":
                call = getattr(getattr(coro, "cr_frame", None), "f_locals", {}).get("call")
                out.append(str(getattr(call, "method", "a method")))
                loop.call_soon_threadsafe(task.cancel)
    return out
