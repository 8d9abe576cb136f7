"""Bindings of the Go core, a shared library: short calls into it, and the reading of its completions.

Short calls keep the interpreter lock (PyDLL); a wait for completions releases it once, in poll. Of all waiting threads,
one at a time is the reader: it takes completions in batches and delivers those of the other threads to them. When the
reader leaves, another waiting thread takes over. Event loops read completions while no thread does. See DESIGN.md.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import select
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from . import _errors, _seam, _traceback
from ._seam import CALL, FAILED, LAST, SIDE_TOKEN, CompletionHead

if TYPE_CHECKING:
    import asyncio

    from ._codec import Walk

_TAKE = 1 << 20
_SET_TIMERSLACK, _GET_TIMERSLACK, _SLACK = 29, 30, 250_000  # prctl options, and the timer slack in nanoseconds
_QUIET = 20  # milliseconds without a completion after which a process counts as idle

_unpack_head = CompletionHead.layout.unpack_from

Buffer = bytes | bytearray | memoryview
OnCall = Callable[[int, int, bytes, Any], None]  # kind, token, meta, body


class Receiver(Protocol):
    """Receives the completions of one token. The reader calls deliver, one call at a time; deliver must not block."""

    def deliver(self, kind: int, flags: int, rank: int, body: Buffer) -> None: ...


class Waited(Protocol):
    """An operation that can be waited for: whether it is done, and the callbacks to run when it is."""

    _done: bool
    _waiters: list[Any]


class Sleeper:
    """The waiter of a thread that sleeps while another thread reads."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()

    def __call__(self) -> None:
        try:
            self.lock.release()
        except RuntimeError:
            pass  # the thread is awake already


class Notice:
    """A waiter that runs a callback once. It refers only to the waiter list and the callback, so that no reference
    cycle remains afterwards."""

    __slots__ = ("_do", "_waiters")

    def __init__(self, waiters: list[Any], do: Callable[[], None]) -> None:
        self._waiters, self._do = waiters, do

    def __call__(self) -> None:
        if self.withdraw():
            self._do()

    def withdraw(self) -> bool:
        """Removes the waiter from its list. Returns False if it has already run or been withdrawn."""
        try:
            self._waiters.remove(self)  # if two threads try, only one succeeds
        except ValueError:
            return False
        return True


def library_path() -> str:
    """Returns the path of the library: $TROUPE_LIBRARY, or a file beside this one."""
    given = os.environ.get("TROUPE_LIBRARY")
    if given:
        return given
    here = os.path.dirname(os.path.abspath(__file__))
    return os.path.join(here, "bin", "libtroupe.so")


def program_path() -> str:
    """Returns the path of the `troupe` program: $TROUPE_PROGRAM, or a file beside the library."""
    given = os.environ.get("TROUPE_PROGRAM")
    if given:
        return given
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "troupe")


@contextlib.contextmanager
def _unhurried() -> Iterator[None]:
    """Sets the timer slack of threads started inside the block to at least 250 µs. In a process that receives a
    thousand calls a second, a thread of the Go runtime wakes about every 20 µs; with more workers than cores, these
    threads would use a tenth of the CPU time."""
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    before = prctl(_GET_TIMERSLACK, 0, 0, 0, 0)
    prctl(_SET_TIMERSLACK, max(_SLACK, before), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_TIMERSLACK, max(before, 1), 0, 0, 0)


def _load() -> ctypes.PyDLL:
    path = library_path()
    try:
        with _unhurried():
            lib = ctypes.PyDLL(path)
            lib.troupe_version()  # by its return, the Go runtime has started its first threads
    except OSError as err:
        text = str(err)
        if "GLIBC_" in text:
            raise ImportError(
                f"troupe: {path} needs a newer C library than this system has ({text}); "
                "use a system with glibc 2.34 or later, or build the package here with `make wheel`"
            ) from err
        raise ImportError(f"troupe: the library {path} cannot be loaded: {text}; build it with `make python`") from err
    for name, result, args in _seam.FUNCTIONS:
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = list(args)
    return lib


def _load_long(lib: ctypes.PyDLL) -> tuple[Callable[[int, int, int], int], Callable[..., int]]:
    """Loads the functions that may run long, troupe_copy and troupe_put. They are called without the interpreter
    lock."""
    long = ctypes.CDLL(library_path())
    copy, put = long.troupe_copy, long.troupe_put
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    put.argtypes, put.restype = lib.troupe_put.argtypes, lib.troupe_put.restype
    return copy, put


class Resized(_errors.InvalidError):
    """A role has another size than a call was planned for; the caller learns the size and plans the call again."""


class Inbox:
    """Completions taken from one of the core's queues and not yet delivered. One thread uses it at a time."""

    def __init__(self, core: Core, take: Any, side: bool) -> None:
        self._core = core
        self._side = side
        self._take = take
        self._buffer = bytearray(_TAKE)
        self._address = ctypes.addressof((ctypes.c_char * _TAKE).from_buffer(self._buffer))
        self.at = self.end = 0  # bounds of the undelivered part of the buffer
        self._loan: tuple[int, Any] | None = None  # number and memory of the large body being delivered

    def drain(self) -> bool:
        """Takes the queued completions and delivers them. Returns False if the queue was empty; the core then sends the
        messages that it has held back. An interrupt loses no completion: the next call resumes where this one stopped.
        If more is queued than fits into the buffer, the descriptor stays readable."""
        taken = 0
        while True:
            while self.at < self.end:
                self.at = self._hand_on(self.at)
            self._loan = None
            if taken:
                return True
            taken = self._take(self._address, _TAKE)
            if taken <= 0:
                if taken < 0:
                    raise self._core.fail(taken)
                return False
            self.at, self.end = 0, taken

    def _hand_on(self, start: int) -> int:
        """Delivers the completion that starts at an offset of the buffer, and returns the offset of the next one."""
        buffer = self._buffer
        kind, flags, token, rank, meta_len, body_len, at, number = _unpack_head(buffer, start)
        start += CompletionHead.size
        end: int = start + (meta_len + 7 & ~7)
        body: Buffer
        if at:
            body = self._lent(at, body_len, number)
        else:
            body = buffer[end : end + body_len]
            end += body_len + 7 & ~7
        if kind < CALL:
            receiver = self._core._pending.get(token)
            if meta_len:
                self._references(receiver, flags, rank, bytes(buffer[start : start + meta_len]))
            if receiver is not None:
                receiver.deliver(kind, flags, rank, body)
                if flags & LAST:
                    self._core._pending.pop(token, None)
        elif (on_call := self._core.on_side_call if self._side else self._core.on_call) is not None:
            on_call(kind, token, bytes(buffer[start : start + meta_len]), body)
        return end

    def _references(self, receiver: object, flags: int, rank: int, names: bytes) -> None:
        """Passes the references of a completion to its receiver. Without a receiver, they are dropped."""
        take = getattr(receiver, "take_references", None)
        if take is not None:
            take(flags, rank, names)
        elif self._core.adopt is not None:
            self._core.adopt(names)

    def _lent(self, at: int, n: int, number: int) -> memoryview:
        """Returns a large body in place. A body that is delivered a second time, after an interrupt, keeps its one
        memory object."""
        if self._loan is None or self._loan[0] != number:
            self._loan = (number, Message(self._core, at, n, number).body())
        return self._loan[1]


class Core:
    """The Go core of this process. There is one per process."""

    adopt: Callable[[bytes], list[Any]] | None = (
        None  # makes Reference objects of encoded names, taking over the counts that came with them
    )

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.lib = _load()
        self.copy, self.put_large = _load_long(self.lib)
        self.fd = self.lib.troupe_init()
        if self.fd < 0:
            raise _errors.InternalError(f"the Go core does not start: {self.last_error()}")
        self._wake, self._wake_write = _wake_pair()
        self.on_call: OnCall | None = None  # in a worker: receives calls; runs on the reader
        self.on_side_call: OnCall | None = None  # receives calls of the side queue; runs on the thread that reads it
        self._inbox = Inbox(self, self.lib.troupe_take, side=False)
        self._drain = self._inbox.drain
        self._tokens = itertools.count(1)
        self._pending: dict[int, Receiver] = {}
        self._side_lock = threading.Lock()  # guards _side_generation and after_side
        self._side_generation = 0  # number of the thread that reads the side queue; threads of earlier generations exit
        self._beside: set[int] = set()  # idents of threads whose completions go to the side queue
        self.side_is_shared = (
            False  # whether pipeline functions use the side queue too; they must not wait for a served method
        )
        self.on_side_shared: Callable[[], None] | None = (
            None  # restarts the side queue's thread so that methods run on other threads
        )
        self.after_side: Callable[[], None] | None = (
            None  # called by the side queue's thread after each batch of deliveries
        )
        self._reader = threading.Lock()
        self._sleepers: list[Sleeper] = []
        self._thread = 0  # ident of the reader
        self._loops: dict[Any, int] = {}  # event loops with waiting code, and the number of waits in each
        self._pushes: set[Any] = set()  # event loops that have scheduled a push of held-back messages
        self._poller = select.poll()
        self._poller.register(self.fd, select.POLLIN)
        self._poller.register(self._wake, select.POLLIN)

    # Short calls.

    def check(self) -> None:
        """Raises ClosedError in a forked child, where Go's threads do not exist."""
        if self._pid != os.getpid():
            raise _errors.ClosedError(
                "Troupe cannot be used in a forked child process: the core's threads live in its parent alone; "
                "start workers with troupe.Cluster or troupe.actor, or processes with the 'spawn' method "
                "(multiprocessing.get_context('spawn')), and call troupe.init() there"
            )

    def version(self) -> str:
        return str(self.lib.troupe_version().decode())

    def last_error(self) -> str:
        room = ctypes.create_string_buffer(64 << 10)
        n = self.lib.troupe_error(room, len(room))
        return room.raw[:n].decode(errors="replace")

    def fail(self, status: int) -> _errors.Error:
        """Returns the error for a negative status."""
        if status == _seam.STATUS_RESIZED:
            return Resized("the role was resized while the call was made; make it again")
        text = self.last_error()
        if status == _seam.STATUS_PANIC:
            return _errors.InternalError(text)
        if status == _seam.STATUS_UNKNOWN:
            return _errors.NotFoundError("it is over already")
        if status == _seam.STATUS_REFUSED:
            return _errors.RefusedError(text)
        return _errors.InvalidError(text)

    def send(self, receiver: Receiver, do: Callable[[int], int]) -> int:
        """Registers a receiver under a new token and calls do(token), which starts the operation. Returns the token."""
        self.check()
        token = next(self._tokens)
        if self._beside and threading.get_ident() in self._beside:
            token |= SIDE_TOKEN
        self._pending[token] = receiver
        status = do(token)
        if status < 0:
            del self._pending[token]
            raise self.fail(status)
        return token

    def ask(self, request: _seam.Request) -> Ask:
        """Starts a request to the core that may take long."""
        ask = Ask(self)
        ask.token = self.request(ask, request)
        return ask

    def request(self, receiver: Receiver, request: _seam.Request) -> int:
        """Sends a request, whose answer goes to the receiver. Returns its token."""
        op, fields = request.op.encode(), encode_request(request)
        return self.send(receiver, lambda token: int(self.lib.troupe_ask(token, op, fields, len(fields))))

    def plan(self, cluster: int, request: bytes) -> bytes:
        self.check()
        return self._read_text(lambda out, room: int(self.lib.troupe_plan(cluster, request, len(request), out, room)))

    def weights(self, runtime: int, name: str) -> bytes:
        """Returns what this process knows of weights, encoded."""
        self.check()
        text = name.encode()
        return self._read_text(lambda out, room: int(self.lib.troupe_weights(runtime, text, len(text), out, room)))

    def _read_text(self, call: Callable[[object, int], int]) -> bytes:
        """Returns what a function of the core writes to a buffer, in which it may not have room at first."""
        room = 4096
        while True:
            out = ctypes.create_string_buffer(room)
            n = call(out, room)
            if n < 0:
                raise self.fail(n)
            if n <= room:
                return out.raw[:n]
            room = n

    def cancel(self, token: int) -> None:
        self.check()
        self.lib.troupe_cancel(token)

    def cancel_all(self) -> None:
        """Cancels every pending operation."""
        for token in list(self._pending):
            self.lib.troupe_cancel(token)

    def place(self, body: Buffer | Walk) -> int:
        """Copies a large body into newly allocated memory and returns its address. The core owns the memory once it is
        given the address."""
        self.check()
        n = len(body)
        at: int = self.lib.troupe_alloc(n)
        if not at:
            raise MemoryError(f"no room for a body of {n} bytes")
        view = memoryview(_span(n).from_address(at)).cast("B")[:n]
        try:
            if isinstance(body, (bytes, bytearray, memoryview)):
                view[:] = body
            else:
                body.write(view, self.copy)
        except BaseException:
            self.lib.troupe_release(at)
            raise
        return at

    # The side queue carries served calls, calls that run beside a worker's main thread, and calls of pipeline
    # functions. A dedicated thread reads it.

    def read_side(self, after: Callable[[], None] | None = None) -> None:
        """Starts a thread that reads the side queue; the thread that read it before ends. The thread calls `after`
        after each batch of deliveries; `after` may run a method, and the queue is not read meanwhile."""
        fd = self.lib.troupe_side()
        if fd < 0:
            raise self.fail(fd)
        with self._side_lock:
            self._side_generation += 1
            self.after_side = after
            threading.Thread(
                target=self._read_side, args=(fd, self._side_generation), daemon=True, name="troupe-side"
            ).start()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Directs the completions of what this thread sends inside the block to the side queue. The thread that reads
        that queue runs their callbacks immediately, and threads that wait for an answer are not woken. The side queue
        must already have a reader."""
        me = threading.get_ident()
        if me in self._beside:
            yield
            return
        self._beside.add(me)
        try:
            yield
        finally:
            self._beside.discard(me)
            self.lib.troupe_push()

    def share_side(self) -> None:
        """Makes pipeline functions users of the side queue: from now on, the thread that reads it runs no methods."""
        self.side_is_shared = True
        if self.on_side_shared is not None:
            self.on_side_shared()
        else:
            self.read_side()

    def _read_side(self, fd: int, generation: int) -> None:
        inbox = Inbox(self, self.lib.troupe_take_side, side=True)
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while True:
            poller.poll()
            with self._side_lock:
                if self._side_generation != generation:
                    return  # a newer thread has taken over
                inbox.drain()
                after = self.after_side
            if after is not None:
                after()

    # Completions.

    def poke(self) -> None:
        """Wakes the reader."""
        os.write(self._wake_write, b"\1\0\0\0\0\0\0\0")

    def wait(self, what: Waited, deadline: float | None) -> bool:
        """Blocks this thread until `what` is done or the deadline passes; returns whether it is done. The thread reads
        completions itself, or sleeps while another thread does. In an event loop it blocks that loop and nothing
        else."""
        self.check()
        if serving_loops:
            warn_in_serving_loop()
        while not what._done:
            if self._reader.acquire(False):
                what._waiters.append(self._wake_reader)
                try:
                    self._read(what, deadline)
                finally:
                    self._leave()
                    what._waiters.remove(self._wake_reader)
            else:
                self._sleep(what, deadline)
            if not what._done and deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def _sleep(self, what: Waited, deadline: float | None) -> None:
        """Sleeps while another thread reads, until `what` is done, the reader leaves or the deadline passes."""
        me = Sleeper()
        what._waiters.append(me)
        self._sleepers.append(me)
        try:
            # A reader that left before this thread joined the sleepers has not woken it.
            if self._reader.locked() and not what._done:
                me.lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            self._sleepers.remove(me)
            what._waiters.remove(me)
            if self._sleepers and not self._reader.locked():  # this thread may have been woken in order to read
                self._sleepers[0]()

    def _read(self, what: Waited, deadline: float | None) -> None:
        """Reads completions until `what` is done or the deadline passes."""
        self._thread = threading.get_ident()
        if deadline is None:
            drain, poll = self._drain, self._poller.poll
            while not what._done:
                if not drain():
                    for fd, _ in poll():
                        if fd == self._wake:
                            os.read(fd, 8)
            return
        while not what._done:
            if not self._drain():
                self._poll(None if deadline is None else deadline - time.monotonic())
            if deadline is not None and time.monotonic() >= deadline:
                return

    def _poll(self, left: float | None) -> None:
        """Waits for completions, without the interpreter lock."""
        for fd, _ in self._poller.poll(None if left is None else max(0.0, left) * 1000 + 1):
            if fd == self._wake:
                os.read(fd, 8)

    def idle(self, what: Waited, thread: int, when_quiet: Callable[[], None] | None = None) -> None:
        """Waits without a deadline; thread is the ident of the calling thread. Every short call takes this path, in the
        caller and in the worker. The reader needs no wake-up for its own result, because no other thread can have read
        it. when_quiet is called if the wait takes some time."""
        if serving_loops:
            warn_in_serving_loop()
        if not self._reader.acquire(False):
            if when_quiet is not None:
                when_quiet()
            self.wait(what, None)
            return
        self._thread = thread
        poll, limit = self._poller.poll, None if when_quiet is None else _QUIET
        try:
            if self._inbox.at < self._inbox.end:
                self._drain()
            while not what._done:
                ready = poll(limit)
                if not ready and when_quiet is not None:
                    when_quiet()
                    limit = None
                for fd, _ in ready:
                    if fd == self._wake:
                        os.read(fd, 8)
                self._drain()
        finally:
            self._leave()

    def _wake_reader(self) -> None:
        """Wakes the reader if another thread has read the result that the reader waits for."""
        if threading.get_ident() != self._thread:
            self.poke()

    def _leave(self) -> None:
        """Ends this thread's turn as reader and wakes a sleeping thread, which takes over."""
        self._reader.release()
        if self._sleepers:
            self._sleepers[0]()

    # Event loops.

    def enter_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes the loop read completions while code in it waits. Each call needs a matching leave_loop."""
        count = self._loops.get(loop, 0)
        self._loops[loop] = count + 1
        if count == 0:
            loop.add_reader(self.fd, self._ready)

    def leave_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        count = self._loops[loop] - 1
        if count:
            self._loops[loop] = count
            return
        del self._loops[loop]
        if not loop.is_closed():
            loop.remove_reader(self.fd)

    def _ready(self) -> bool:
        """Takes the queued completions. Returns False if another thread reads."""
        if not self._reader.acquire(False):
            return False
        self._thread = threading.get_ident()
        try:
            self._drain()
        finally:
            self._leave()
        return True

    look = _ready

    def take_now(self) -> None:
        """Takes the queued completions, or wakes the reader to take them. It is for completions that have woken no
        thread."""
        if not self._ready():
            self.poke()

    def push_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sends held-back messages soon: those sent before the next iteration of the running loop leave together at
        that iteration. On a thread of the side queue, sends them now."""
        if self._beside and threading.get_ident() in self._beside:
            self.lib.troupe_push()
            return
        if loop not in self._pushes:
            self._pushes.add(loop)
            loop.call_soon(self._push, loop)

    def _push(self, loop: object) -> None:
        self._pushes.discard(loop)
        for _ in range(
            2
        ):  # the second call usually finds an empty queue, and the core then sends the messages held back
            self._ready()

    # The end.

    def abandon(self) -> None:
        """Closes the descriptors in a forked child, and touches nothing else of the core."""
        self._pending.clear()
        self._sleepers.clear()
        self._loops.clear()
        for fd in {self.fd, self._wake, self._wake_write}:
            try:
                os.close(fd)
            except OSError:
                pass


def encode_request(request: _seam.Request) -> bytes:
    """Encodes the fields of a request. If a string cannot be encoded, as can happen with environments and paths, the
    error names its place."""
    fields = {name: value for name, value in request.fields.items() if value is not None}
    try:
        return bytes(msgpack.packb(fields))
    except UnicodeEncodeError:
        where = _unencodable(fields) or ["?"]
        raise _errors.InvalidError(
            f"{request.op}: {_errors.plain('.'.join(where))} is not valid text (it has a lone surrogate, often a byte "
            "of another encoding); change or remove it"
        ) from None


def _unencodable(value: object) -> list[str] | None:
    """Returns the path, within nested maps and lists, of the first string that cannot be encoded, or None."""
    if isinstance(value, str):
        return [] if value.encode("utf-8", "surrogatepass") != value.encode("utf-8", "replace") else None
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, inner in pairs:
        found = _unencodable(inner) if _unencodable(key) is None else []
        if found is not None:
            return [str(key), *found]
    return None


_spans: dict[int, type[ctypes.Array[ctypes.c_char]]] = {}


def _span(n: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Returns the ctypes type for a large body's memory, which is slightly larger than the body (pool.go). The sizes
    are rounded so that there are few types: creating one takes longer than a method call and leaves a reference
    cycle."""
    step = max(4096, 1 << max(n.bit_length() - 5, 0))
    size = -(-n // step) * step
    span = _spans.get(size)
    if span is None:
        span = _spans[size] = ctypes.c_char * size
    return span


def _give_back(core: Core, number: int) -> None:
    if core._pid == os.getpid():
        core.lib.troupe_release(number)


class Message:
    """The memory of a large body that was received. It is released when neither the body nor an array in it is used any
    more. When little of it is still used, the core gives the memory of the rest back, and those arrays stay where they
    are."""

    def __init__(self, core: Core, at: int, size: int, number: int) -> None:
        self._core = core
        self._at, self._size, self._number = at, size, number
        self._used = 0  # bytes of the parts; approximate, because parts end in any thread
        self._parts: dict[int, tuple[Any, int, int]] = {}  # by id of the weak reference: it, offset and size
        _messages[number] = self

    def body(self) -> memoryview:
        """Returns the whole body."""
        body = self.part(self._at, self._size)
        body.obj.message = self  # type: ignore[attr-defined]
        return body

    def part(self, at: int, n: int) -> memoryview:
        """Returns the bytes of the body at an address, which are used for as long as the view, or an array that was
        made of it, lives."""
        span = _span(n).from_address(at)
        ref = weakref.ref(span, self._dropped)
        self._parts[id(ref)] = (ref, at - self._at, n)
        self._used += n
        return memoryview(span).cast("B")[:n]

    def may_share_small(self) -> bool:
        """Returns whether arrays under 1 MiB may be parts. Each message of which a part is kept has a mapping of its
        own, and a process can have 65,530 of them."""
        return self._size > _MANY_PARTS and len(_trimmed) < _MOST_TRIMMED

    def _dropped(self, ref: object) -> None:
        self._used -= self._parts.pop(id(ref))[2]
        if not self._parts:
            _messages.pop(self._number, None)
            _trimmed.discard(self._number)
            _give_back(self._core, self._number)
        elif self._core._pid == os.getpid() and self._used < self._size // 8 and self._number not in _trimmed:
            _trimmed.add(self._number)
            ranges = [word for _, offset, n in list(self._parts.values()) for word in (offset, n)]
            self._core.lib.troupe_trim(self._number, struct.pack(f"={len(ranges)}Q", *ranges), len(ranges) // 2)


_messages: dict[int, Message] = {}  # messages in use, by number
_trimmed: set[int] = set()  # numbers of messages of which less than an eighth is in use
_MANY_PARTS = 2 << 20  # bytes of a message up to which its small arrays are copied
_MOST_TRIMMED = 1000
atexit.register(_messages.clear)  # while the interpreter ends, no part is given back


def _wake_pair() -> tuple[int, int]:
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return fd, fd
    read, write = os.pipe()
    return read, write


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the event loop that runs in this thread, or None, without importing asyncio."""
    events = sys.modules.get("asyncio.events")
    return None if events is None else events._get_running_loop()


# Event loops of this process that serve calls: those of async workers, async engines and async objects served by a
# driver.
serving_loops: set[Any] = set()
_warned = False


def warn_in_serving_loop(
    remedy: str = "`await handle.method.remote(…)`, or `await` the future of a call with blocking=False",
) -> None:
    """Warns, once per process, that a blocking call blocks an event loop that serves calls. remedy is the form that
    does not block it."""
    global _warned
    if not _warned and running_loop() in serving_loops:
        _warned = True
        text = (
            "a blocking call inside the event loop of an async worker stops all calls on that loop until it "
            f"returns; use {remedy}"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=_traceback.user_stacklevel())


class Ask:
    """A pending request to the core."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.token = 0
        self._done = False
        self._waiters: list[Any] = []
        self._value: Any = None
        self._error: _errors.Error | None = None

    def deliver(self, kind: int, flags: int, rank: int, body: Buffer) -> None:
        if flags & FAILED:
            self._error = _errors.from_body(body)
        else:
            self._value = msgpack.unpackb(body, strict_map_key=False, ext_hook=msgpack.ExtType)
        self._done = True
        for wake in list(self._waiters):
            wake()

    def get(self, timeout: float | None = None, wait: Callable[[Waited, float | None], bool] | None = None) -> Any:
        """Waits for the answer, with another function than core.wait if one is given. If the wait fails or is
        interrupted, cancels the request."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            if not (wait or self.core.wait)(self, deadline):
                raise _errors.TimedOutError(f"no answer within {timeout} s")
        except BaseException:
            if not self._done and self.core._pid == os.getpid():
                self.core.cancel(self.token)
            raise
        if self._error is not None:
            raise self._error._again()
        return self._value

    async def aget(self) -> Any:
        """Waits for the answer in the running event loop."""
        await wait_in_loop(self.core, self)
        if self._error is not None:
            raise self._error._again()
        return self._value


async def wait_in_loop(core: Core, what: Waited) -> None:
    """Waits in the running event loop until `what` is done."""
    import asyncio

    core.check()
    if what._done:
        return
    loop = asyncio.get_running_loop()
    event = loop.create_future()

    def finish() -> None:
        if not event.done():
            event.set_result(None)

    def wake() -> None:
        if running_loop() is loop:
            finish()
            return
        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:
            pass  # the loop is closed, so nothing waits any more

    reads = threading.get_ident() not in core._beside
    what._waiters.append(wake)
    if reads:
        core.enter_loop(loop)
    core.push_soon(loop)
    try:
        if not what._done:
            await event
    finally:
        if reads:
            core.leave_loop(loop)
        what._waiters.remove(wake)


_core: Core | None = None
_lock = threading.Lock()


def get() -> Core:
    """Returns the core, and loads it on first use."""
    global _core
    core = _core
    if core is None:
        with _lock:
            core = _core
            if core is None:
                core = _core = Core()
    return core


def loaded() -> Core | None:
    return _core


# A forked child sees the large arrays that this process has received in place, even after this process has dropped
# them. Their memory is therefore kept until the child exits or calls exec: the write end of this pipe, which the child
# inherits, is closed then.
_forks: dict[
    int, tuple[int, int, int]
] = {}  # by thread ident: the core's number of the fork, and the two ends of the pipe


def _before_fork() -> None:
    core = _core
    if core is None or core._pid != os.getpid():
        return
    number = core.lib.troupe_forking()
    if number:
        _forks[threading.get_ident()] = (number, *os.pipe())


def _after_fork_in_parent() -> None:
    fork = _forks.pop(threading.get_ident(), None)
    if fork is not None and _core is not None:
        number, read, write = fork
        os.close(write)
        _core.lib.troupe_forked(number, read)


def _after_fork() -> None:
    fork = _forks.pop(threading.get_ident(), None)
    if fork is not None:
        os.close(fork[1])  # the write end stays open
    _forks.clear()
    if _core is not None:
        _core.abandon()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
