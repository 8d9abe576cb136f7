"""Serves calls to objects of this process: the worker host serves its worker, and a driver the objects passed to
troupe.serve."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any

from . import _call, _codec, _core, _empty, _error_transfer, _errors, _item, _register, _result_stream, _trace
from ._call import IncomingCall
from ._future import Pull, Waitable
from ._reference import Reference, names_of, read_names
from ._seam import ANSWER_FAILED, LARGE, META_ITEMS, META_ON_DEVICE, CallMeta

if TYPE_CHECKING:
    import asyncio

_TRACE, _FLAGS = CallMeta.trace, CallMeta.flags
_NONE: dict[str, Any] = {}
_PLAIN = {type(None), bool, int, float, str, bytes, list, dict, tuple}  # types of results that are encoded directly
_KNOWN = 256


class Object:
    """One served object: the worker's own, or a named engine."""

    __slots__ = ("generators", "is_async", "lanes", "shares", "streams", "value")

    def __init__(
        self,
        value: object,
        is_async: bool,
        lanes: dict[str, str],
        generators: dict[str, str],
        shares: frozenset[str] = frozenset(),
    ) -> None:
        self.value = value
        self.is_async = is_async
        self.lanes = lanes  # by method that does not run on the main thread, its lane
        self.shares = shares  # methods that lend the tensors they return instead of copying them
        self.generators = generators  # by generator method, the name of the method that advances its streams
        self.streams = _result_stream.OpenStreams()

    def stream_method(self, name: str) -> Any:
        """Returns the method of that name that advances or closes a stream, or None."""
        if name == _result_stream.CLOSE:
            return self.streams.aclose if self.is_async else self.streams.close
        if name.startswith(_result_stream.NEXT):
            return self.streams.anext if self.is_async else self.streams.next
        return None


class Server:
    """Dispatches calls to objects and answers them."""

    core: _core.Core
    lib: Any
    session: Any
    values: dict[
        int, dict[tuple[str, int], tuple[Any, list[Any]]]
    ]  # by token: bodies of argument values, with the references inside them
    objects: dict[str, Object]
    known: dict[
        bytes, tuple[_codec.Codec, str, str]
    ]  # by the identifying part of a call's metadata: codec, object and method
    codecs: dict[bool, _codec.Codec]  # by whether the caller may send pickles
    tasks: dict[int, Any]  # tasks of async methods, by token
    loops: dict[int, Loop]  # by token, the loop that runs a call beside the main thread
    how = 0  # flags of troupe_answer
    awaitables: OwnLoop | None = None  # runs the awaitables that sync methods return
    # a method with positional arguments alone, none of them a reference of the core, that returns values of _PLAIN
    # types
    direct: Any = None
    _beside: Server | None = None

    def trusts(self, meta: bytes) -> bool:
        """Returns whether the caller may send pickles."""
        raise NotImplementedError

    def verb(self, call: IncomingCall, body: object) -> object:
        """Handles a request of the core itself."""
        raise _errors.NotFoundError(f"there is no {call.method}")

    def serve(self, token: int, meta: bytes, body: Any) -> None:
        """Runs a call and answers it. Every short call takes this path."""
        args: Any
        kwargs: Any
        mark = _call.current.set((self.core, token, meta))
        attached = _trace.attach(_call.trace_of(meta)) if meta[_TRACE] else None
        try:
            codec, owner, name = self.known.get(_call.key_of(meta) if meta[_TRACE] else meta[_FLAGS:]) or self.learn(
                meta
            )
            method = self.method(owner, name)
            if method is None:
                value = self.verb(IncomingCall(self.core, token, meta), body)
            elif method is self.direct:
                value = method(*codec.decode(body)[0])
            else:
                args, kwargs = read_args(codec, body)
                if self.values:
                    self.place_values(token, codec, args, kwargs)
                if meta[_FLAGS] & META_ITEMS:
                    args = [_item.given(args[0])]
                value = method(*args, **kwargs)
                if type(value) not in _PLAIN:
                    if type(value) is GeneratorType:
                        value = self.stream(owner, name, value)
                    elif self.defer(token, meta, codec, value):
                        return
                if meta[_FLAGS] & META_ITEMS:
                    value = _item.outputs(value)
            answer = codec.encode(value)
            if _codec._encoded:
                self.name_references(token)
            body = args = kwargs = value = None  # release the caller's memory before its next call
        except Exception as err:
            self.fail(token, err, meta)
            return
        except KeyboardInterrupt:
            self.fail(token, _errors.CancelledError("the worker was interrupted"))
            return
        except SystemExit as err:
            self.exited(token, err, meta)
            return
        except BaseException as err:
            self.fail(token, err, meta)
            return
        finally:
            _call.current.reset(mark)
            if attached is not None:
                _trace.detach(attached)
        if type(answer) is bytes and len(answer) <= LARGE:
            if self.lib.troupe_answer(token, self.how, answer, len(answer)) > 0:
                self.core.take_now()
        else:
            self.answer(token, answer)

    # References: the core delivers the values of arguments before their call.

    def take_value(self, token: int, meta: bytes, body: object) -> None:
        """Stores the value of an argument of a call that follows. The reader calls it."""
        name, *inside = read_names(meta)
        self.values.setdefault(token, {})[name] = (body, [Reference(self.session, *n) for n in inside])

    def place_values(
        self, token: int, codec: _codec.Codec, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Replaces the references among the arguments by their values."""
        values = self.values.pop(token, None)
        if values is None:
            return
        for where, keys in ((args, range(len(args))), (kwargs, list(kwargs))):
            for key in keys:
                value = where[key]  # type: ignore[index]
                if type(value) is _codec.Argument:
                    body = values[value.name][0]
                    where[key] = codec.decode(body, share=value.share) if len(body) else None  # type: ignore[index]

    def name_references(self, token: int) -> None:
        """Tells the core which references the answer that follows contains."""
        refs = _codec.take_references()
        if refs:
            names = names_of(refs)
            self.lib.troupe_inside(token, self.session.id, names, len(names))

    # Deferred answers: a method may return a future or an awaitable; its result answers the call.

    def defer(self, token: int, meta: bytes, codec: _codec.Codec, value: object) -> bool:
        """Arranges for a future or an awaitable to answer the call when it is done. Returns False if the value is
        neither. No thread waits for it, and the call keeps its place in its lane."""
        if isinstance(value, Reference):
            return False  # a reference is itself the answer
        if isinstance(value, Waitable):
            value._when_fetched(lambda done: self.answer_deferred(token, meta, codec, done))
            return True
        if type(value).__module__.startswith("concurrent.futures") and hasattr(value, "add_done_callback"):
            value.add_done_callback(lambda done: self.answer_deferred(token, meta, codec, done))
            return True
        if not hasattr(value, "__await__"):
            return False
        loop = getattr(value, "get_loop", self.deferred_loop)()  # an asyncio future runs on its own loop
        loop.call_soon_threadsafe(self._await_deferred, token, meta, codec, value)
        return True

    def deferred_loop(self) -> asyncio.AbstractEventLoop:
        """Returns the event loop that runs awaitables returned by sync methods."""
        if self.awaitables is None:
            self.awaitables = OwnLoop()
        return self.awaitables.loop

    def _await_deferred(self, token: int, meta: bytes, codec: _codec.Codec, value: Any) -> None:
        import asyncio

        async def wait() -> Any:
            return await value

        task = asyncio.get_running_loop().create_task(wait())
        self.tasks[token] = task
        task.add_done_callback(lambda done: self.answer_deferred(token, meta, codec, done))

    def answer_deferred(self, token: int, meta: bytes, codec: _codec.Codec, done: Any) -> None:
        """Answers a call with the result of a completed future. It may run on any thread and must not block."""
        self.tasks.pop(token, None)
        try:
            value = (
                done.value()
                if isinstance(done, Pull) and done.value is not None
                else done._get()
                if isinstance(done, Waitable)
                else done.result()
            )
            answer = codec.encode(_item.outputs(value) if meta[_FLAGS] & META_ITEMS else value)
            self.name_references(token)
        except BaseException as err:
            cancelled = type(err).__name__ == "CancelledError" and not isinstance(err, _errors.Error)
            self.beside_thread().fail(
                token,
                _errors.CancelledError("the future that the method returned was cancelled") if cancelled else err,
                meta,
            )
            return
        self.beside_thread().answer(token, answer)

    def beside_thread(self) -> Server:
        """Returns this server for threads that take no completions when they answer."""
        if self.how == 0:
            return self
        if self._beside is None:
            self._beside = copy.copy(self)
            self._beside.how = 0
        return self._beside

    def learn(self, meta: bytes) -> tuple[_codec.Codec, str, str]:
        """Parses the metadata of a call, and caches the result for calls with the same metadata."""
        _, _, _, _, k, n, m, _ = _call.unpack(meta)
        texts = meta[CallMeta.size + k : CallMeta.size + k + n + m]
        owner, name = texts[n:].decode(), texts[:n].decode()
        codec = self.codecs[self.trusts(meta)]
        if meta[_FLAGS] & META_ON_DEVICE:
            made = self.objects.get(owner)
            codec = codec.on_device(snapshot=made is None or name not in made.shares)
        found = (codec, owner, name)
        if len(self.known) >= _KNOWN:  # calls of many callers
            self.known.clear()
        self.known[_call.key_of(meta)] = found
        return found

    def method(self, owner_name: str, name: str) -> Any:
        """Returns the called method, or None for a request of the core."""
        if name[0] == "@":
            return None
        made = self.objects[owner_name]
        owner = made.value
        if made.generators and (stream := made.stream_method(name)) is not None:
            return stream
        method = getattr(owner, name, None)
        if method is None or name[0] == "_" or not callable(method):
            raise _errors.NotFoundError(f"class {type(owner).__qualname__} has no method {name!r}")
        return method

    def stream(self, owner: str, name: str, value: object) -> object:
        """Registers the generator that a generator method returned as a stream. Other values are returned unchanged."""
        made = self.objects[owner]
        if name not in made.generators:
            return value
        if made.is_async:
            import asyncio

            return made.streams.add(value, asyncio.Lock(), made.generators[name])
        return made.streams.add(value, threading.Lock(), made.generators[name])

    def answer(self, token: int, answer: bytes | _codec.Walk, how: int = 0) -> None:
        """Answers a call with an encoded value. how: flags of troupe_answer."""
        n = len(answer)
        if isinstance(answer, bytes) and n <= LARGE:
            self.say(token, how, answer, n)
            return
        try:
            address = _empty.place(self.core, answer)
        except Exception as err:  # out of memory, or a device tensor cannot be copied
            self.fail(token, err)
            return
        self.say(token, how, address, n)

    def fail(self, token: int, err: BaseException, meta: bytes = b"") -> None:
        """Answers a call with an exception. With the call's metadata, the exception's arguments are encoded like values
        for that caller."""
        body = _error_transfer.encode(err, self.codecs[self.trusts(meta)] if meta else None)
        self.say(token, ANSWER_FAILED, body, len(body))

    def exited(self, token: int, err: SystemExit, meta: bytes) -> None:
        """Handles sys.exit in a method: a driver fails the call and does nothing else."""
        self.fail(token, err, meta)

    def say(self, token: int, how: int, body: bytes | int, n: int) -> None:
        if self.lib.troupe_answer(token, self.how | how, body, n) > 0:
            self.core.take_now()

    # Async methods on an event loop that is not the main thread's.

    def begin_in(self, loop: Loop, token: int, call: IncomingCall, body: object) -> None:
        """Starts a call on a loop. The reader calls it, so it must not block."""
        self.loops[token] = loop
        if not loop.soon(self._begin, token, call, body):
            self.loops.pop(token, None)
            self.fail(
                token,
                _errors.ClosedError("the event loop that served this has ended; call troupe.serve in one that lasts"),
            )

    def _begin(self, token: int, call: IncomingCall, body: object) -> None:
        import asyncio

        task = asyncio.get_running_loop().create_task(self.serve_async(token, call, body))
        self.tasks[token] = task
        task.add_done_callback(lambda _: self.loops.pop(token, None))

    def cancel_in(self, token: int) -> bool:
        """Asks the loop of a call to cancel it. Returns False if the call has no loop."""
        loop = self.loops.get(token)
        if loop is not None:
            loop.soon(self.cancel_task, token)
        return loop is not None

    def cancel_task(self, token: int) -> bool:
        """Cancels the task of a call; runs on the task's loop. Returns False if the call has no task."""
        import asyncio
        import inspect

        task = self.tasks.get(token)
        if task is None:
            return False
        work = task.get_coro()
        waits = work.cr_code is Server.serve_async.__code__ and inspect.getcoroutinestate(work) == inspect.CORO_CREATED
        task.cancel()
        if waits:  # the task never started, so serve_async will not answer the call
            del self.tasks[token]
            self.values.pop(token, None)
            self.fail(token, _errors.CancelledError("the call was cancelled"))
            self.core.push_soon(asyncio.get_running_loop())
        return True

    async def serve_async(self, token: int, call: IncomingCall, body: object) -> None:
        import asyncio

        try:
            _call.current.set((self.core, token, call._meta))
            if call._meta[_TRACE]:
                _trace.attach(
                    _call.trace_of(call._meta)
                )  # stays attached until the end of this task, which has its own context
            codec, owner, name = self.known.get(_call.key_of(call._meta)) or self.learn(call._meta)
            value = await self.invoke_async(call, codec, self.method(owner, name), body)
            answer = codec.encode(value)
            if _codec._encoded:
                self.name_references(token)
        except asyncio.CancelledError:
            self.fail(token, _errors.CancelledError("the call was cancelled"))
            return
        except Exception as err:
            self.fail(token, err, call._meta)
            return
        except SystemExit as err:
            self.exited(token, err, call._meta)
            return
        finally:
            self.tasks.pop(token, None)
            self.core.push_soon(asyncio.get_running_loop())
        self.answer(token, answer)

    async def invoke_async(self, call: IncomingCall, codec: _codec.Codec, method: Any, body: object) -> Any:
        if method is None:
            value: Any = self.verb(call, body)
        else:
            args, kwargs = read_args(codec, body)
            if self.values:
                self.place_values(call._token, codec, args, kwargs)
            if call._meta[_FLAGS] & META_ITEMS:
                args = [_item.given(args[0])]
            value = method(*args, **kwargs)
        while type(value) not in _PLAIN:
            if type(value).__module__.startswith("concurrent.futures") and hasattr(value, "add_done_callback"):
                import asyncio

                value = asyncio.wrap_future(value)
            if not hasattr(value, "__await__") or isinstance(value, Reference):
                break
            value = await value
        if type(value) in (GeneratorType, AsyncGeneratorType):
            value = self.stream(call.object, call.method, value)
        return _item.outputs(value) if call._meta[_FLAGS] & META_ITEMS else value


class Loop:
    """An event loop that runs elsewhere."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def soon(self, do: Callable[..., object], *args: object) -> bool:
        try:
            self.loop.call_soon_threadsafe(do, *args)
        except RuntimeError:
            return False  # the loop is closed
        return True

    def end(self) -> None:
        pass


class OwnLoop(Loop):
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        import asyncio

        super().__init__(asyncio.new_event_loop())
        _core.serving_loops.add(self.loop)
        threading.Thread(target=self.run, daemon=True, name="troupe-loop").start()

    def run(self) -> None:
        import asyncio

        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left, timeout=1))
        _core.serving_loops.discard(self.loop)
        _core.get()._beside.discard(threading.get_ident())
        self.loop.close()

    def end(self) -> None:
        self.soon(self.loop.stop)


def read_args(codec: _codec.Codec, body: Any) -> tuple[list[Any], dict[str, Any]]:
    """Decodes the arguments of a call. An empty body means none."""
    if not len(body):
        return [], _NONE
    value = codec.decode(body)
    if type(value) is list and len(value) == 2:
        args, kwargs = value
        if type(args) is list and (kwargs is None or type(kwargs) is dict):
            return args, kwargs or _NONE
    raise _errors.MalformedError("the body of a call must be [positional, named]: a list, and a map or nil")


def is_coroutine_function(function: object) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return bool(code is not None and code.co_flags & 0x280)  # CO_COROUTINE | CO_ASYNC_GENERATOR


def is_generator_function(function: object) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return bool(code is not None and code.co_flags & 0x220)  # CO_GENERATOR | CO_ASYNC_GENERATOR


def describe(value: object, max_concurrency: int, side: str) -> tuple[Object, dict[str, Any]]:
    """Describes an object: its public methods, each with its mode and lane. side says which calls of an async object
    use the side queue: "all", or "" for none. For other objects, "all" means the same, and "" only those of lanes
    beside the main thread."""
    cls = type(value)
    marks = _register.marks_of(cls)
    names = [
        n for n in dir(value) if not n.startswith("_") and callable(getattr(cls, n, None) or getattr(value, n, None))
    ]
    is_async = any(is_coroutine_function(getattr(cls, n, None)) for n in names)
    lanes: dict[str, str] = {}
    methods: list[dict[str, Any]] = []
    for name in names:
        mark = marks.get(name, {})
        lane = {"name": "work", "limit": 1}
        if mark.get("lane") == "control":
            lane = {"name": "control", "limit": 64}
        elif is_async:
            lane = {"name": "concurrent", "limit": max_concurrency}
        elif mark.get("concurrency"):
            limit = mark["concurrency"]
            used = {m["lane"]["limit"] for m in methods if m["lane"]["name"] == "concurrent"}
            lane = {"name": "concurrent" if used <= {limit} else f"concurrent-{name}"[:64], "limit": limit}
        if lane["name"] != "work" and not is_async:
            lanes[name] = str(lane["name"])
        replay = {"replay": True} if mark.get("replay") else {}
        methods.append({"name": name, "mode": mark.get("mode", ""), "lane": lane, **replay})
    generators: dict[str, str] = {}
    by_name = {m["name"]: m for m in methods}
    for name in [n for n in names if is_generator_function(getattr(cls, n, None))]:
        lane = by_name[name]["lane"]
        advance = (
            _result_stream.NEXT if lane["name"] == "work" or is_async else f"{_result_stream.NEXT}-{lane['name']}"[:64]
        )
        generators[name] = advance
        for extra in (advance, _result_stream.CLOSE):
            if extra not in by_name:
                by_name[extra] = {
                    "name": extra,
                    "mode": "",
                    "lane": {"name": "work", "limit": 1} if extra == _result_stream.CLOSE and not is_async else lane,
                }
                methods.append(by_name[extra])
                if lane["name"] != "work" and not is_async and extra != _result_stream.CLOSE:
                    lanes[extra] = str(lane["name"])
    table = {
        "methods": methods, "open": hasattr(cls, "__getattr__"), "device_tensors": True, "cancels": is_async,
        "inherits": True,
        "side": side if is_async or side == "all" else "beside" if lanes else "",
    }  # fmt: skip
    return Object(
        value, is_async, lanes, generators, frozenset(n for n in names if marks.get(n, {}).get("share"))
    ), table


def _devices() -> object:
    from . import _device

    return _device


_codec.set_devices(_devices)
