"""Generators: the values of a task or method that yields, as references that come one by one.

The worker that runs a generator (Report) sends its values to the calling process (Stream), as calls to the service
that every process has for its objects. One such message is under way at a time, and it carries everything that was
yielded meanwhile; so the order is kept, and the worker holds few values that were not sent. With a limit
(_generator_backpressure_num_objects), the answer to a message waits until the consumer has taken so many values
that the generator may go on. The answer to the call itself follows the last value.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from .. import _core
from . import _objects, _peers, _serialize, _state, exceptions
from ._objects import ERROR, FIRST, PLAIN, VALUE, Entry, ObjectRef
from ._options import STREAMING
from ._serialize import Frame

_UNSENT = 256  # values that may wait for the message under way
_UNSENT_BYTES = 1 << 20  # and about how large they may be together
DROPPED = -1  # answers to a message: the consumer is gone


# The calling process.


class Stream(Entry):
    """The entry of a generator's call, with the objects that were yielded and not taken. It is done when the
    generator has ended: without a value, or with the error that ended its worker. An error that the generator
    raised is its last object instead."""

    def __init__(self, store: _objects.Store, task_id: str, limit: int) -> None:
        super().__init__(task_id + FIRST, store.process)
        self._store, self._task_id = store, task_id
        self._limit = limit  # objects that may be there and not taken; 0: any number
        self._lock = threading.Lock()  # guards the fields below
        self._objects: dict[int, Entry] = {}  # by position: objects not taken, and the one that the consumer waits for
        self._arrived = 0  # position after the last object
        self._taken = 0  # position of the next object
        self._end: int | None = None  # position after the last object, once the generator has ended
        self._answers: list[tuple[int, concurrent.futures.Future[int]]] = []  # each waits until fewer objects are left
        self._dropped = False
        self._gave_error = False  # whether the consumer has got the error that ended the worker
        store.publish(self)

    def _at(self, position: int) -> Entry:
        """Returns the object at a position; the caller holds the lock."""
        found = self._objects.get(position)
        if found is None:
            found = self._objects[position] = self._store.new(self._task_id, position + 2)
        return found

    def receive(self, first: int, values: Sequence[tuple[int, Any]]) -> int | concurrent.futures.Future[int]:
        """Takes values from the worker, those at positions from first on. Returns the number of objects taken so
        far, at once or as a future, or DROPPED. A generator that is run again, because its worker died, sends its
        first values again; they have no effect."""
        with self._lock:
            if self._dropped:
                return DROPPED
            fresh = [(self._at(first + i), v) for i, v in enumerate(values) if first + i >= self._taken]
            self._arrived = max(self._arrived, first + len(values))
            answer: Any = self._taken
            if self._limit and first + len(values) - self._taken >= self._limit:
                answer = concurrent.futures.Future()
                self._answers.append((first + len(values), answer))
        for entry, (kind, value) in fresh:
            if kind == PLAIN:
                entry.set(VALUE, (value,), ())
            else:
                entry.set(kind, value)
        return answer  # type: ignore[no-any-return]

    def set(self, kind: int, frame: Frame, kept: object = None) -> None:
        """Ends the stream: with the number of its objects, or an error."""
        if self._done:
            return
        last: list[Entry] = []
        with self._lock:
            self._end = self._arrived
            if kind == ERROR and not self._dropped and isinstance(_serialize.loads(frame), exceptions.RayTaskError):
                last.append(self._at(self._end))
                self._end += 1
        for entry in last:
            entry.set(ERROR, frame, kept)
        if kind == ERROR and not last:
            super().set(ERROR, frame, kept)
        else:
            super().set(VALUE, (None,), ())
        with self._lock:  # a consumer that comes from now on finds the stream done
            beyond = [e for position, e in self._objects.items() if position >= self._end]
        for entry in beyond:
            self._set_beyond(entry)

    def _set_beyond(self, entry: Entry) -> None:
        """Sets an object that does not come any more."""
        if self.kind == ERROR:
            entry.set(ERROR, self.body)
        else:
            entry.set(ERROR, _end_of_stream(), ())

    def peek(self, count: int) -> list[ObjectRef]:
        """Returns the next objects, also those that are not there yet."""
        with self._lock:
            entries = [self._at(self._taken + i) for i in range(count)]
            over = entries[max(self._end - self._taken, 0) :] if self._done and self._end is not None else ()
        for entry in over:
            if not entry._done:
                self._set_beyond(entry)
        return [ObjectRef(entry) for entry in entries]

    def consume(self, count: int) -> None:
        """Goes on behind objects that were peeked at."""
        with self._lock:
            if not self._at(self._taken + count - 1)._done:
                raise ValueError(f"not all of the next {count} objects of the generator are ready")
            for position in range(self._taken, self._taken + count):
                self._objects.pop(position, None)
            self._taken += count
        self._go_on()

    def head(self) -> Entry:
        """Returns the next object. It is also done, with an error, if there is none."""
        with self._lock:
            found = self._at(self._taken)
            over = self._done and self._end is not None and self._taken >= self._end
        if over:
            found.set(ERROR, _end_of_stream(), ())
        return found

    def take(self) -> ObjectRef | None:
        """Returns the next object, which is done, or None at the end. The error that ended the worker is the last
        of all."""
        with self._lock:
            if self._end is not None and self._taken >= self._end:
                given, self._gave_error = self._gave_error, True
                return ObjectRef(self) if self.kind == ERROR and not given else None
            entry = self._at(self._taken)
            del self._objects[self._taken]
            self._taken += 1
        self._go_on()
        return ObjectRef(entry)

    def _go_on(self) -> None:
        """Answers the messages that have waited for what was taken."""
        with self._lock:
            taken = self._taken
            ready = [a for count, a in self._answers if count - taken < self._limit]
            self._answers = [(count, a) for count, a in self._answers if count - taken >= self._limit]
        for answer in ready:
            answer.set_result(taken)

    def is_over(self) -> bool:
        """Returns whether everything was taken."""
        with self._lock:
            if self._end is None or self._taken < self._end or not self._done:
                return False
            return self.kind != ERROR or self._gave_error

    def drop(self) -> None:
        """Lets go of the objects. The generator runs on, as in Ray, but sends no more."""
        with self._lock:
            self._dropped = True
            self._objects.clear()
            answers, self._answers = self._answers, []
        for _, answer in answers:
            answer.set_result(DROPPED)


def _end_of_stream() -> Frame:
    return _objects._dump_error(exceptions.ObjectRefStreamEndOfStreamError("The generator has no more objects."))


class ObjectRefGenerator:
    """The references to the values of a generator, in the order in which it yields them: `for ref in gen`, `async
    for`, next(gen). A reference is there once its value is. The last one may be to an exception. It is the result
    of calls, and is not picklable."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        weakref.finalize(self, _objects.later, stream.drop, stream._store).atexit = False

    @property
    def _entry(self) -> Entry:
        """What wait waits for: the next object."""
        return self._stream.head()

    @property
    def _generator_ref(self) -> ObjectRef:
        return ObjectRef(self._stream)

    def __iter__(self) -> ObjectRefGenerator:
        return self

    def __next__(self) -> ObjectRef:
        return self._next_sync()

    def __aiter__(self) -> ObjectRefGenerator:
        return self

    async def __anext__(self) -> ObjectRef:
        return await self._next_async()

    def completed(self) -> ObjectRef:
        """Returns a reference that is ready when the generator has ended. It is to None, or to the error that ended
        its worker."""
        return self._generator_ref

    def next_ready(self) -> bool:
        """Returns whether next returns at once with a reference."""
        return not self.is_finished() and bool(self._stream.head()._done)

    def is_finished(self) -> bool:
        """Returns whether the generator has ended and all references were taken."""
        return self._stream.is_over()

    def _get_next_ref_n(self, count: int) -> list[ObjectRef]:
        """Returns the next references without taking them, also those whose values are not there yet."""
        if count < 1:
            raise ValueError(f"the number of references {count} must be positive")
        return self._stream.peek(count)

    def _consume_next_ref_n(self, count: int) -> None:
        """Takes the next references, which must be ready."""
        self._stream.consume(count)

    def _next_sync(self, timeout_s: float | None = None) -> ObjectRef:
        """Returns the next reference, or a nil one after the timeout; a negative one means none."""
        head = self._stream.head()
        if not head._done:
            deadline = None if timeout_s is None or timeout_s < 0 else time.monotonic() + timeout_s
            with _state.require().blocked():
                if not _core.get().wait(head, deadline):
                    return ObjectRef.nil()
        ref = self._stream.take()
        if ref is None:
            raise StopIteration
        return ref

    async def _next_async(self, timeout_s: float | None = None) -> ObjectRef:
        """Does what _next_sync does, for event loops."""
        head = self._stream.head()
        if not head._done:
            try:
                await asyncio.wait_for(
                    _core.wait_in_loop(_core.get(), head), None if timeout_s is None or timeout_s < 0 else timeout_s
                )
            except asyncio.TimeoutError:
                return ObjectRef.nil()
        ref = self._stream.take()
        if ref is None:
            raise StopAsyncIteration
        return ref

    def send(self, value: object) -> None:
        raise NotImplementedError("`gen.send` is not supported.")

    def throw(self, value: object) -> None:
        raise NotImplementedError("`gen.throw` is not supported.")

    def close(self) -> None:
        raise NotImplementedError("`gen.close` is not supported.")

    async def asend(self, value: object) -> None:
        raise NotImplementedError("`gen.asend` is not supported.")

    async def athrow(self, value: object) -> None:
        raise NotImplementedError("`gen.athrow` is not supported.")

    async def aclose(self) -> None:
        raise NotImplementedError("`gen.aclose` is not supported.")

    def _ray_get(self, timeout: float | None) -> ObjectRefGenerator:
        """What get returns for a generator, as in Ray."""
        return self

    def __getstate__(self) -> object:
        raise TypeError(
            "You cannot return or pass a generator to other task. Serializing a ObjectRefGenerator is not allowed."
        )


class DynamicObjectRefGenerator:
    """The value of a call with num_returns="dynamic": the references to all values of the generator."""

    def __init__(self, refs: Iterable[ObjectRef]) -> None:
        self._refs = deque(refs)

    def __iter__(self) -> Iterator[ObjectRef]:
        while self._refs:
            yield self._refs.popleft()

    def __len__(self) -> int:
        return len(self._refs)


def result_of(stream: Stream, returns: int) -> ObjectRefGenerator | ObjectRef:
    """Returns what the call of a generator returns."""
    generator = ObjectRefGenerator(stream)
    if returns == STREAMING:
        return generator
    whole = stream._store.new()
    whole.call = stream.call

    def ended() -> None:
        if stream.kind == ERROR:
            whole.set(ERROR, stream.error_frame())
        else:
            whole.set_value(DynamicObjectRefGenerator(generator))

    stream.on_done(ended)
    return ObjectRef(whole)


# The process that runs the generator.


class Report:
    """Sends the values of a running generator to the process that called it."""

    def __init__(self, id: str, caller: str, limit: int) -> None:
        self._stream_id, self._caller, self._limit = id + FIRST, caller, limit
        self._lock = threading.Lock()  # guards the fields below
        self._unsent: list[list[Any]] = []
        self._unsent_bytes = 0
        self._must_send = False  # whether an unsent value refers to memory that the generator may change
        self._sent = 0  # number of values in messages
        self._under_way = False  # whether a message is not answered
        self._taken = 0  # number of values taken by the consumer, as far as known
        self._awaited: tuple[Callable[[], bool], _state.Reply] | None = None
        self._cancelled = False
        self.dropped = False  # whether the consumer is gone, so that nothing more is sent
        self.lost = False  # whether the calling process is gone

    @property
    def count(self) -> int:
        return self._sent + len(self._unsent)

    def add(self, value: object, store: _objects.Store) -> None:
        """Adds a value that the generator has yielded."""
        if self.dropped or self.lost:
            with self._lock:
                self._sent += 1
            return
        item, size, refers = _item_of(value, store)
        with self._lock:
            self._unsent.append(item)
            self._unsent_bytes += size
            self._must_send = self._must_send or refers
        self._send()

    def _send(self) -> None:
        """Sends what is there, unless a message is under way."""
        with self._lock:
            if self._under_way or not self._unsent or self.dropped or self.lost:
                return
            first, values = self._sent, self._unsent
            self._sent += len(values)
            self._unsent, self._unsent_bytes, self._must_send, self._under_way = [], 0, False, True
        _peers.peer(self._caller).ask("receive_values", (self._stream_id, first, values), self._answered)

    def _answered(self, taken: int, error: BaseException | None) -> None:
        with self._lock:
            self._under_way = False
            if error is not None:
                self.lost = True
            elif taken == DROPPED:
                self.dropped = True
            else:
                self._taken = taken
            if self.lost or self.dropped:  # what is left is not sent
                self._sent += len(self._unsent)
                self._unsent, self._unsent_bytes, self._must_send = [], 0, False
        self._send()
        self._changed()

    def cancel(self) -> None:
        """Ends a wait of the generator, which is cancelled."""
        with self._lock:
            self._cancelled = True
        self._changed()

    def _may_go_on(self) -> bool:
        if self.lost or self.dropped or self._cancelled:
            return True
        if self._must_send or len(self._unsent) >= _UNSENT or self._unsent_bytes >= _UNSENT_BYTES:
            return False
        return not self._limit or self.count - self._taken < self._limit

    def _has_arrived(self) -> bool:
        return self._cancelled or self.dropped or self.lost or not (self._under_way or self._unsent)

    def room(self) -> _state.Reply | None:
        """Returns None if the generator may go on, otherwise a reply that comes when it may."""
        return self._when(self._may_go_on)

    def arrival(self) -> _state.Reply | None:
        """Returns None if all values have arrived, otherwise a reply that comes when they have."""
        return self._when(self._has_arrived)

    def _when(self, holds: Callable[[], bool]) -> _state.Reply | None:
        with self._lock:
            if holds():
                return None
            reply = _state.Reply()
            self._awaited = (holds, reply)
            return reply

    def _changed(self) -> None:
        with self._lock:
            if self._awaited is None or not self._awaited[0]():
                return
            reply, self._awaited = self._awaited[1], None
        reply._finish(None, None)


def _item_of(value: object, store: _objects.Store) -> tuple[list[object], int, bool]:
    """Returns a value as it is sent, its size in bytes, and whether it refers to memory of the generator."""
    if _serialize.needs_no_pickle(value):
        return [PLAIN, value], 0, False
    frame, contents = _serialize.dumps(value)
    if contents is not _serialize.EMPTY:
        store.linger(contents)
    return [VALUE, frame], _serialize.size(frame), type(frame) is list and bool(frame[1])


def _check_ends(call: Any, report: Report) -> None:
    if call.cancelled or report.lost:
        raise exceptions.TaskCancelledError(call.id)


def run(call: Any, values: Any, store: _objects.Store) -> list[object]:
    """Runs a generator and returns the answer to its call."""
    report = call.report = Report(call.id, *call.extra["stream"])
    try:
        for value in values:
            report.add(value, store)
            room = report.room()
            if room is not None:
                room.result()
            _check_ends(call, report)
    except (KeyboardInterrupt, exceptions.TaskCancelledError):
        raise
    except BaseException:
        _wait_for_arrival(report)
        raise
    finally:
        values.close()
    _wait_for_arrival(report)
    return [PLAIN, report.count]


def _wait_for_arrival(report: Report) -> None:
    arrival = report.arrival()
    if arrival is not None:
        arrival.result()


async def arun(call: Any, values: Any, store: _objects.Store) -> list[object]:
    """Does what run does, in an event loop, for generators of both kinds."""
    report = call.report = Report(call.id, *call.extra["stream"])
    each = values if hasattr(values, "__anext__") else _as_async(values)
    try:
        async for value in each:
            report.add(value, store)
            room = report.room()
            if room is not None:
                await room
            _check_ends(call, report)
    except (asyncio.CancelledError, exceptions.TaskCancelledError):
        raise
    except BaseException:
        await _arrive(report)
        raise
    finally:
        await each.aclose()
    await _arrive(report)
    return [PLAIN, report.count]


async def _arrive(report: Report) -> None:
    arrival = report.arrival()
    if arrival is not None:
        await arrival


async def _as_async(values: Generator[object, None, object]) -> AsyncGenerator[object, None]:
    try:
        for value in values:
            yield value
            await asyncio.sleep(0)  # other calls of the actor take their turn
    finally:
        values.close()
