"""Serving objects: a driver or a worker lets other processes call an object of its own."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Any

from . import _core, _errors, _seam, _serve, _session
from ._call import IncomingCall
from ._cluster import Cluster, WorkerHandle, from_handle
from ._seam import CANCEL, VALUE

_PATIENCE = 30.0  # seconds for the core's answer to a request
_SERVED = "served:"  # prefix of the names of served objects; no object of a worker has it
_numbers = itertools.count(1)
_lock = threading.Lock()  # guards session.server and the objects it serves


def serve(obj: object, name: str | None = None, *, max_concurrency: int = 1000) -> WorkerHandle:
    """Lets other processes call the methods of an object of this process. Returns a handle, which can be passed as an
    argument of calls.

    Without a name, the object belongs to this process: workers that this process created get it as `self.driver` and
    `troupe.driver()`, and workers that serve one of its calls as `troupe.current_call().driver`. With a name, it is a
    role of that name, to which other processes attach.

    The methods run one at a time on a separate thread, even while the driver waits for a call.
    `@register(lane="control")` and `concurrency=n` work as in workers. If any method is async, all run on the event
    loop in which serve was called, or without one, on a loop of their own. Serving ends with the session (in a worker,
    with the process), or with `handle.cluster.shutdown()`.
    """
    session = _session.current()
    if isinstance(obj, type):
        raise _errors.InvalidError(
            f"serve takes an object, and {obj.__qualname__} is a class; give {obj.__qualname__}(…)"
        )
    with _lock:
        if session.server is None:
            session.server = ObjectServer(session)
        server: ObjectServer = session.server
        key = server.add(obj, max_concurrency)
    return server.announce(key, name)


def driver() -> WorkerHandle:
    """Returns the handle of the object served by the driver or worker that created this worker."""
    session = _session.current(start=False)
    if not session.is_worker:
        raise _errors.InvalidError("driver() is for workers; this process is a driver itself")
    return of_session(session.driver)


def of_session(caller: str) -> WorkerHandle:
    """Returns the handle of the object served by the process with that session. Each call looks the role up; the
    cluster object is shared."""
    session = _session.current(start=False)
    found = session.core.ask(_seam.driver(runtime=session.id, name=caller or "nobody")).get(_PATIENCE)
    codec = session.codec(False)
    cluster: Cluster = from_handle(found.data, codec._unpack(found.data))
    return cluster.workers[0]


class ObjectServer(_serve.Server):
    """The objects that a driver serves. The side queue's thread reads the calls, so that they arrive while the driver
    computes. If there is a single object whose methods run one at a time, that thread runs the methods itself;
    otherwise each object has a thread or an event loop."""

    def __init__(self, session: _session.Session) -> None:
        self.session = session
        self.core = session.core
        self.lib = session.core.lib
        self.known = {}
        self.values = {}
        self.objects = {}
        self.tasks = {}
        self.codecs = {True: session.codec(True), False: session.codec(False)}
        self.runners: dict[str, Any] = {}  # by object, the thread or loop that runs its methods
        self.tables: dict[str, dict[str, Any]] = {}  # by object, the description of its methods
        self.loops = {}
        self.inline: deque[tuple[int, bytes, Any]] = deque()  # calls that the side queue's thread runs itself
        self.host = session.host  # in a worker, the Host that runs the other calls of the side queue
        self.core.on_side_call = self.arrived
        self.core.on_side_shared = self.choose_threads

    def run_inline(self) -> None:
        while self.inline:
            self.serve(*self.inline.popleft())

    def choose_threads(self) -> None:
        """Decides which threads run methods, after an object was added."""
        only = next(iter(self.objects.values())) if len(self.objects) == 1 else None
        if (
            only is not None
            and not only.is_async
            and not only.lanes
            and not self.core.side_is_shared
            and self.host is None
        ):
            self.core.read_side(self.run_inline)
            return
        self.core.read_side()
        for key, made in self.objects.items():
            if not made.is_async and self.runners[key] is None:
                self.runners[key] = Thread(self, f"troupe-{key}")

    def add(self, obj: object, max_concurrency: int) -> str:
        key = f"{_SERVED}{next(_numbers)}"
        self.objects[key], self.tables[key] = _serve.describe(obj, max_concurrency, "all")
        self.runners[key] = self.loop_for() if self.objects[key].is_async else None
        self.choose_threads()
        return key

    def announce(self, key: str, name: str | None) -> WorkerHandle:
        """Registers the object as a role and returns its handle."""
        request = _seam.serve(
            runtime=self.session.id,
            name=name or "",
            class_name=type(self.objects[key].value).__name__,
            object=key,
            table=self.tables[key],
        )
        try:
            fields = self.core.ask(request).get(_PATIENCE)
        except BaseException:
            self.remove(key)
            raise
        cluster = Cluster.__new__(Cluster)
        cluster._setup(self.session, fields)
        cluster._worker_cls = type(self.objects[key].value)
        cluster._on_shutdown = lambda: self.remove(key)
        return cluster.workers[0]

    def loop_for(self) -> _serve.Loop:
        running = _core.running_loop()
        return _serve.Loop(running) if running is not None else _serve.OwnLoop()

    def remove(self, key: str) -> None:
        """Stops serving an object. The server ends with its last object."""
        with _lock:
            self.objects.pop(key, None)
            self.tables.pop(key, None)
            runner = self.runners.pop(key, None)
            if runner is not None:
                runner.end()
            if not self.runners and self.session.server is self:
                self.core.on_side_call = None if self.host is None else self.host.arrived_beside
                self.core.on_side_shared = None
                self.session.server = None

    def close(self) -> None:
        """Stops serving all objects when the session ends."""
        for key in list(self.runners):
            self.remove(key)

    def trusts(self, meta: bytes) -> bool:
        return self.session.pickle and not meta[_seam.CallMeta.flags] & _seam.META_PIPELINE

    # Called by the reader; must not block.

    def arrived(self, kind: int, token: int, meta: bytes, body: object) -> None:
        if kind == VALUE:
            self.take_value(token, meta, body)
            return
        if kind == CANCEL:
            if not self.cancel_in(token) and self.host is not None:
                self.host.arrived_beside(kind, token, meta, body)
            return
        call = IncomingCall(self.core, token, meta)
        if self.host is not None and not call.object.startswith(_SERVED):
            self.host.arrived_beside(kind, token, meta, body)
            return
        made, runner = self.objects.get(call.object), self.runners.get(call.object)
        if made is None or call.object not in self.runners:
            self.values.pop(token, None)
            self.fail(token, _errors.ClosedError("the driver no longer serves this"))
        elif made.is_async:
            assert runner is not None
            self.begin_in(runner, token, call, body)
        elif runner is None:
            self.inline.append((token, meta, body))
        elif call.method in made.lanes:
            threading.Thread(target=self.serve, args=(token, meta, body), daemon=True, name="troupe-served").start()
        else:
            runner.put((token, meta, body))


class Thread:
    """Runs the methods of one object, one at a time. The object's queue in the core bounds the number of waiting
    calls."""

    def __init__(self, server: ObjectServer, name: str) -> None:
        import queue

        self.server = server
        self.calls: queue.SimpleQueue[tuple[int, bytes, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True, name=name).start()

    def run(self) -> None:
        while (item := self.calls.get()) is not None:
            self.server.serve(*item)

    def put(self, item: tuple[int, bytes, object]) -> None:
        self.calls.put(item)

    def end(self) -> None:
        self.calls.put(None)
