"""What this process is in Ray's terms: the current session, and the way to the control service.

Every module of the package asks here: `require()` gives the State and starts a local session where there is none (Ray's implicit
init), `current()` gives it or None, `control_call` asks the control service and waits, `control_async` gives a future.
"""

from __future__ import annotations

import os
import threading
from typing import Any

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
        self.worker_id = ""
        self.placement_group: Any = None  # the group of this worker whose children are captured, in wire form
        self.runtime_env: dict[str, Any] = {}  # of the job, merged with the actor's own
        self.accelerators: dict[str, list[str]] = {}  # by resource name, the ids given to this process
        self.assigned: dict[str, float] = {}  # resources of this actor or task
        self.pid = os.getpid()
        self.store: Any = None  # _objects.Store
        self.closing = False


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


def control_async(method: str, *args: Any) -> Any:
    """Asks the control service; a troupe future. Arguments and results are plain values: numbers, texts, bytes, lists, dicts."""
    return require().control[method].remote(*args)


def control_call(method: str, *args: Any, timeout: float | None = None) -> Any:
    """Asks the control service and waits."""
    return control_async(method, *args).result(timeout)
