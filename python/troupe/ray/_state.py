"""The current session of this process, and access to the control service.

All modules of the package use it. `require()` returns the State and starts a local session if there is none (Ray's
implicit init), `current()` returns the State or None, `control_call` calls the control service and waits, and
`control_async` returns a future.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from .. import _core, _errors
from . import _context, _control, exceptions

DRIVER_MODE, WORKER_MODE = 0, 1  # the values of ray.SCRIPT_MODE and ray.WORKER_MODE


class State:
    """A driver's or worker's connection to a cluster."""

    def __init__(
        self,
        *,
        mode: int,
        job_id: str,
        namespace: str,
        node_id: str,
        address: str,
        control: _control.Control,
        process: str,
    ) -> None:
        self.mode = mode
        self.job_id = job_id  # 8 hex digits
        self.namespace = namespace
        self.node_id = node_id
        self.address = address  # HOST:PORT of the head, as accepted by init(address=…)
        self.control = control  # the _control.Control
        self.process = process  # the name by which other processes reach this one
        self.node_ip = "127.0.0.1"
        self.actor_id = ""  # set in an actor's process
        self.actor_name = ""
        self.restarted = 0  # number of times the actor has been restarted
        self.worker_id = ""
        self.placement_group: Any = None  # the placement group that captures this worker's child tasks, in wire form
        self.runtime_env: dict[str, Any] = {}  # the job's environment, merged with the actor's
        self.accelerators: dict[str, list[str]] = {}  # ids assigned to this process, by resource name
        self.assigned: dict[str, float] = {}  # resources assigned to this actor or task
        self.store: Any = None  # _objects.Store
        self.actor_namespace = ""
        self.announced = ""  # in the driver that started the session: the file through which other drivers find it
        self.served: Any = None  # in a driver: the objects it serves
        self.host: Any = None  # in a worker: the _host.RayHost

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Returns the CPUs of the current task to the cluster while the body waits."""
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
    """Returns the state of this process; None before init and in a forked child."""
    return _current


def _no_session() -> State:
    raise RuntimeError("troupe.ray is not imported")


start: Callable[[], State] = _no_session  # makes this process the driver of a local session; set by _session


def require() -> State:
    """Returns the state of this process, which becomes the driver of a local session if it has none."""
    state = _current
    if state is None:
        return start()
    return state


def set_current(state: State | None) -> None:
    global _current
    _current = state


def _after_fork() -> None:
    """Gives a forked child no state. The parent's stays referenced there: what it holds belongs to the parent, and must
    not be released."""
    global _current, _of_parent
    _of_parent, _current = _current, None


_of_parent: State | None = None
os.register_at_fork(after_in_child=_after_fork)


class Reply:
    """The future of a request to the control service. Threads and event loops wait for it as for any other Troupe
    awaitable."""

    def __init__(self) -> None:
        self._done = False
        self._waiters: list[Any] = []
        self._value: Any = None
        self._error: BaseException | None = None

    def _finish(self, value: object, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self._done = True
        for wake in list(self._waiters):
            wake()

    def get(self) -> Any:
        """Returns the value of a finished reply, or raises its error."""
        if isinstance(self._error, _errors.Error):  # the head or a peer is gone
            raise exceptions.RaySystemError(self._error) from self._error
        if self._error is not None:
            raise self._error
        return self._value

    def result(self, timeout: float | None = None) -> Any:
        if not self._done and not _core.get().wait(self, None if timeout is None else time.monotonic() + timeout):
            raise TimeoutError(f"the control service did not answer within {timeout} s")
        return self.get()

    def add_done_callback(self, do: Callable[[Reply], None]) -> None:
        """Calls do(self) once, from any thread; do must not block."""

        def call() -> None:
            if call in self._waiters:
                self._waiters.remove(call)
                do(self)

        self._waiters.append(call)
        if self._done:
            call()

    def __await__(self) -> Generator[object, None, Any]:
        return self._await().__await__()

    async def _await(self) -> Any:
        if not self._done:
            await _core.wait_in_loop(_core.get(), self)
        return self.get()


def control_async(method: str, *args: object) -> Reply:
    """Calls the control service. Arguments and results are plain values: numbers, strings, bytes, lists, dicts."""
    reply = Reply()
    require().control.ask(method, args, reply._finish)
    return reply


def control_call(method: str, *args: object, timeout: float | None = None) -> Any:
    """Calls the control service and waits for the result."""
    return control_async(method, *args).result(timeout)
