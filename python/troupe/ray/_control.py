"""The client of the control service, which the head runs (roles/sessions): jobs, actors, actor names and handles, task
workers, resources.

The service starts the requests of a process in the order in which the process makes them. A restarted head has a new
service: this process reports the handles and leases that it holds, and repeats unanswered requests. The service
performs a repeated request once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from .. import _core, _errors, _seam
from .._cluster import Cluster, WorkerHandle
from .._future import Asked, Waitable
from .._session import current

_PATIENCE = 60.0  # seconds allowed for a head to return
_LOST = (
    _errors.WorkerLostError,
    _errors.ClosedError,
    _errors.UnavailableError,
    _errors.NotFoundError,
    _errors.OutcomeUnknownError,
    _errors.RefusedError,
)
_RECENT = 5.0  # seconds allowed for the service to store what it has created
_COUNTED = ("handle_taken", "handle_dropped")  # requests whose effect rejoin reports

Done = Callable[[Any, "BaseException | None"], None]


class Request:
    __slots__ = ("args", "done", "method", "number")

    def __init__(self, method: str, args: tuple[Any, ...], done: Done | None) -> None:
        self.method, self.args, self.done = method, args, done
        self.number = 0  # sequence number among the requests of this process to the current service


class Control:
    """The connection of one process to the control service."""

    def __init__(self, process: str, job_id: str = "") -> None:
        self.job_id = job_id
        self._process = process
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._handle: Any = None  # of the current service; None if unknown
        self._finding = False
        self._known = False  # whether an earlier service knew this process
        self._closed = False
        self._waiting: dict[Request, None] = {}  # requests not sent or not answered, in order
        self._holds: dict[str, int] = {}  # number of handles, by actor id
        self._leases: dict[str, dict[str, Any]] = {}
        self._recent: dict[
            str, tuple[float, Request]
        ] = {}  # by id, creations of actors and groups that may not be stored yet, with the time until when

    def ask(self, method: str, args: tuple[object, ...], done: Done) -> None:
        """Makes a request; done(value, None) or done(None, error) follows on any thread."""
        self._submit(Request(method, args, done))

    def notify(self, method: str, *args: object) -> None:
        """Makes a request without waiting for the answer; a dead service is not an error."""
        self._submit(Request(method, args, None))

    def close(self) -> None:
        """Stops repeating requests, because the session ends."""
        self._closed = True

    def _submit(self, request: Request) -> None:
        with self._lock:
            self._note(request.method, request.args)
            handle = self._handle
            if handle is not None:
                request.number = next(self._numbers)
            if handle is None or request.done is not None:
                self._waiting[request] = None
        if handle is not None:
            self._send(handle, request)
        else:
            self._find()

    def _note(self, method: str, args: tuple[Any, ...]) -> None:
        """Counts the handles and leases that rejoin reports to a new service."""
        if method in ("create_actor", "handle_taken"):
            self._holds[args[0]] = self._holds.get(args[0], 0) + 1
        elif method == "handle_dropped":
            left = self._holds.pop(args[0], 0) - 1
            if left > 0:
                self._holds[args[0]] = left
        elif method == "end_lease":
            self._leases.pop(args[0], None)
        elif method == "kill_actor":
            self._recent.pop(args[0], None)
        elif method == "placement" and args[0] == "remove_group":
            self._recent.pop(args[1], None)

    def _answered(self, request: Request, value: Any) -> None:
        with self._lock:
            self._waiting.pop(request, None)
            if request.method == "lease" and value.get("role"):
                lease, job, demand = request.args[:3]
                found = {k: value[k] for k in ("role", "node_id", "group", "bundle", "devices")}
                self._leases[lease] = {"id": lease, "job": job, "demand": demand, **found}
            elif request.method == "create_actor":
                if value:
                    self._note("handle_dropped", request.args)  # the caller got an existing actor
                else:
                    self._keep(request.args[0], request)
            elif request.method == "placement" and request.args[0] == "create_group" and not value:
                self._keep(request.args[1], request)
        if request.done is not None:
            request.done(value, None)

    def _keep(self, id: str, request: Request) -> None:
        """Keeps a creation for a while: a head that dies now may not have stored it."""
        now = time.monotonic()
        for old in [i for i, (until, _) in itertools.islice(self._recent.items(), 100) if until < now]:
            del self._recent[old]
        self._recent[id] = (now + _RECENT, request)

    def _send(self, handle: WorkerHandle, request: Request) -> None:
        def finish(future: Waitable) -> None:
            try:
                value = future._get()
            except BaseException as err:
                self._failed(handle, request, err)
            else:
                self._answered(request, value)

        try:
            with _core.get().beside():
                future = handle["ask"].remote(self._process, request.number, request.method, *request.args)
                if request.done is not None:
                    future._when_fetched(finish)
        except _errors.Error as err:
            self._failed(handle, request, err)

    def _failed(self, handle: WorkerHandle, request: Request, error: BaseException) -> None:
        """Handles an unanswered request: looks for the service again, or reports the failure."""
        lost = isinstance(error, _LOST) and not self._closed
        with self._lock:
            if lost and self._handle is handle:
                self._handle = None
            if not lost or request.done is None:
                self._waiting.pop(request, None)
        if lost:
            self._find()
        elif request.done is not None:
            request.done(None, error)

    def _find(self) -> None:
        """Looks for the service, unless a search is running."""
        with self._lock:
            if self._finding or self._handle is not None:
                return
            self._finding = True
        try:
            session = current(start=False)
            with session.core.beside():
                Asked(session.core, _seam.sessions(runtime=session.id, timeout=_PATIENCE)).add_done_callback(
                    self._found
                )
        except _errors.Error as err:
            self._give_up(err)

    def _found(self, asked: Asked) -> None:
        try:
            handle = Cluster._of(current(start=False), asked._get()).workers[0]
        except BaseException as err:
            self._give_up(err)
            return
        with self._lock:
            requests = self._again()
            self._numbers = itertools.count()
            for request in requests:
                request.number = next(self._numbers)
            self._handle, self._finding, self._known = handle, False, True
        for request in requests:
            self._send(handle, request)

    def _again(self) -> list[Request]:
        """Returns the requests to send to a service that does not know this process: rejoin, recent creations, and all
        unanswered requests."""
        for request in [r for r in self._waiting if r.method in _COUNTED and self._known]:
            del self._waiting[request]
        first: list[Request] = []
        repeated, last = list(self._waiting), [Request("present", (), _ignore)]
        if self._known:
            first.append(
                Request("rejoin", (self._process, self.job_id, dict(self._holds), list(self._leases.values())), None)
            )
            recent, self._recent = self._recent, {}
            repeated = [
                Request(r.method, r.args, None) for until, r in recent.values() if until > time.monotonic()
            ] + repeated
            created = [r.args[0] for r in repeated if r.method == "create_actor"]
            last += [
                Request("handle_dropped", (actor, self._process), None) for actor in created if actor not in self._holds
            ]
        for request in [r for r in self._waiting if r.done is None]:
            del self._waiting[request]
        return [*first, *repeated, *last]

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            requests, self._waiting, self._finding = list(self._waiting), {}, False
        for request in requests:
            if request.done is not None:
                request.done(None, error)


def _ignore(value: object, error: BaseException | None) -> None:
    """Ignores the answer to present: the service gives none before it ends, and _failed handles that."""
