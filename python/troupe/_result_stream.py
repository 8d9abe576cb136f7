"""Streams: the values of a generator method, pulled by the caller.

The worker keeps the generator; each pull is a call that advances it by one value. A few pulls are under way at a time,
so the worker is at most that many values ahead of the consumer, which provides backpressure. Closing the stream cancels
its pulls and closes the generator.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from . import _codec, _core, _errors

AHEAD = 4  # number of pulls under way
MOST_STREAMS = 1024  # open streams of one worker; above it, the one idle longest is closed
NEXT, CLOSE = "stream-next", "stream-close"  # names that no Python method can have


class StreamReference(_codec.Walked):
    """The answer of a generator method: the number of the stream in the worker, and the method that advances it."""

    __slots__ = ("method", "number")

    def __init__(self, number: int, method: str) -> None:
        self.number, self.method = number, method

    def wire(self) -> tuple[int, object]:
        return _codec.STREAM, [self.number, self.method]


_codec.set_decoder(_codec.STREAM, lambda codec, value: StreamReference(*value))


class OpenStreams:
    """The generators of one served object that callers pull from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._numbers = itertools.count(
            int.from_bytes(os.urandom(6), "big")
        )  # a restarted worker must not have the streams of the one before
        # by number: the generator and the lock of its pulls; idle longest first
        self._open: OrderedDict[int, tuple[Any, Any]] = OrderedDict()

    def add(self, generator: object, lock: object, method: str) -> StreamReference:
        with self._lock:
            number = next(self._numbers)
            self._open[number] = (generator, lock)
            oldest = self._open.popitem(last=False)[1][0] if len(self._open) > MOST_STREAMS else None
        if oldest is not None and hasattr(oldest, "close"):
            _close_quietly(oldest)
        return StreamReference(number, method)

    def find(self, number: int) -> tuple[Any, Any]:
        with self._lock:
            found = self._open.get(number)
            if found is None:
                raise _errors.ClosedError(
                    f"stream {number} is closed: at its end, by its consumer, or because {MOST_STREAMS} others were "
                    "used since"
                )
            self._open.move_to_end(number)
            return found

    def remove(self, number: int) -> object:
        with self._lock:
            found = self._open.pop(number, None)
        return None if found is None else found[0]

    # The methods of a sync object.

    def next(self, number: int) -> list[object]:
        """Returns [True, value], or [False, None] at the end."""
        generator, lock = self.find(number)
        with lock:
            try:
                return [True, next(generator)]
            except StopIteration:
                self.remove(number)
                return [False, None]
            except BaseException:
                self.remove(number)
                raise

    def close(self, number: int) -> None:
        generator = self.remove(number)
        if generator is not None:
            _close_quietly(generator)

    # The methods of an async object, whose generators may be of both kinds.

    async def anext(self, number: int) -> list[object]:
        generator, lock = self.find(number)
        async with lock:
            try:
                return [True, await generator.__anext__() if hasattr(generator, "__anext__") else next(generator)]
            except (StopIteration, StopAsyncIteration):
                self.remove(number)
                return [False, None]
            except BaseException:
                self.remove(number)
                raise

    async def aclose(self, number: int) -> None:
        generator = self.remove(number)
        if hasattr(generator, "aclose"):
            await generator.aclose()
        elif generator is not None:
            _close_quietly(generator)


def blocking(values: Any) -> Iterator[Any]:
    """Iterates over the values of an async generator, on an event loop of its own."""
    import asyncio

    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                value = loop.run_until_complete(values.__anext__())
            except StopAsyncIteration:
                return
            yield value
    finally:
        loop.run_until_complete(values.aclose())
        loop.close()


def _close_quietly(generator: Any) -> None:
    try:
        generator.close()
    except ValueError:
        pass  # the generator is running, and is freed after its next value, because nothing refers to it


class ResultStream(Iterator[Any], AsyncIterator[Any]):
    """Iterates over the values of a generator method as they arrive: `for value in handle.method(…)`, or `async for`.
    It closes at its end, by close(), at the end of a `with` block, and when nothing refers to it."""

    def __init__(self, handle: Any, reference: StreamReference, engine: str = "") -> None:
        self._handle = handle  # the worker
        self._number = reference.number
        options = {"engine": engine} if engine else {}
        self._next, self._close = handle[reference.method].options(**options), handle[CLOSE].options(**options)
        # on a lane with several threads, pulls could overtake each other
        self._ahead = AHEAD if reference.method == NEXT else 1
        self._pulls: deque[Any] = deque()  # futures, oldest first
        self._over = False

    def _pull(self) -> Any:
        while len(self._pulls) < self._ahead:
            self._pulls.append(self._next.remote(self._number))
        return self._pulls[0]

    def _take(self, answer: Sequence[object]) -> Any:
        self._pulls.popleft()
        more, value = answer
        if not more:
            self._end()
        return more, value

    def __iter__(self) -> ResultStream:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """Returns the next value. Raises StopIteration at the end, and TimedOutError after timeout seconds; it can then
        be called again."""
        if self._over:
            raise StopIteration
        pull = self._pull()
        try:
            answer = pull.result(timeout)
        except BaseException as err:
            if pull._done or not isinstance(err, _errors.TimedOutError):
                self.close()
            raise
        more, value = self._take(answer)
        if not more:
            raise StopIteration
        return value

    def __aiter__(self) -> ResultStream:
        return self

    async def __anext__(self) -> Any:
        if self._over:
            raise StopAsyncIteration
        try:
            answer = await self._pull()
        except BaseException:
            self.close()
            raise
        more, value = self._take(answer)
        if not more:
            raise StopAsyncIteration
        return value

    def _end(self) -> None:
        self._over = True
        pulls, self._pulls = self._pulls, deque()
        for pull in pulls:
            pull.cancel()
        self._handle.cluster._interrupted.discard(self._handle.rank)

    def close(self) -> None:
        """Closes the stream: cancels the pulls under way and makes the worker close the generator. Repeated calls have
        no effect."""
        if self._over:
            return
        self._end()
        try:
            self._close.remote(self._number)
        except _errors.Error:
            pass  # the cluster is closed, and the generator with it

    def __enter__(self) -> ResultStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        core = _core.loaded()
        if not self._over and core is not None and self._handle.cluster._session.closed is False:
            try:
                self.close()
            except Exception:
                pass

    def __repr__(self) -> str:
        return f"<ResultStream {self._number} of {self._handle!r}{' closed' if self._over else ''}>"
