"""A process that forks workers, which saves each worker the same imports: `python -m troupe.worker --fork-server`.

An agent starts one for workers with the same program, environment and directory (nodes/forkserver.go), and sends it the
descriptors of each worker. The server has one thread and has not loaded the Go library, whose threads a fork would
lose. A worker is a child of the agent, not of the server (CLONE_PARENT): the agent sees its exit like that of any other
worker, and the end of the server does not affect it.
"""

from __future__ import annotations

import array
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

ARGUMENT = "--fork-server"  # as in nodes/forkserver.go
_CONTROL = 3  # descriptor of the agent's socket
_MARKER = "TROUPE_WORKER"  # variable by which the agent finds the processes of a worker's tree
_ROOM = "TROUPE_FORK_ROOM"  # variable whose memory is overwritten with a worker's variables, so that /proc shows them

_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID, _CLONE_INTO_CGROUP = 0x8000, 0x200000, 0x1000000, 0x200000000
_CLONE3 = 435  # the same number on all architectures; containers often forbid it
_CALLS = {"x86_64": (56, 273, 274), "aarch64": (220, 99, 100)}  # clone, set_robust_list, get_robust_list
_PR_SET_PDEATHSIG, _PR_GET_TID_ADDRESS = 1, 40

_THREADS_END = 1.0  # seconds that threads may take to end before a fork
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci")


class Unfit(Exception):
    """Workers cannot be forked from this process, and must be started normally."""


def serve() -> None:
    """Forks workers if this process was started as a fork server, and returns in each worker; returns immediately in
    any other process."""
    if sys.argv[1:] != [ARGUMENT]:
        return
    os.set_inheritable(_CONTROL, False)
    control = socket.socket(fileno=_CONTROL)
    wanted = json.loads(control.recv(1 << 20))
    try:
        server = _Server(control)
        server.load(wanted["modules"] or [], wanted["path"] or [])
        server.check()
    except Unfit as err:
        control.send(json.dumps({"unfit": str(err)}).encode())
        os._exit(0)
    control.send(b"{}")
    server.run()


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._agent = os.getppid()
        self._folder = os.getcwd()
        self._files: list[tuple[str, tuple[int, int]]] = []
        machine = os.uname().machine
        if sys.platform != "linux" or machine not in _CALLS:
            raise Unfit(f"forking workers is not supported on {sys.platform} {machine}")
        self._clone, self._set_robust_list, get_robust_list = _CALLS[machine]
        self._libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the interpreter lock
        self._libc.syscall.restype = ctypes.c_long
        self._libc.getenv.restype = ctypes.c_void_p
        self._marker_at = self._libc.getenv(_MARKER.encode())
        self._room_at, self._room = self._libc.getenv(_ROOM.encode()), len(os.environ.pop(_ROOM, ""))
        self._argument_at = _address_of_argument()
        tid, head, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        if self._libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid), 0, 0, 0) != 0 or not tid.value:
            raise Unfit(f"the kernel lacks PR_GET_TID_ADDRESS: {os.strerror(ctypes.get_errno())}")
        self._libc.syscall(get_robust_list, 0, ctypes.byref(head), ctypes.byref(size))
        self._tid_at, self._robust = tid.value, (head, size)

    # Before the first worker.

    def load(self, modules: list[str], paths: list[str]) -> None:
        """Imports the modules. Their output is shown as that of the worker that waits for the server."""
        for path in paths:
            if path not in sys.path and os.path.exists(path):
                sys.path.append(path)
        for name in modules:
            try:
                importlib.import_module(name)
            except BaseException as err:  # a normally started worker repeats the import and reports the error
                raise Unfit(
                    f"import of {name} failed: {traceback.format_exception_only(type(err), err)[-1].strip()}"
                ) from None
        self._files = [(path, version) for path in _own_files() if (version := _version(path)) is not None]

    def check(self) -> None:
        """Raises Unfit if a fork would lose or share state."""
        self._end_library_threads()
        if threads := _threads():
            raise Unfit(
                f"there are {len(threads)} more threads after the imports ({', '.join(sorted(threads))}), and a fork "
                "would lose them"
            )
        for number in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                continue
            if target.startswith(_DEVICES):
                raise Unfit(
                    f"the imports have opened {target}: a driver of devices (CUDA) that is initialised does not work "
                    "after a fork"
                )
            if target.startswith("socket:") and int(number) != _CONTROL:
                raise Unfit("the imports have opened a connection, which all workers would share")
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            raise Unfit("the imports have initialised CUDA, which does not work after a fork")
        gc.collect()
        gc.freeze()  # keeps the collector of a worker from touching, and so copying, the pages of these objects

    def _end_library_threads(self) -> None:
        """Forks an ordinary child, so that libraries with fork handlers, such as OpenBLAS, end their threads. They
        restart them on demand."""
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        end = time.monotonic() + _THREADS_END
        while _threads() and time.monotonic() < end:
            time.sleep(0.001)

    # Workers.

    def run(self) -> None:
        """Forks a worker for each message, and returns in the worker. The agent closes the socket to end the server."""
        while True:
            numbers = array.array("i")
            message, extra, _, _ = self._control.recvmsg(
                1, socket.CMSG_SPACE(4 * numbers.itemsize), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            if not message:
                os._exit(0)
            channel, stdout, stderr, *group = numbers
            for path, version in self._files:
                if _version(path) != version:
                    _send(channel, {"stale": path})
                    os._exit(0)
            child = self._fork(group[0] if group else -1)
            if child == 0:
                self._become_worker(channel, stdout, stderr)
                for number in group:
                    os.close(number)
                return
            if child < 0:
                _send(channel, {"error": f"clone: {os.strerror(ctypes.get_errno())}"})
            for number in numbers:
                os.close(number)

    def _fork(self, group: int) -> int:
        """Forks like os.fork, but makes the child a child of the agent, in the given control group if there is one.
        Returns 0 in the child and -1 on failure. The kernel writes the child's thread id where the C library keeps that
        of its main thread."""
        sys.stdout.flush()
        sys.stderr.flush()
        flags, tid = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID, ctypes.c_void_p(self._tid_at)
        if group < 0:
            none = ctypes.c_void_p(None)
            arguments: tuple[Any, ...] = (
                self._clone,
                ctypes.c_long(flags | signal.SIGCHLD),
                none,
                none,
                tid,
                tid,
            )  # child_tid is the 4th or 5th
        else:
            request = (ctypes.c_uint64 * 11)(flags | _CLONE_INTO_CGROUP, 0, self._tid_at, 0, 0, 0, 0, 0, 0, 0, group)
            arguments = (_CLONE3, ctypes.byref(request), ctypes.sizeof(request))
        python = ctypes.pythonapi
        python.PyOS_BeforeFork()
        child = int(self._libc.syscall(*arguments))
        if child == 0:
            python.PyOS_AfterFork_Child()
        else:
            python.PyOS_AfterFork_Parent()
        return child

    def _become_worker(self, number: int, stdout: int, stderr: int) -> None:
        """Gives the new process the state that it would have if the agent had started it."""
        self._libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self._agent:
            os._exit(1)
        self._libc.syscall(self._set_robust_list, self._robust[0], self._robust[1])
        self._control.close()
        os.setsid()
        _send(number, {"pid": os.getpid()})
        with socket.socket(fileno=number) as channel, channel.makefile("rb") as file:
            text = file.read()
        if not text:  # the agent has given up on this worker
            os._exit(1)
        spec: dict[str, Any] = json.loads(text)
        self._show(spec["env"])
        os.environ.update(spec["env"])
        for source, target in ((stdout, 1), (stderr, 2)):
            os.dup2(source, target)
            os.close(source)
        os.chdir(spec["dir"])
        if sys.path and sys.path[0] == self._folder:
            sys.path[0] = os.getcwd()
        del sys.argv[1:], sys.orig_argv[-1:]
        _reseed()

    def _show(self, env: dict[str, str]) -> None:
        """Makes /proc show the worker's environment and command line. Variables that it shares with the server stay
        where they are."""
        marker = os.fsencode(env[_MARKER])
        if self._marker_at and len(ctypes.string_at(self._marker_at)) == len(marker):
            ctypes.memmove(self._marker_at, marker, len(marker))
        if self._room_at:
            own = b"\0".join(os.fsencode(f"{name}={value}") for name, value in env.items() if name != _MARKER)[
                : self._room
            ]
            start = self._room_at - len(_ROOM) - 1
            ctypes.memset(start, 0, len(_ROOM) + 1 + self._room)
            ctypes.memmove(start, own, len(own))
        if self._argument_at:
            ctypes.memset(self._argument_at, 0, len(ARGUMENT))


def _send(channel: int, message: Mapping[str, object]) -> None:
    try:
        os.write(channel, json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # the agent has given up on this worker


def _reseed() -> None:
    """Gives each worker its own random numbers. The modules random and uuid reseed themselves after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _threads() -> list[str]:
    """Returns the names of all threads except the main thread."""
    names = []
    for number in os.listdir("/proc/self/task"):
        if int(number) != os.getpid():
            try:
                with open(f"/proc/self/task/{number}/comm") as file:
                    names.append(file.read().strip())
            except OSError:
                pass  # the thread has ended
    return names


def _own_files() -> list[str]:
    """Returns the files of modules outside of the interpreter's own directories, which users may edit."""
    installed = tuple(
        {
            os.path.realpath(p) + os.sep
            for p in (sys.prefix, sys.base_prefix, *(p for p in sys.path if p.endswith("-packages")))
        }
    )
    paths = {
        os.path.realpath(path) for module in list(sys.modules.values()) if (path := getattr(module, "__file__", None))
    }
    return sorted(path for path in paths if not path.startswith(installed))


def _version(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _address_of_argument() -> int:
    """Returns the address of ARGUMENT in this process's command line, or 0 if it is unknown."""
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
        line = ctypes.string_at(start, end - start) if start else b""
    except (OSError, ValueError, IndexError):
        return 0
    at = line.rfind(b"\0" + ARGUMENT.encode() + b"\0")
    return start + at + 1 if at >= 0 else 0
