"""What this process is in Ray's terms: the current session, and the way to the control service.

Every module of the package asks here: `require()` gives the State and starts a local session where there is none (Ray's implicit
init), `current()` gives it or None, `control_call` asks the control service and waits, `control_async` gives a future.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from . import _context

DRIVER_MODE, WORKER_MODE = 0, 1  # as ray.SCRIPT_MODE and ray.WORKER_MODE


class State:
    """One connection to a cluster, of a driver or of a worker process."""

    def __init__(self, *, mode: int, job_id: str, namespace: str, node_id: str, address: str, control: Any, process: str) -> None:
        self.mode = mode
        self.job_id = job_id  # 8 hex digits
        self.namespace = namespace
        self.node_id = node_id
        self.address = address  # HOST:PORT of the head, what init(address=…) takes
        self.control = control  # the handle of the control service
        self.process = process  # the name under which other processes reach this one
        self.node_ip = "127.0.0.1"
        self.actor_id = ""  # of an actor's process
        self.actor_name = ""
        self.restarted = 0  # how often the actor was restarted
        self.worker_id = ""
        self.placement_group: Any = None  # the group of this worker whose children are captured, in wire form
        self.runtime_env: dict[str, Any] = {}  # of the job, merged with the actor's own
        self.accelerators: dict[str, list[str]] = {}  # by resource name, the ids given to this process
        self.assigned: dict[str, float] = {}  # resources of this actor or task
        self.pid = os.getpid()
        self.store: Any = None  # _objects.Store
        self.actor_namespace = ""
        self.announced = ""  # of a driver that started the session: the file that others find it by
        self.served: Any = None  # of a driver: the objects that it serves
        self.host: Any = None  # of a worker: _host.RayHost

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """While the body waits, the CPUs of a task are free for others."""
        task = _context.current.get()
        if task is None or not task.lease or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.control.notify("suspend", task.lease)
        try:
            yield
        finally:
            self.control.notify("resume", task.lease)


_current: State | None = None
_lock = threading.RLock()


def current() -> State | None:
    state = _current
    return state if state is not None and state.pid == os.getpid() else None


def require() -> State:
    """The state of this process; a process without one becomes a driver of a local session."""
    state = current()
    if state is None:
        from . import _session

        return _session.implicit_init()
    return state


def set_current(state: State | None) -> None:
    global _current
    _current = state


class Reply:
    """What the control service was asked for: waited for by threads and event loops as anything of Troupe is."""

    def __init__(self) -> None:
        self._done = False
        self._waiters: list[Any] = []
        self._value: Any = None
        self._error: BaseException | None = None

    def _finish(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self._done = True
        for wake in list(self._waiters):
            wake()

    def get(self) -> Any:
        """The value of one that is done."""
        if self._error is not None:
            raise self._error
        return self._value

    def result(self, timeout: float | None = None) -> Any:
        from .. import _core

        if not self._done and not _core.get().wait(self, None if timeout is None else time.monotonic() + timeout):
            raise TimeoutError(f"the control service did not answer within {timeout} s")
        return self.get()

    def add_done_callback(self, do: Callable[[Reply], None]) -> None:
        """Calls do(self) once, from any thread; it must not block."""

        def call() -> None:
            if call in self._waiters:
                self._waiters.remove(call)
                do(self)

        self._waiters.append(call)
        if self._done:
            call()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._await().__await__()

    async def _await(self) -> Any:
        from .. import _core

        if not self._done:
            await _core.wait_in_loop(_core.get(), self)
        return self.get()


def control_async(method: str, *args: Any) -> Reply:
    """Asks the control service. Arguments and results are plain values: numbers, texts, bytes, lists, dicts."""
    reply = Reply()
    require().control.ask(method, args, reply._finish)
    return reply


def control_call(method: str, *args: Any, timeout: float | None = None) -> Any:
    """Asks the control service and waits."""
    return control_async(method, *args).result(timeout)
