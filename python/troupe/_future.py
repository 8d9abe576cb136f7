"""Futures of calls under way."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgpack

from . import _call, _check, _codec, _core, _error_transfer, _errors, _introspection, _seam, _split, _traceback, _unread
from ._result_stream import ResultStream, StreamReference
from ._seam import CAUSE, COMBINED, FAILED, KEPT, LAST, NONE, OVER, SHARED

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    R = TypeVarWithDefault("R", default=Any, covariant=True)
else:
    R = TypeVar("R", covariant=True)  # the type of the result

_SILENCE = 1.0  # seconds a call waits behind an interrupted one before it warns
_PROGRESS_EVERY = 5.0  # seconds without an answer after which the progress display says what it waits for
_SHOWN = 8  # number of ranks that a message describes


# The module _reference, which imports this one.
_references: Any = None


def set_references(module: object) -> None:
    global _references
    _references = module


class Pull:
    """The body of a value stored in another process, while the core fetches it."""

    def __init__(self, core: _core.Core, ask: Callable[[int], int]) -> None:
        self._core = core
        self._done = False
        self._waiters: list[Any] = []
        self.flags = 0
        self.body: Any = b""
        self.inside: list[Any] | None = None  # references inside the value
        self.value: Callable[[], Any] | None = None
        self._token = core.send(self, ask)

    def take_references(self, flags: int, rank: int, names: bytes) -> None:
        if self.inside is None and self._core.adopt is not None:
            self.inside = self._core.adopt(names)

    def deliver(self, kind: int, flags: int, rank: int, body: object) -> None:
        self.flags, self.body = flags, body
        self._done = True
        for wake in list(self._waiters):
            wake()

    def when_done(self, do: Callable[[], None]) -> None:
        """Calls do when the body has arrived, on the thread that reads completions."""
        notice = _core.Notice(self._waiters, do)
        self._waiters.append(notice)
        if self._done:
            notice()

    def cancel(self) -> None:
        if not self._done and self._core._pid == os.getpid():
            self._core.cancel(self._token)


class Waitable(_introspection.PublicNames, _codec.Eventual, Generic[R]):
    """An operation that ends at some time. The reader of completions calls deliver and _finish."""

    _unread: _unread.Unread | None = None  # logs the error if the program does not get it

    def _seen(self) -> None:
        """Notes that the program gets the error, or passes it on."""
        if self._unread is not None:
            self._unread.seen()

    def __init__(self, core: _core.Core) -> None:
        self._core = core
        self._done = False
        self._waiters: list[Any] = []

    def done(self) -> bool:
        """Returns whether the operation is over. Does not block."""
        if not self._done:
            self._core.look()
        return self._done

    def _finish(self) -> None:
        self._done = True
        if self._waiters:
            for wake in list(self._waiters):
                wake()

    def _wait(self, timeout: float | None) -> bool:
        if self._done:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        return self._core.wait(self, deadline)

    def add_done_callback(self, do: Callable[[Any], None]) -> None:
        """Calls do(self) when the operation is over, on the thread that reads completions. do must not block."""
        notice = _core.Notice(self._waiters, functools.partial(do, self))
        self._waiters.append(notice)
        self._watch()
        if self._done:
            notice()

    def arrived(self) -> object:
        return resolve(self)

    def _watch(self) -> None:
        """Requests a completion for the end of the operation, for types that do not get one unasked."""

    def _pulls(self) -> Sequence[Pull]:
        """Returns the fetches that must finish, once the operation is over, before _get."""
        return ()

    def _check_failed(self) -> None:
        """Raises the error of an operation that is over, if it failed, without fetching a value."""
        self._get()

    def _when_fetched(self, do: Callable[[Any], None]) -> None:
        """Calls do(x) when the operation is over and x._get() or x.value() returns the value without waiting."""

        def over(_: object) -> None:
            left = [p for p in self._pulls() if not p._done]
            if not left:
                do(self)
                return
            count = itertools.count(1)
            for pull in left:
                pull.when_done(lambda: do(self) if next(count) == len(left) else None)

        self.add_done_callback(over)

    def _fetch(self, deadline: float | None, timeout: float | None) -> None:
        for pull in self._pulls():
            if not pull._done and not self._core.wait(pull, deadline):
                raise _errors.TimedOutError(f"the result is there, and was not fetched within {timeout} s")

    def _get(self) -> R:
        raise NotImplementedError

    def cancel(self) -> bool:
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> R:
        """Waits for the result and returns it, or raises the error of the call. A timeout raises TimedOutError and does
        not cancel the call."""
        _check.seconds("timeout", timeout, zero=True)
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._wait(timeout):
            raise _errors.TimedOutError(f"no result within {_seconds(timeout)} s; the call goes on: cancel() ends it")
        self._fetch(deadline, timeout)
        return self._get()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end and returns the exception, or None if there was none."""
        _check.seconds("timeout", timeout, zero=True)
        try:
            self.result(timeout)
        except _errors.TimedOutError:
            if not self._done:
                raise
            return sys.exc_info()[1]
        except Exception as err:
            return err
        return None

    def __await__(self) -> Generator[object, None, R]:
        return self._await().__await__()

    async def _await(self) -> R:
        import asyncio

        try:
            await _core.wait_in_loop(self._core, self)
            for pull in self._pulls():
                await _core.wait_in_loop(self._core, pull)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._get()


class RankFuture(Waitable[R]):
    """One rank's part of a call."""

    def __init__(self, parent: Future, rank: int) -> None:
        super().__init__(parent._core)
        self.parent = parent
        self.rank = rank

    def cancel(self) -> bool:
        """Cancels the whole call: a call ends as a unit."""
        return self.parent.cancel()

    def cancelled(self) -> bool:
        return self.parent.cancelled()

    def _wait(self, timeout: float | None) -> bool:
        if self.parent._behind and timeout is None and not self._done and self.rank == self.parent._where[0]._own_rank:
            self.parent._refuse_own()
        return super()._wait(timeout)

    @property
    def _kept(self) -> dict[int, Waitable]:
        kept = self.parent._kept
        return {self.rank: kept[self.rank]} if kept and self.rank in kept else {}

    def _pulls(self) -> Sequence[Pull]:
        return self.parent._pulls_of([self.rank])

    def _get(self) -> R:
        value: R = self.parent._answer(self.rank)
        return value

    def reference(self) -> Any:
        return self.parent._reference_of(self.rank)

    def __reduce__(self) -> Any:
        return self.reference().__reduce__()

    def __repr__(self) -> str:
        return f"<RankFuture {self.parent._what} rank {self.rank} {'done' if self._done else 'pending'}>"


class ElementFuture(Waitable[R]):
    """One element of the tuple or list that a call returns."""

    def __init__(self, parent: Future, index: int, count: int) -> None:
        super().__init__(parent._core)
        self.parent = parent  # a future that has cancel and cancelled
        self._index, self._count = index, count
        parent.add_done_callback(lambda _: self._finish())

    def cancel(self) -> bool:
        """Cancels the whole call: one call produces all its elements."""
        return bool(self.parent.cancel())

    def cancelled(self) -> bool:
        return bool(self.parent.cancelled())

    def _wait(self, timeout: float | None) -> bool:
        return bool(self.parent._wait(timeout))

    def _pulls(self) -> Sequence[Pull]:
        pulls: Sequence[Pull] = self.parent._pulls()
        return pulls

    def _check_failed(self) -> None:
        self.parent._check_failed()

    _ref: Any = None

    def reference(self) -> Any:
        """Returns a reference to the element. It waits for the call and stores the element as a value of this
        process."""
        if self._ref is None:
            self._ref = _references.put(self.result())
        return self._ref

    def __reduce__(self) -> Any:
        return self.reference().__reduce__()

    def _get(self) -> R:
        values = self.parent._get()
        if not isinstance(values, (tuple, list)) or len(values) != self._count:
            size = f" of {len(values)}" if isinstance(values, (tuple, list)) else ""
            raise _errors.InvalidError(
                f"num_returns={self._count}, but {self.parent!r} returned a {type(values).__name__}{size}"
            )
        value: R = values[self._index]
        return value

    def __repr__(self) -> str:
        return f"<ElementFuture {self._index} of {self.parent!r}>"


class Future(Waitable[R], Sequence[RankFuture[Any]]):
    """A call under way, and the sequence of its parts by rank.

    Any thread can wait for it with result(), and any event loop with await. It can be cancelled, and passed to another
    call as an argument.
    """

    # Defaults are class attributes, because every call creates a future and most futures keep them.
    _done = False
    _collects = True
    _keep_all = False
    _info: Any = None
    _token = 0
    _error: _errors.Error | None = None
    _whole: Any = None  # all collected answers as one body, if they arrived together
    _ranks: dict[int, RankFuture] | None = None
    _value: Any = None
    _has_value = False
    _engine = ""  # name of the called object in the workers
    _copy = False  # whether arrays of the result are copied out of shared memory
    _share = False  # whether device tensors are used in place
    _described = False  # whether the timeout error already names the ranks that did not answer
    _told = False  # for a call of initialize: whether the workers have been asked for their mesh since
    _behind_loop: Any = None  # the worker's event loop that must serve this call, if the call was made on that loop
    _pins: Any = None  # references inside the arguments, kept alive until the call is over
    _inside: Any = None  # by rank, the references inside an answer not yet decoded
    _kept: Any = None  # by rank, the reference to a large answer, which stays in its worker
    _fetched: Any = None  # by rank, the fetch of such an answer
    _refs: Any = None  # by rank, a reference to the answer, if one was requested
    _failure: Any = None  # the error, encoded
    _behind = 0  # number of the call whose method made this one on the same worker; this call waits behind it

    def __init__(self, core: _core.Core, where: tuple[Any, str], plan: _split.Plan, codec: Any, one: bool) -> None:
        self._core = core
        self._waiters = []
        self._where = where  # the cluster and the method's name
        self._plan = plan
        self._codec = codec
        self._one = one  # whether the result is the single answer, regardless of the mode
        self._answers: dict[int, tuple[int, Any]] = {}
        self._decoded: dict[int, Any] = {}

    @property
    def _what(self) -> str:
        return f"{self._where[0].name}.{self._where[1]}"

    # Called by the reader of completions.

    def take_references(self, flags: int, rank: int, names: bytes) -> None:
        if self._core.adopt is None:
            return
        if self._inside is None:
            self._inside, self._kept = {}, {}
        into = self._kept if flags & KEPT else self._inside
        if rank not in into:  # otherwise the completion is delivered again after an interrupt
            found = self._core.adopt(names)
            if found:
                into[rank] = found[0] if flags & KEPT else found

    def deliver(self, kind: int, flags: int, rank: int, body: object) -> None:
        if kind == OVER:
            if flags & FAILED:
                self._failure = body
                self._fail(body)
            elif flags & COMBINED:
                self._whole = body
        else:
            self._answers[rank] = (flags, body)
            if flags & CAUSE:
                self._fail(body)
            if self._ranks is not None and rank in self._ranks:
                self._ranks[rank]._finish()
        if flags & LAST:
            self._finish()

    def _finish(self) -> None:
        if self._ranks is not None:
            for child in self._ranks.values():
                if not child._done:
                    child._finish()
        self._done = True
        self._pins = None
        if self._waiters:
            for wake in list(self._waiters):
                wake()

    def _fail(self, body: object) -> None:
        self._error = self._raise_from(body)
        if self._refs is None:  # otherwise those that have the references get the error
            self._unread = _unread.of(self._error)

    def _raise_from(self, body: object) -> _errors.Error:
        return _error_transfer.rebuild(_errors.from_body(body), self._codec)

    # Called by users of the future.

    def _refuse_own(self) -> None:
        """Raises RefusedError if the waiting thread is the one that must serve the awaited call."""
        serving = _call.current.get()
        if serving is None or serving[1] != self._behind:
            return
        busy, method = _call.IncomingCall(*serving).method, self._where[1]
        raise _errors.RefusedError(
            f"{self._what} on the worker's own rank would wait for itself: its turn comes when {busy!r}, which made "
            "the call, has returned; "
            f"call self.{method}(…) directly, do not wait for the future, or mark {method} with "
            '@register(lane="control") or '
            "@register(concurrency=n)",
            role=self._where[0].name,
            rank=self._where[0]._own_rank,
            method=method,
        )

    def _refuse_own_loop(self) -> None:
        """Raises RefusedError for a blocking wait in the worker's event loop that must serve the awaited call: it would
        never end."""
        if _core.running_loop() is self._behind_loop:
            method = self._where[1]
            raise _errors.RefusedError(
                f"{self._what} on the worker's own rank would wait for itself: it runs on the event loop that this "
                "wait blocks; "
                f"`await handle.{method}.remote(…)`, or call self.{method}(…) directly",
                role=self._where[0].name,
                rank=self._where[0]._own_rank,
                method=method,
            )

    def _wait(self, timeout: float | None) -> bool:
        if timeout is None and not self._done:
            if self._behind:
                self._refuse_own()
            if self._behind_loop is not None:
                self._refuse_own_loop()
        try:
            if not self._done and not self._where[0]._interrupted.isdisjoint(self._plan.called()):
                return self._wait_behind_interrupted(timeout)
            return super()._wait(timeout)
        except KeyboardInterrupt as err:
            self._where[0]._interrupted.update(self._plan.called())
            self._explain_interrupt(err, "the call goes on")
            raise

    def _explain_interrupt(self, err: BaseException, state: str) -> None:
        """Makes an interrupt of a wait for this call say how to end the method in the workers too."""
        if not isinstance(err, KeyboardInterrupt) or err.args or self._done:
            return
        cluster, ranks = self._where[0], self._missing()
        named = ", ".join(map(str, ranks)) if len(ranks) < min(cluster.world_size, _SHOWN) else ""
        err.args = (
            f"while waiting for {self._what}; {state}: {'handle.' * self._one}cluster.interrupt({named}) "
            "raises KeyboardInterrupt in the workers too",
        )

    def _wait_behind_interrupted(self, timeout: float | None) -> bool:
        """Waits; after a second, warns which cancelled or abandoned calls the workers are still running."""
        cluster = self._where[0]
        if timeout is not None and timeout <= _SILENCE:
            return super()._wait(timeout)
        if super()._wait(_SILENCE):
            cluster._interrupted.difference_update(self._plan.called())
            return True
        busy = {r: text for r, text in cluster._activity(self._missing()).items() if not text.startswith("idle")}
        cluster._interrupted.difference_update(self._plan.called())
        if busy and not self._done:
            shown = "; ".join(f"rank {r} {text}" for r, text in list(busy.items())[:_SHOWN])
            warnings.warn(
                f"{self._what} waits for a worker of {cluster.name} that is busy with an earlier call: {shown}. A "
                "method ends early only if it checks "
                "troupe.current_call().cancelled; cluster.interrupt() raises KeyboardInterrupt in it, "
                "cluster.shutdown() "
                "ends the worker",
                RuntimeWarning,
                stacklevel=_traceback.user_stacklevel(),
            )
        return super()._wait(None if timeout is None else timeout - _SILENCE)

    def _missing(self) -> list[int]:
        """Returns the ranks that have not answered with a value."""
        return [r for r in self._plan.called() if self._failed(r)]

    def _waits_for(self) -> str:
        """Describes, for a message, what the ranks that have not answered are doing. Returns "" if all have
        answered."""
        missing = self._missing()
        if not missing or self._whole is not None:
            return ""
        try:
            doing = self._where[0]._activity(missing[:_SHOWN])
        except _errors.Error:  # the cluster is closed
            doing = {}
        shown = "; ".join(f"rank {r} {doing.get(r, 'is not known')}" for r in missing[:_SHOWN])
        more = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        return f"; {len(missing)} of {len(self._plan.called())} ranks have not answered: {shown}{more}"

    def _describe_timeout(self, error: _errors.Error) -> None:
        """Adds to the message of a timeout error, once, which ranks did not answer and what they are doing."""
        if not self._described:
            self._described = True
            error.message += self._waits_for()

    def _ended_values(self) -> list[object]:
        """Waits for the end of the call and returns the answers by rank, with None for ranks that gave none."""
        self._core.wait(self, None)
        self._seen()
        return [None if self._failed(r) else self._answer(r) for r in self._plan.collect]

    def _answer(self, rank: int) -> Any:
        if rank in self._decoded:
            return self._decoded[rank]
        self._seen()
        if rank not in self._answers:
            raise (
                self._error._again()
                if self._error
                else _errors.CancelledError(f"{self._what}: the call ended without rank {rank}", rank=rank)
            )
        flags, body = self._answers[rank]
        if flags & FAILED:
            raise self._raise_from(body)
        if flags & KEPT:
            (pull,) = self._pulls_of([rank])
            self._core.wait(pull, None)
            if pull.flags & FAILED:
                raise self._raise_from(pull.body)
            flags, body, pull.body = pull.flags, pull.body, b""
        copy = self._core.copy if self._copy and flags & SHARED else None
        value = None if flags & NONE else self._codec.decode(body, copy, self._share)
        if self._inside:
            self._inside.pop(rank, None)
        if type(value) is StreamReference:
            value = self._stream(rank, value)
        self._decoded[rank] = value
        return value

    # Large answers stay in their workers until a process asks for them.

    def _pulls(self) -> Sequence[Pull]:
        return self._pulls_of(self._plan.collect) if self._kept else ()

    def _pulls_of(self, ranks: Sequence[int]) -> Sequence[Pull]:
        if not self._kept:
            return ()
        if self._fetched is None:
            self._fetched = {}
        for rank in ranks:
            if rank in self._kept and rank not in self._decoded and rank not in self._fetched:
                self._fetched[rank] = self._kept[rank]._start()
        return [self._fetched[r] for r in ranks if r in self._fetched and r not in self._decoded]

    def _check_failed(self) -> None:
        if self._error is not None and not self._keep_all:
            self._get()

    def reference(self) -> Any:
        """Returns a reference to the result. The result of several ranks is merged in this process and stored here as a
        value, after a wait for the call."""
        one = self._one or self._plan.result == "single"
        if self._collects and not self._keep_all and one and len(self._plan.collect) == 1:
            return self._reference_of(self._plan.collect[0])
        if self._refs is None:
            self._refs = {}
        if -1 not in self._refs:
            self._refs[-1] = _references.put(self.result())
        return self._refs[-1]

    def _reference_of(self, rank: int) -> Any:
        """Returns a reference to the answer of one rank, even before the answer has arrived."""
        if self._kept and rank in self._kept:
            return self._kept[rank]
        if self._refs is None:
            self._refs = {}
        if rank not in self._refs:
            self._refs[rank] = self._make_reference(rank)
        return self._refs[rank]

    def _make_reference(self, rank: int) -> Any:
        session = self._where[0]._session
        self._seen()
        if not self._done and rank not in self._answers:
            self._core.check()
            number = self._core.lib.troupe_promise(self._token, rank)
            if number < 0:
                raise self._core.fail(number)
            if number:
                return _references.Reference(session, session.session, number)
            self._core.wait(self._children()[rank], None)  # the answer is in the completion queue
        if self._kept and rank in self._kept:
            return self._kept[rank]
        if rank in self._decoded:
            return _references.put(self._decoded[rank])
        if rank in self._answers:
            flags, body = self._answers[rank]
            if flags & FAILED:
                return _references.put_error(session, body)
            inside = (self._inside or {}).get(rank)
            return _references.put_body(session, b"\xc0" if flags & NONE else body, inside)
        if self._has_value:
            return _references.put(self._value)
        if self._failure is not None:
            return _references.put_error(session, self._failure)
        return _references.put_error(
            session,
            _error_transfer.encode(
                self._error or _errors.CancelledError(f"{self._what}: the call ended without rank {rank}")
            ),
        )

    def __reduce__(self) -> Any:
        return self.reference().__reduce__()

    def _stream(self, rank: int, reference: StreamReference) -> ResultStream:
        return ResultStream(self._where[0].workers[rank], reference, self._engine)

    def _get(self) -> R:
        if self._has_value:
            result: R = self._value
            return result
        self._seen()
        if self._error is not None and not self._keep_all:
            if self._error.code == "timed_out" and _core.running_loop() is None:
                self._describe_timeout(self._error)
            raise self._error._again()
        if self._whole is not None:
            values = self._codec.decode(self._whole)
            if any(type(v) is StreamReference for v in values):
                values = [
                    self._stream(r, v) if type(v) is StreamReference else v
                    for r, v in zip(self._plan.collect, values, strict=False)
                ]
            self._whole = None
            if self._collects and self._plan.result == "list":
                self._value, self._has_value = values, True
                result = values
                return result
            self._decoded = dict(zip(self._plan.collect, values, strict=False))
        if self._one and self._collects:
            self._value = self._answer(self._plan.collect[0])
        else:
            self._value = self._merge()
        self._has_value = True
        self._answers = {
            r: a for r, a in self._answers.items() if a[0] & FAILED
        }  # the decoded values hold the other bodies
        result = self._value
        return result

    def _merge(self) -> Any:
        if not self._collects:
            return None
        if self._keep_all:
            return [self._outcome(r) for r in self._plan.collect]
        ranks = [r for r in self._plan.collect if not self._failed(r)]
        values = [self._answer(r) for r in ranks]
        if self._plan.result == "single":
            return values[0]
        if self._plan.result == "list":
            return values
        return _split.merge(self._plan, ranks, values, self._info, self._where[0]._dp)

    def _failed(self, rank: int) -> bool:
        return rank not in self._decoded and (rank not in self._answers or bool(self._answers[rank][0] & FAILED))

    def _outcome(self, rank: int) -> Any:
        try:
            return self._answer(rank)
        except _errors.Error as err:
            return err

    def result(self, timeout: float | None = None, *, progress: bool = False) -> R:
        """Waits for the result and returns it, or raises the error of the call.

        timeout is in seconds; when it passes, TimedOutError names the ranks that have not answered, and the call goes
        on. With progress, shows how many ranks have answered while it waits.
        """
        _check.seconds("timeout", timeout, zero=True)
        deadline = None if timeout is None else time.monotonic() + timeout
        if progress:
            _show_progress([self], timeout)
        if not self._done and not self._wait(timeout):
            raise _errors.TimedOutError(
                f"no result within {_seconds(timeout)} s; the call goes on, cancel() ends it{self._waits_for()}"
            )
        try:
            if self._kept:
                self._fetch(deadline, timeout)
            value = self._get()
        except _errors.Error as err:
            raise _traceback.cut(err) from err.__cause__
        if self._where[1] == "initialize" and self._news():
            self._where[0].update_mesh()
        return value

    async def _await(self) -> R:
        value = await super()._await()
        if self._where[1] == "initialize" and self._news():
            await self._where[0].aupdate_mesh()
        return value

    def _news(self) -> bool:
        """Returns whether this call may have changed the workers' mesh and the workers have not been asked for it
        yet."""
        if self._told or not self._where[0]._learns_mesh():
            return False
        self._told = True
        return True

    def cancel(self) -> bool:
        """Cancels the call and tells its workers. Returns False if the call was over."""
        if self._done or not self._token:
            return False
        self._where[0]._interrupted.update(self._plan.called())
        self._core.cancel(self._token)
        return True

    def cancelled(self) -> bool:
        return isinstance(self._error, _errors.CancelledError)

    def progress(self) -> dict[int, bool]:
        """Returns, by rank, whether the rank has answered."""
        self.done()
        return {r: self._done or r in self._answers for r in self._plan.called()}

    def _elements(self, count: int) -> list[ElementFuture]:
        """Returns a future for each of the result's `count` elements."""
        return [ElementFuture(self, i, count) for i in range(count)]

    def _children(self) -> dict[int, RankFuture]:
        if self._ranks is None:
            children = {r: RankFuture(self, r) for r in (self._plan.collect or self._plan.called())}
            self._ranks = children
            for rank, child in children.items():
                if self._done or rank in self._answers:
                    child._done = True
        return self._ranks

    def __aiter__(self) -> AsyncIterator[Any]:
        """Iterates over the values of a generator method: `async for value in handle.method.remote(…)`."""
        return self._aiter()

    async def _aiter(self) -> AsyncIterator[Any]:
        stream = await self
        if not isinstance(stream, ResultStream):
            raise _errors.InvalidError(
                f"`async for` takes the call of a generator method on one worker, and {self._what} gave a "
                f"{type(stream).__name__}"
            )
        with stream:
            async for value in stream:
                yield value

    def __len__(self) -> int:
        return len(self._plan.collect or self._plan.called())

    @overload
    def __getitem__(self, i: int) -> RankFuture: ...
    @overload
    def __getitem__(self, i: slice) -> list[RankFuture]: ...
    def __getitem__(self, i: int | slice) -> RankFuture | list[RankFuture]:
        return list(self._children().values())[i]

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the futures of the ranks. For a generator method on one worker: waits for the call, and
        iterates over its values."""
        return self._iter() if self._one else iter(self._children().values())

    def _iter(self) -> Iterator[Any]:
        stream = self.result()
        if not isinstance(stream, ResultStream):
            yield from self._children().values()
            return
        with stream:
            yield from stream

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        state = "done" if self._done else f"{len(self._answers)} of {len(self._plan.called())} answered"
        return f"<Future {self._what} {state}>"


class Asked(Waitable[R]):
    """A request to the core as a future: an order to a pipeline, or a request through a router."""

    _reported = False  # whether an error that the program does not get is logged

    def __init__(
        self,
        core: _core.Core,
        request: _seam.Request,
        *,
        read: Callable[[Any], R] | None = None,
        codec: _codec.Codec | None = None,
    ) -> None:
        super().__init__(core)
        self._op = request.op
        self._read = read  # converts the answer to the caller's value
        self._codec = codec or _codec.Codec()
        self._value: Any = None
        self._error: _errors.Error | None = None
        self._token = core.request(self, request)

    def deliver(self, kind: int, flags: int, rank: int, body: object) -> None:
        self._store(flags, body)
        self._finish()

    def _store(self, flags: int, body: object) -> None:
        if flags & FAILED:
            self._error = _error_transfer.rebuild(_errors.from_body(body), self._codec)
            if self._reported:
                self._report()
        else:
            self._value = msgpack.unpackb(body, strict_map_key=False, ext_hook=msgpack.ExtType)

    def _report(self) -> Asked[R]:
        """Makes this the program's own future: an error that the program does not get is logged."""
        self._reported = True
        if self._unread is None:
            self._unread = _unread.of(self._error)
        return self

    def _get(self) -> R:
        self._seen()
        if self._error is not None:
            raise self._error._again()
        if self._read is not None:
            self._value, self._read = self._read(self._value), None
        value: R = self._value
        return value

    def now(self) -> R:
        """Waits for the answer. If the wait is interrupted, cancels the request."""
        try:
            return self.result()
        except BaseException:
            if not self._done and self._core._pid == os.getpid():
                self.cancel()
            raise

    def cancel(self) -> bool:
        """Cancels the request. Returns False if it was over."""
        if self._done:
            return False
        self._core.cancel(self._token)
        return True

    def cancelled(self) -> bool:
        return isinstance(self._error, _errors.CancelledError)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._op} {'done' if self._done else 'pending'}>"


class Gathered(Waitable):
    """A wait for `need` of several futures. close() removes it from them."""

    def __init__(self, futures: Sequence[Waitable], need: int) -> None:
        super().__init__(futures[0]._core)
        self._futures = futures
        self._need = need
        for f in futures:
            f._watch()
            f._waiters.append(self._woken)
        self._woken()

    def _wait(self, timeout: float | None) -> bool:
        try:
            return super()._wait(timeout)
        except KeyboardInterrupt as err:
            for call in _calls_of([f for f in self._futures if not f._done])[:1]:
                call._explain_interrupt(err, "the call goes on")
            raise

    def _woken(self) -> None:
        if not self._done and sum(f._done for f in self._futures) >= self._need:
            self._finish()

    def close(self) -> None:
        for f in self._futures:
            if self._woken in f._waiters:
                f._waiters.remove(self._woken)


def _seconds(timeout: float | None) -> float | None:
    """Rounds a timeout for messages: the digits of a remaining time mean nothing."""
    return timeout if timeout is None else round(timeout, 3)


def _parts_of(futures: Iterable[object]) -> list[Any]:
    """Returns the futures of a list, or the parts of a future."""
    return list(futures._children().values() if isinstance(futures, Future) else futures)


def _flatten(x: object) -> list[Waitable]:
    if isinstance(x, Waitable):
        return [x]
    if isinstance(x, (list, tuple)):
        return [f for item in x for f in _flatten(item)]
    raise _errors.InvalidError(f"get takes a future or a nested list of them, not a {type(x).__name__}")


@overload
def get(x: Waitable[R], timeout: float | None = None, *, progress: bool = False) -> R: ...
@overload
def get(x: Sequence[Waitable[R]], timeout: float | None = None, *, progress: bool = False) -> list[R]: ...
@overload
def get(x: object, timeout: float | None = None, *, progress: bool = False) -> Any: ...
def get(x: object, timeout: float | None = None, *, progress: bool = False) -> object:
    """Waits for a future, or for each future of a nested list, and returns the results in the same structure.

    The first failure is raised immediately. timeout is in seconds for all of them together; when it passes,
    TimedOutError is raised and the calls go on. With progress, shows how many parts have completed.
    """
    futures = _flatten(x)
    _check.seconds("timeout", timeout, zero=True)
    if not futures:
        return [] if isinstance(x, list) else x
    deadline = None if timeout is None else time.monotonic() + timeout
    for f in futures if timeout is None else ():
        if isinstance(f, Future) and f._behind and not f._done:
            f._refuse_own()
    if progress:
        _show_progress(futures, timeout)
    elif len(futures) > 1:
        _fail_fast(futures, deadline, timeout)
    return _results(x, deadline)


def _fail_fast(futures: list[Waitable], deadline: float | None, timeout: float | None) -> None:
    left = futures
    while left:
        group = Gathered(left, 1)
        try:
            if not group._wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise _errors.TimedOutError(
                    f"{len(left)} of {len(futures)} futures were not over within {timeout} s{_what_is_missing(left)}"
                )
        finally:
            group.close()
        for f in [f for f in left if f._done]:
            f._check_failed()
        left = [f for f in left if not f._done]


def _what_is_missing(left: Sequence[object]) -> str:
    """Describes what the first two unfinished calls wait for; a message has no room for more."""
    return "".join(f"; {c._what}{c._waits_for()}" for c in _calls_of(left)[:2])


def _calls_of(futures: Sequence[object]) -> list[Future]:
    """Returns the calls that futures, or parts of futures, belong to, each once."""
    calls = (f if isinstance(f, Future) else getattr(f, "parent", None) for f in futures)
    return list({id(c): c for c in calls if isinstance(c, Future)}.values())


def _results(x: Any, deadline: float | None) -> Any:
    if isinstance(x, Waitable):
        return x.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
    return [_results(item, deadline) for item in x]


def wait(futures: Iterable[object], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
    """Waits until num_returns futures are over or the timeout passes. Returns the futures that are over, at most
    num_returns, and all the others."""
    futures = _parts_of(futures)
    for f in futures:
        if not isinstance(f, Waitable):
            raise _errors.InvalidError(f"wait takes futures, not a {type(f).__name__}")
    _check.seconds("timeout", timeout, zero=True)
    if not 0 < _check.integer("num_returns", num_returns) <= len(futures):
        raise _errors.InvalidError(f"num_returns {num_returns} of {len(futures)} futures")
    group = Gathered(futures, num_returns)
    try:
        group._wait(timeout)
    finally:
        group.close()
    ready = [f for f in futures if f._done][:num_returns]
    return ready, [f for f in futures if f not in ready]


def as_completed(futures: Iterable[object], timeout: float | None = None) -> Iterator[Any]:
    """Yields the futures in the order in which they end. A future of several ranks can be passed itself: it is the
    sequence of its parts."""
    left = _parts_of(futures)
    _check.seconds("timeout", timeout, zero=True)
    deadline = None if timeout is None else time.monotonic() + timeout
    while left:
        group = Gathered(left, 1)
        try:
            if not group._wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise _errors.TimedOutError(
                    f"{len(left)} futures were not over within {timeout} s{_what_is_missing(left)}"
                )
        finally:
            group.close()
        for f in [f for f in left if f._done]:
            left.remove(f)
            yield f


def _show_progress(futures: Sequence[object], timeout: float | None) -> None:
    """Waits, and shows how many parts have completed: with tqdm if it is installed, otherwise as an occasional line on
    stderr."""
    parts = [c for f in futures for c in (_parts_of(f) if isinstance(f, Future) else [f])]
    try:
        from tqdm import tqdm  # type: ignore[import-not-found,import-untyped,unused-ignore]

        bar = tqdm(total=len(parts))
    except ImportError:
        bar = _Line(len(parts))
    deadline = None if timeout is None else time.monotonic() + timeout
    left: list[Any] = parts
    try:
        while left:
            now = time.monotonic()
            group = Gathered(left, 1)
            try:
                ended = group._wait(
                    _PROGRESS_EVERY if deadline is None else max(0.0, min(_PROGRESS_EVERY, deadline - now))
                )
            finally:
                group.close()
            if not ended and deadline is not None and time.monotonic() >= deadline:
                raise _errors.TimedOutError(
                    f"{len(left)} of {len(parts)} parts were not over within {timeout} s{_what_is_missing(left)}"
                )
            if not ended:
                bar.set_postfix_str(_what_is_missing(left).removeprefix("; "))
            for _ in range(sum(f._done for f in left)):
                bar.update(1)
            left = [f for f in left if not f._done]
    finally:
        bar.close()


class _Line:
    def __init__(self, total: int) -> None:
        self._total = total
        self._n = 0
        self._began = self._said = time.monotonic()

    def update(self, n: int) -> None:
        self._n += n
        now = time.monotonic()
        if now - self._said > 1 or (self._n == self._total and now - self._began > 1):
            self._said = now
            os.write(2, f"troupe: {self._n} of {self._total} after {now - self._began:.0f} s\n".encode())

    def set_postfix_str(self, text: str) -> None:
        self._said = time.monotonic()
        os.write(2, f"troupe: {self._n} of {self._total} after {self._said - self._began:.0f} s; {text}\n".encode())

    def close(self) -> None:
        pass


def resolve(value: object) -> Any:
    """Replaces a future, or a list with futures in it, by its value. It is for calls whose arguments this process
    splits."""
    if isinstance(value, Waitable):
        return value.result()
    if type(value) is list and any(isinstance(v, Waitable) for v in value):
        return [resolve(v) for v in value]
    return value
