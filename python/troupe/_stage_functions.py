"""Runs the functions of one pipeline in this process: the core delivers the work, and threads or an event loop run
it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

from . import _call, _codec, _core, _errors, _item, _seam, _serve, _stage
from ._future import Waitable
from ._seam import StageHead


class Function:
    """A function, and how it is called."""

    __slots__ = ("is_async", "manner", "work")

    def __init__(self, work: Callable[..., Any], fields: Mapping[str, object]) -> None:
        self.work = work
        self.manner = _stage.manner(fields)
        self.is_async = _stage.is_async(work)


class Work:
    """One item, or one group of items, for a function to process."""

    __slots__ = ("body", "function", "grouped", "meta", "number")

    def __init__(self, number: int, flags: int, meta: bytes, function: Function, body: _core.Buffer) -> None:
        self.number, self.grouped, self.meta, self.function, self.body = (
            number,
            bool(flags & _seam.STAGE_GROUPED),
            meta,
            function,
            body,
        )

    def argument(self, codec: _codec.Codec) -> object:
        items = codec.decode(self.body)
        return _stage.argument(self.function.manner, _item.given(items if self.grouped else items[0]))

    def answer(self, codec: _codec.Codec, value: object) -> bytes | _codec.Walk:
        return codec.encode(_item.outputs(_stage.result(self.function.manner, value)))


class FunctionRunner(_serve.Server):
    """Threads for functions, as many as the pipeline has work for at once; the pipeline keeps to the `workers` of its
    stages. The side queue's thread reads the work, so that it starts even while no other thread reads completions."""

    def __init__(self, core: _core.Core, codec: _codec.Codec, functions: dict[str, Function]) -> None:
        self.core, self.lib = core, core.lib
        self._codec = codec
        self._functions = functions
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards _threads and _idle
        self._threads = self._idle = 0
        self._loop: _serve.OwnLoop | None = None  # runs async functions
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by number; used only on the loop
        self.token = core.send(self, lambda token: 0)
        core.share_side()

    def _thread(self, do: Callable[..., object], *args: object) -> None:
        threading.Thread(target=do, args=args, daemon=True, name="troupe-stage").start()

    # Called by the reader.

    def deliver(self, kind: int, flags: int, rank: int, body: _core.Buffer) -> None:
        if kind == _seam.OVER:
            self._over()
            return
        number, n, flags = StageHead.layout.unpack_from(body)
        if flags & _seam.STAGE_CANCELLED:
            if self._loop is not None:
                self._loop.soon(self._cancel_work, number)
            return
        meta = bytes(body[StageHead.size : StageHead.size + n])
        start = (StageHead.size + n + _seam.ALIGN - 1) & -_seam.ALIGN
        function = self._functions[_call.IncomingCall(self.core, number, meta).method]
        work = Work(number, flags, meta, function, memoryview(body)[start:])
        if function.is_async:
            self._in_loop(work)
        else:
            self._on_thread(work)

    def _on_thread(self, work: Work) -> None:
        self._queue.put(work)
        with self._lock:
            if self._idle:
                self._idle -= 1
                return
            self._threads += 1
        self._thread(self._run)

    def _in_loop(self, work: Work) -> None:
        if self._loop is None:
            self._loop = _serve.OwnLoop()
        self._loop.soon(self._begin_work, work)

    def _over(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, 0
        for _ in range(threads):
            self._queue.put(None)
        if self._loop is not None:
            self._loop.end()

    # The threads.

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            answer = self._do(work)
            with self._lock:
                self._idle += 1  # before the answer, which may bring the next item
            answer()
            del work, answer

    def _do(self, work: Work) -> Callable[[], None]:
        mark = _call.current.set((self.core, work.number, work.meta))
        try:
            value = work.function.work(work.argument(self._codec))
            answer = work.answer(self._codec, value.result() if isinstance(value, Waitable) else value)
        except BaseException as err:  # sys.exit too: it ends the item, not the driver
            return partial(self.fail, work.number, err)
        finally:
            _call.current.reset(mark)
        return partial(self.answer, work.number, answer)

    # The loop.

    def _begin_work(self, work: Work) -> None:
        task = self._tasks[work.number] = asyncio.get_running_loop().create_task(self._do_async(work))
        task.add_done_callback(lambda task: self._work_ended(work, task))

    def _work_ended(self, work: Work, task: asyncio.Task[None]) -> None:
        self._tasks.pop(work.number, None)
        if task.cancelled():  # the function let the cancellation through
            self.fail(work.number, _errors.CancelledError("the item was aborted, or its time was up"))

    def _cancel_work(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.get_loop().call_soon(
                task.cancel
            )  # after its first step: a task that has not started could not return a partial result

    async def _do_async(self, work: Work) -> None:
        _call.current.set((self.core, work.number, work.meta))
        try:
            answer = work.answer(self._codec, await work.function.work(work.argument(self._codec)))
        except (Exception, SystemExit) as err:  # sys.exit ends the item, not the loop
            self.fail(work.number, err)
            return
        self.answer(work.number, answer)
