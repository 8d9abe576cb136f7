"""Objects and references to them.

The process that makes a call or puts a value owns the resulting object. An Entry represents an object inside one
process. Threads and event loops wait for it as for any other Troupe awaitable, through _done and _waiters. The Entry of
a borrowed reference is filled by a fetch from the owner. No other module knows how objects are stored or sent.
"""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import logging
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

from .. import _codec, _core, _errors, _reference, _seam
from .._session import current as troupe_session
from . import _serialize, _state, exceptions
from ._ids import JobID, TaskID
from ._peers import peer
from ._refused import refuse
from ._serialize import Frame

_POLITE = 0.001  # seconds the reader thread leaves a completion to threads that wait for one
_LATE = 0.05  # seconds between polls for completions while calls are pending but no object is watched
SHARED_SIZE = 1 << 20  # values of at least this many bytes are stored once and shared by all receivers
_GRACE = 2.0  # seconds a sent value's references and handles are kept after the receiver has it
_BORROWER_CHECK = 10.0  # seconds between liveness checks of the processes that borrow objects from this one

_logger = logging.getLogger("ray")

PENDING, VALUE, ERROR = 0, 1, 2
SHARED, LENT, SEVERAL = (
    3,
    4,
    5,
)  # answers: a Troupe reference to the value; one to a result still held by its worker; several frames
PLAIN = 6  # answers: the value itself
STAYS = 7  # answers: a large value, which may stay with its worker
FIRST = "01000000"  # the suffix of the object id of a task's first result


_taking = threading.Lock()  # guards the end of fetches: several threads may wait for one


class Entry:
    """The state of an object in this process."""

    # Defaults are class attributes because every call pays for creating an instance.
    _done = False
    kind = PENDING
    body: Any = None  # the frame of the value or the exception; None if the core still holds it (value_ref or lent_ref)
    value_ref: Any = None  # a Troupe reference to [kind, frame], for a large value that the owner stores
    # a Troupe reference to a large result stored by the worker that computed it; it may be lost with that worker
    lent_ref: Any = None
    kept: Any = None  # keeps alive the references and handles in the frame; of a failed call: its UnreadError
    call: Any = None  # the pending call or task that produces this object
    producer: Any = None  # a task that can produce the value again, while only its worker has it
    fetching = False
    pull: Any = None  # the fetch of the frame from a core, while it is under way

    def __init__(self, id: str, owner: str) -> None:
        self.id, self.owner = id, owner
        self._waiters: list[Any] = []

    def set(self, kind: int, frame: Frame, kept: object = None) -> None:
        """Completes the entry and wakes its waiters. Only the first call has an effect; any thread may call it."""
        if self._done:
            return
        waiters = self._waiters
        if kept is None:
            kept = _serialize.held(frame) if type(frame) is list else ()
        elif type(kept) is UnreadError and _error_is_handled in waiters:
            kept.read = True
        self.kind, self.body, self.kept, self.call = kind, frame, kept, None
        self._done = True
        if waiters:
            for wake in list(waiters):
                wake()

    def set_value(self, value: object) -> None:
        frame, contents = _serialize.dumps(value)
        self.set(VALUE, frame, contents)

    def set_error(self, error: BaseException) -> None:
        self.set(ERROR, _dump_error(error), ())

    def on_done(self, do: Callable[[], None]) -> _core.Notice:
        """Calls do once, when the entry is done, or immediately if it already is. Calling withdraw on the returned
        notice cancels the callback."""
        notice = _core.Notice(self._waiters, do)
        self._waiters.append(notice)
        if self._done:
            notice()
        else:
            _reader.watch(self)
        return notice

    def share(self) -> Any:
        """Returns a Troupe reference to a large value, so that all receivers share one copy. Returns None if the value
        is small or owned by another process."""
        if (
            self.value_ref is None
            and self._done
            and self.body is not None
            and self.kind == VALUE
            and _serialize.size(self.body) >= SHARED_SIZE
        ):
            state = _state.current()
            if state is not None and self.owner == state.store.process:
                self.value_ref = _put_frame(self.body)
        return self.value_ref

    def lend(self) -> tuple[_reference.Reference | None, bool]:
        """Returns a Troupe reference to a large value, or None, and whether the owner stores the value. If it does not,
        the receiver must ask the owner again when reading the reference fails."""
        if self.value_ref is None and self.lent_ref is not None:
            return self.lent_ref, False
        return self.share(), True

    def set_result(self, frame: Frame, ref: object) -> None:
        """Sets the result of a call made by this process. ref, if given, refers to the answer held by the worker. The
        frame lies in memory that this process has mapped, so it outlives the worker."""
        if ref is not None and _serialize.size(frame) >= SHARED_SIZE:
            self.lent_ref = ref
        self.set(VALUE, frame)

    def set_reference(self, ref: object, kept: object, lent: bool = False) -> None:
        """Completes the entry with a reference to a value held by some process's core; lent: the worker that computed
        the value holds it."""
        if lent:
            self.lent_ref = ref
        else:
            self.value_ref = ref
        self.kind, self.kept = VALUE, kept
        self.call = None
        self._done = True
        for wake in list(self._waiters):
            wake()

    def start_pull(self) -> Any:
        """Starts to fetch the frame from the core that holds it, unless a fetch is under way. Returns None if there is
        nothing to fetch."""
        pull, ref = self.pull, self.value_ref or self.lent_ref
        if pull is None and self._done and self.body is None and ref is not None:
            pull = self.pull = ref._start()
        return pull

    def fetched(self, pull: Any) -> None:
        """Takes the frame fetched by a core. If it was lost with its worker, the entry is computed or fetched from the
        owner again, or gets an error."""
        with _taking:
            if self.pull is not pull:
                return
            self.pull = None
            try:
                _, frame = (self.value_ref or self.lent_ref)._read(pull)
            except _errors.Error:
                if self.value_ref is not None:
                    raise exceptions.OwnerDiedError(self.id, self.owner) from None
                self.lent_ref, self._done, self.fetching = None, False, False
                producer, self.producer = self.producer, None
            else:
                if inside := _serialize.held(frame):
                    self.kept = (self.kept, inside)
                self.body, self.producer = frame, None
                return
        state = _state.current()
        if state is not None and self.owner != state.store.process:
            start_fetch(self, again=True)
        elif producer is None or not producer.run_again(self):
            self.set_error(exceptions.ObjectLostError(self.id, self.owner))

    def fetch_copy(self, do: Callable[[], None]) -> None:
        """Calls do when this process has the frame that a worker holds, or has lost it for good."""
        pull = self.start_pull()

        def here() -> None:
            if pull is not None:
                self.fetched(pull)
            if self.body is not None:
                self.lent_ref = None
            self.on_done(do)

        if pull is None:
            here()
        else:
            pull.when_done(here)

    def load(self, deadline: float | None = None) -> None:
        """Waits for the frame of a value that a core holds. Raises GetTimeoutError at the deadline."""
        core = _core.get()
        while self.body is None:
            pull = self.start_pull()
            if not core.wait(self if pull is None else pull, deadline):
                raise exceptions.GetTimeoutError(f"Get timed out: object {self.id} has not arrived.")
            if pull is not None:
                self.fetched(pull)

    async def aload(self) -> None:
        """Does what load does, for event loops. Returns at once if the frame is already local."""
        core = _core.get()
        while self.body is None:
            pull = self.start_pull()
            await _core.wait_in_loop(core, self if pull is None else pull)
            if pull is not None:
                self.fetched(pull)

    def value(self, deadline: float | None = None) -> Any:
        """Returns the value, or raises the stored exception. Raises GetTimeoutError at the deadline."""
        if self.body is None:
            self.load(deadline)
        value = _serialize.loads(self.body)
        if self.kind == ERROR:
            self.handled()
            raise as_raised(value) from getattr(value, "cause", None)
        return value

    def handled(self) -> None:
        """Records that the program gets the error of this object, or that of another object it waited for in the same
        get, so that this one is not reported when the entry is dropped."""
        if not self._done and _error_is_handled not in self._waiters:
            self._waiters.append(_error_is_handled)
        if self._done and type(self.kept) is UnreadError:
            self.kept.read = True

    def error_frame(self) -> Frame:
        """Returns the frame of the error, which becomes the error of another object."""
        self.handled()
        frame: Frame = self.body
        return frame


def _error_is_handled() -> None:
    """Among the waiters of an entry: an error that it gets later is not reported."""


class UnreadError:
    """The error of a call made by this process, kept by the entries of its results. It is reported when they are
    dropped before the program got the error: nothing else would show it."""

    __slots__ = ("frame", "read", "store")

    def __init__(self, frame: Frame) -> None:
        state = _state.current()
        self.frame, self.store = frame, None if state is None else state.store
        self.read = False

    def __del__(self) -> None:
        if not self.read and self.store is not None:
            frame = self.frame
            later(lambda: _report_unread(frame), self.store)


def _report_unread(frame: Frame) -> None:
    """Reports the exception of a method or task, or the end of its worker. Other errors, such as those of calls to an
    actor that was killed, are often intended."""
    error = _serialize.loads(frame)
    cause = getattr(error, "cause", None)
    if not isinstance(error, (exceptions.RayTaskError, exceptions.WorkerCrashedError)) or isinstance(
        cause, exceptions.TaskCancelledError
    ):
        return
    if "RAY_IGNORE_UNHANDLED_ERRORS" not in os.environ:
        on_unhandled(as_raised(error))


def log_unhandled(error: BaseException) -> None:
    """Logs the error of a call or task whose last reference was dropped before the program got it."""
    _logger.error("Unhandled error (suppress with 'RAY_IGNORE_UNHANDLED_ERRORS=1'): %s", error)


on_unhandled = log_unhandled  # replaced by _private.worker, whose function of this purpose programs may replace


def as_raised(error: object) -> BaseException:
    if isinstance(error, exceptions.RayTaskError):
        return error.as_instanceof_cause()
    return error if isinstance(error, BaseException) else exceptions.RaySystemError(error)


def _dump_error(error: BaseException) -> Frame:
    try:
        frame, _ = _serialize.dumps(error)
        _serialize.loads(frame)
        return frame
    except Exception:
        frame, _ = _serialize.dumps(exceptions.RaySystemError(f"{type(error).__name__}: {error}"))
        return frame


def fail(entries: Sequence[Entry], frame: Frame) -> None:
    """Sets the results of a call that failed."""
    unread = UnreadError(frame)
    for entry in entries:
        entry.set(ERROR, frame, unread)


def cause_frame(cause: object, actor_id: str | None = None) -> Any:
    """Returns the exception frame for a death or refusal that the control service reports. A constructor's error
    already is a frame."""
    if not isinstance(cause, dict):
        return cause
    kind, text = cause["kind"], cause["text"]
    if kind == "died":
        return _dump_error(exceptions.ActorDiedError(text, None, actor_id))
    of_actor = actor_id is not None
    if kind == "group_removed":
        return _dump_error(
            (exceptions.ActorPlacementGroupRemoved if of_actor else exceptions.TaskPlacementGroupRemoved)(text)
        )
    return _dump_error((exceptions.ActorUnschedulableError if of_actor else exceptions.TaskUnschedulableError)(text))


class ObjectRef:
    """A reference to an object that exists or is still being computed."""

    __slots__ = ("__weakref__", "_entry", "_function_name")

    def __init__(self, entry: Entry | bytes) -> None:
        self._entry: Entry = Entry(entry.hex(), "") if isinstance(entry, bytes) else entry

    @classmethod
    def nil(cls) -> ObjectRef:
        return cls(b"\xff" * 28)

    @classmethod
    def from_random(cls) -> ObjectRef:
        return cls(os.urandom(28))

    @classmethod
    def size(cls) -> int:
        return 28

    def hex(self) -> str:
        return str(self._entry.id)

    def binary(self) -> bytes:
        return bytes.fromhex(self._entry.id)

    def is_nil(self) -> bool:
        return str(self._entry.id) == "ff" * 28

    def task_id(self) -> TaskID:
        return TaskID(self.binary()[:24])

    def job_id(self) -> JobID:
        return JobID(bytes.fromhex(_state.require().job_id))

    def owner_address(self) -> str:
        return str(self._entry.owner)

    def call_site(self) -> str:
        return ""

    def __hash__(self) -> int:
        return hash(self._entry.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and other._entry.id == self._entry.id

    def __repr__(self) -> str:
        return f"ObjectRef({self._entry.id})"

    def future(self) -> concurrent.futures.Future[Any]:
        """Returns a concurrent.futures.Future of the value."""
        entry = self._entry
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        future.object_ref = self  # type: ignore[attr-defined]

        def finish() -> None:
            try:
                future.set_result(entry.value())
            except BaseException as err:
                future.set_exception(err)

        start_fetch(entry)
        entry.on_done(lambda: _callbacks.submit(finish))
        return future

    def _on_completed(self, do: Callable[[Any], None]) -> None:
        """Calls do with the value or the exception, on a callback thread."""
        entry = self._entry

        def finish() -> None:
            try:
                value = entry.value()
            except BaseException as err:
                value = err
            do(value)

        start_fetch(entry)
        entry.on_done(lambda: _callbacks.submit(finish))

    def as_future(self, _internal: bool = False) -> Any:
        import asyncio

        return asyncio.wrap_future(self.future())

    def __await__(self) -> Generator[Any, None, Any]:
        return self._await().__await__()

    async def _await(self) -> Any:
        entry = self._entry
        start_fetch(entry)
        if not entry._done:
            await _core.wait_in_loop(_core.get(), entry)
        await entry.aload()
        return entry.value()

    def __reduce__(self) -> tuple[object, ...]:
        _serialize.note_ref(self)
        return ref_of_wire, (self._wire(),)

    def _wire(self) -> list[str]:
        state = _state.current()
        if state is not None:
            state.store.publish(self._entry)
        return [self._entry.id, self._entry.owner]

    def _wire_with_value(self) -> Sequence[object]:
        """Returns the form of the reference for messages, which, unlike pickles, can carry Troupe references."""
        ref = self._entry.share()
        return self._wire() if ref is None else [*self._wire(), ref]

    def __copy__(self) -> ObjectRef:
        return self

    def __deepcopy__(self, _: object) -> ObjectRef:
        return self

    def __class_getitem__(cls, item: object) -> type[ObjectRef]:
        return cls


def all_entries() -> list[Entry]:
    """Returns the entries of this process. It searches the heap, so that calls need not keep a list of them."""
    return [found for found in gc.get_objects() if isinstance(found, Entry)]


def reference_counts() -> dict[Entry, int]:
    """Returns the entries that the program has references to, and how many."""
    counts: dict[Entry, int] = {}
    for found in gc.get_objects():
        if isinstance(found, ObjectRef):
            counts[found._entry] = counts.get(found._entry, 0) + 1
    return counts


def describe_process(state: _state.State, with_objects: bool) -> dict[str, Any]:
    """Returns what tables show of this process, and of its objects: the id, the size in bytes, whether it exists, and
    the references here and in other processes."""
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "ip": state.node_ip,
        "node_id": state.node_id,
        "job_id": state.job_id,
        "actor_id": state.actor_id,
        "worker_id": state.worker_id,
        "is_driver": state.mode == _state.DRIVER_MODE,
    }
    if with_objects:
        counts = reference_counts()
        found["objects"] = [
            [
                entry.id,
                _serialize.size(entry.body) if entry.body is not None else 0,
                entry._done,
                counts.get(entry, 0),
                sum(state.store.borrowed.get(entry.id, (None, {}))[1].values()),
            ]
            for entry in all_entries()
            if entry.owner == state.store.process and entry.id
        ]
    return found


class _Reader:
    """The thread that takes completions when no other thread waits for them. While an entry is watched, because a
    callback depends on it, the thread polls for completions. Otherwise it checks every _LATE seconds while calls are
    pending, so that an answer wakes only the thread that waits for it."""

    def __init__(self) -> None:
        self._pid = 0
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Entry] = weakref.WeakSet()
        self._wake = -1
        self.parked = False  # whether the thread sleeps until wake is called

    def start(self, core: _core.Core) -> None:
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._watched = weakref.WeakSet()
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                threading.Thread(target=self._run, args=(core,), daemon=True, name="ray-reader").start()

    def watch(self, entry: Entry) -> None:
        """Polls for completions until the entry is done, because a callback depends on it."""
        with self._lock:
            first = not self._watched
            self._watched.add(entry)
        if first:
            self.wake()

    def wake(self) -> None:
        self.parked = False
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _watches(self) -> bool:
        if not self._watched:
            return False
        with self._lock:
            for entry in [e for e in self._watched if e._done]:
                self._watched.discard(entry)
            return bool(self._watched)

    def _run(self, core: _core.Core) -> None:
        woken, both = select.poll(), select.poll()
        for poller in (woken, both):
            poller.register(self._wake, select.POLLIN)
        both.register(core.fd, select.POLLIN)
        while True:
            watches = self._watches()
            if not watches:
                self.parked = True  # set before reading _pending: a call sent after this line wakes the thread
                if any(
                    not token & _seam.SIDE_TOKEN for token in list(core._pending)
                ):  # the side queue has a thread of its own
                    self.parked = False
                found = woken.poll(None if self.parked else _LATE * 1000)
                self.parked = False
            elif core._reader.locked():
                found = woken.poll(_POLITE * 1000)
            else:
                found = both.poll()
            if any(fd == self._wake for fd, _ in found):
                os.eventfd_read(self._wake)
                continue
            if watches:
                time.sleep(_POLITE)
            try:
                core.look()
            except Exception:
                return  # the core has shut down


_reader = _Reader()


def sent() -> None:
    """Ensures that the answer to a call just sent is taken even if no thread waits for it."""
    if _reader.parked:
        _reader.wake()


def start_reader(core: _core.Core) -> None:
    _reader.start(core)
    _sweeper.start()


class _Callbacks:
    """A pool of threads for callbacks of completions that may take long."""

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def submit(self, do: Callable[[], None]) -> None:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._pool = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="ray-callback")
                self._pid = os.getpid()
        try:
            self._pool.submit(do)
        except RuntimeError:  # the interpreter is shutting down
            do()


_callbacks = _Callbacks()


class Store:
    """The objects that this process owns or borrows, and the borrowers of those it owns."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.entries: weakref.WeakValueDictionary[str, Entry] = weakref.WeakValueDictionary()
        # arguments of running calls, kept by their callers
        self.arguments: weakref.WeakValueDictionary[str, Entry] = weakref.WeakValueDictionary()
        self.borrowed: dict[
            str, tuple[Entry, dict[str, int]]
        ] = {}  # owned objects with borrowers: the reference count of each process
        self._lock = threading.RLock()
        self._lingering: list[tuple[float, Any]] = []
        self._check_at = 0.0  # time of the next borrower check, while there are borrowers
        self._checked: set[str] = set()  # borrowers that have not answered the last check yet
        self._prefix = os.urandom(16).hex()
        self._numbers = itertools.count(1)

    # Owned objects.

    def task_id(self) -> str:
        """Returns a new id for a task or call of this process."""
        return f"{self._prefix}{next(self._numbers):016x}"

    def new(self, task_id: str = "", index: int = 1) -> Entry:
        """Creates an object owned by this process: the result of a task with this index, or a value for put."""
        return Entry(
            (task_id or self.task_id()) + (FIRST if index == 1 else index.to_bytes(4, "little").hex()), self.process
        )

    def publish(self, entry: Entry) -> None:
        """Makes an owned object available to fetch requests from other processes."""
        if entry.owner == self.process:
            self.entries.setdefault(entry.id, entry)

    def borrow(self, id: str, borrower: str) -> bool:
        """Adds one to the borrower's reference count. Returns False if the object has already been freed."""
        with self._lock:
            entry = self.entries.get(id)
            if entry is None:
                return False
            first = not self.borrowed
            if first:
                self._check_at = time.monotonic() + _BORROWER_CHECK
            counts = self.borrowed.setdefault(id, (entry, {}))[1]
            counts[borrower] = counts.get(borrower, 0) + 1
        if first:
            _sweeper.wake()
        return True

    def give_back(self, id: str, borrower: str) -> None:
        with self._lock:
            found = self.borrowed.get(id)
            if found is None:
                return
            counts = found[1]
            counts[borrower] = counts.get(borrower, 0) - 1
            if counts[borrower] <= 0:
                del counts[borrower]
            if not counts:
                del self.borrowed[id]

    def _check(self, borrower: str) -> None:
        """Checks that a borrower is alive; the references of a dead one are dropped."""

        def done(_: object, error: BaseException | None) -> None:
            with self._lock:
                self._checked.discard(borrower)
                if isinstance(error, (_errors.WorkerLostError, _errors.NotFoundError)):
                    for id, (_entry, counts) in list(self.borrowed.items()):
                        counts.pop(borrower, None)
                        if not counts:
                            del self.borrowed[id]

        try:
            peer(borrower).ask("owns", (), done)
        except Exception as err:  # the session is ending; the sweeper thread must go on
            done(None, err)

    def linger(self, kept: object) -> None:
        """Keeps objects alive for _GRACE seconds, while the receiver of a value registers as a borrower of its
        contents."""
        if isinstance(kept, _serialize.Contents):  # the core keeps Troupe references alive
            kept = [*kept.handles, *(r for r in kept.refs if r._entry.value_ref is None)]
        if not kept:
            return
        with self._lock:
            self._lingering.append((time.monotonic() + _GRACE, kept))
        _sweeper.wake()

    def is_needed(self) -> bool:
        """Returns whether other processes borrow objects of this one, or are about to."""
        with self._lock:
            return bool(self.borrowed or self._lingering)

    def sweep(self) -> float | None:
        """Drops lingering objects whose time is up and checks the borrowers if a check is due. Returns the seconds
        until the next of either is due."""
        now = time.monotonic()
        silent: set[str] = set()
        with self._lock:
            due = [k for t, k in self._lingering if t <= now]
            self._lingering = [(t, k) for t, k in self._lingering if t > now]
            times = [t for t, _ in self._lingering]
            if self.borrowed:
                if self._check_at <= now:
                    self._check_at = now + _BORROWER_CHECK
                    silent = {b for _, counts in self.borrowed.values() for b in counts} - self._checked
                    self._checked |= silent
                times.append(self._check_at)
        del due
        for borrower in silent:
            self._check(borrower)
        return min(times) - now if times else None

    # Borrowed objects.

    def of_wire(self, id: str, owner: str, ref: object = None) -> Entry:
        with self._lock:
            entry = self.entries.get(id)
            if entry is not None:
                return entry
            entry = Entry(id, owner)
            self.entries[id] = entry
        if ref is not None:
            entry.set_reference(ref, ())
        elif owner == self.process:  # freed before the reference arrived
            entry.set_error(exceptions.ReferenceCountingAssertionError(id))
        else:
            peer(owner).notify("borrow", id, self.process)
            weakref.finalize(entry, _give_back, self, id, owner).atexit = False
        return entry

    def argument(self, id: str, owner: str, ref: object, lent: bool) -> Entry:
        """Returns the entry of a call's argument. ref is a Troupe reference, or the fields of one that the caller keeps
        until the call is over. lent: a worker, not the owner, holds the value."""
        with self._lock:
            entry = self.entries.get(id) or self.arguments.get(id)
            if entry is not None:
                return entry
            entry = self.arguments[id] = Entry(id, owner)
            if lent and owner == self.process:  # freed before the call arrived
                entry.set_error(exceptions.ReferenceCountingAssertionError(id))
            else:
                entry.set_reference(_reference.UncountedReference(*ref) if type(ref) is list else ref, (), lent)
        return entry


def _give_back(store: Store, id: str, owner: str) -> None:
    """Runs as a finalizer, on any thread and possibly with locks held, so it leaves the message to the sweeper."""
    later(lambda: peer(owner).notify("give_back", id, store.process), store)


_finalized: queue.SimpleQueue[tuple[Callable[[], None], Store] | None] = queue.SimpleQueue()


def later(do: Callable[[], None], store: Store) -> None:
    """Queues do for the sweeper thread, which skips it if the session has ended by then. Finalizers use this."""
    _finalized.put((do, store))


class _Sweeper:
    """The thread that drops lingering objects and runs the functions queued by finalizers."""

    def __init__(self) -> None:
        self._pid = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                threading.Thread(target=self._run, daemon=True, name="ray-sweeper").start()

    def wake(self) -> None:
        _finalized.put(None)

    def _run(self) -> None:
        left: float | None = None
        while True:
            try:
                item = _finalized.get(timeout=left)
            except queue.Empty:
                item = None
            state = _state.current()
            if item is not None and state is not None and state.store is item[1]:
                try:
                    item[0]()
                except Exception:
                    pass  # the peer is gone or the session is ending
            item = None
            left = state.store.sweep() if state is not None and state.store is not None else None


_sweeper = _Sweeper()


def when_answered(future: Any, do: Callable[[Callable[[], tuple[int, Any, Any]]], None]) -> None:
    """Calls do(read) when a call is over, on the thread that reads completions. read() returns the kind of the answer,
    the answer, and a reference if its worker holds it, or raises the error of the call. An answer that is not in the
    shared memory of this host stays with its worker: the kind is LENT."""

    def over(_: object) -> None:
        kept = future._kept
        if not kept:
            do(lambda: (*future._get(), None))
            return
        ref = next(iter(kept.values()))
        pull = ref._start(_seam.GET_HERE)
        pull.when_done(lambda: do(lambda: (LENT, None, ref) if pull.flags & _seam.FAILED else (*ref._read(pull), ref)))

    future.add_done_callback(over)


def set_results(entries: list[Entry], kind: int, answer: Any, ref: object) -> None:
    """Sets the entries of a call's results from what when_answered has read."""
    if kind == SEVERAL:
        for entry, frame in zip(entries, answer, strict=False):
            entry.set(VALUE, frame)
    elif kind == PLAIN:
        entries[0].set(VALUE, (answer,), ())
    elif kind == LENT:
        entries[0].set_reference(ref, (), lent=True)
    else:
        entries[0].set_result(answer, ref)


def start_fetch(entry: Entry, again: bool = False) -> None:
    """Starts to fetch an object from its owner, unless a fetch is already running. again: the worker that held the
    value has died."""
    if entry._done or entry.fetching or entry.call is not None:
        return
    state = _state.current()
    if state is None or state.store is None or entry.owner == state.store.process or not entry.owner:
        return
    entry.fetching = True

    def done(value: Any, error: BaseException | None) -> None:
        if error is not None:
            entry.set_error(exceptions.OwnerDiedError(entry.id, entry.owner))
        elif value[0] in (SHARED, LENT):
            entry.set_reference(value[1], (), lent=value[0] == LENT)
        else:
            entry.set(value[0], value[1])

    peer(entry.owner).ask("fetch", (entry.id, again), done)


def ref_of_wire(wire: Sequence[object]) -> ObjectRef:
    return ObjectRef(_state.require().store.of_wire(*wire))


_serialize.read_ref = ref_of_wire


def _put_frame(frame: Frame) -> _reference.Reference:
    """Stores a copy of a frame in the core and returns a Troupe reference to it."""
    session = troupe_session(start=False)
    body = session.codec(True).encode([VALUE, frame])
    return _reference.put_body(session, body, _codec.take_references())


class Promise:
    """An object reference whose value this process sets later."""

    def __init__(self) -> None:
        self._entry = _state.require().store.new()
        self.ref = ObjectRef(self._entry)

    def set_result(self, value: object) -> None:
        self._entry.set_value(value)

    def set_exception(self, error: BaseException) -> None:
        self._entry.set_error(error)


def put(value: object, *, _owner: object = None, _tensor_transport: object = None) -> ObjectRef:
    """Stores a value and returns a reference to it."""
    if _tensor_transport is not None and _tensor_transport != "object_store":
        raise refuse("put(_tensor_transport=…)", "troupe.put of a tensor")
    if _owner is not None:
        raise refuse("put(_owner=…)", "a call of the owner that returns the value")
    if isinstance(value, ObjectRef):
        raise TypeError(
            "Calling 'put' on an ray.ObjectRef is not allowed. If you really want to do this, wrap the ray.ObjectRef "
            "in a list and call 'put' on it."
        )
    entry = _state.require().store.new()
    try:
        frame, contents = _serialize.dumps(value)
    except TypeError:
        from .util.check_serialize import could_not_serialize

        raise could_not_serialize(f"the put value {value!r}", value) from None
    if type(frame) is not list or not frame[1]:
        entry.set(VALUE, frame, contents)
    elif _serialize.size(frame) < SHARED_SIZE:
        _serialize.copy_buffers(frame)
        entry.set(VALUE, frame, contents)
    else:
        entry.set_reference(_put_frame(frame), contents)
    return ObjectRef(entry)
