"""The process of an actor or of a task worker. Agents start it as `python -m troupe.ray._process`.

Sync actors and tasks run on the main thread, one call at a time. Threaded actors have a thread pool per concurrency
group and async actors an event loop per group, each on its own thread; their main thread only reads completions. The
side-queue thread answers requests for objects, whatever the other threads do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import os
import pickle
import signal
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _call, _codec, _seam
from .. import worker as _worker
from .._call import IncomingCall
from .._future import Asked
from .._seam import CANCEL
from .._serve import Object, read_args
from . import (
    _context,
    _control,
    _generators,
    _graphs,
    _objects,
    _process_title,
    _serialize,
    _state,
    _task_error,
    exceptions,
)
from ._serialize import Frame

NO_EXTRA: dict[str, Any] = {}  # shared, never modified
_OBJECT_REQUESTS = 1_000_000  # limit of queued requests for objects
_FUNCTIONS = 512  # unpickled functions that a worker caches
_RECENT = 4096  # calls whose functions are known for the timeline, about as many as the flight recorder has
_EXIT = 0
_GRACE = 4.0  # seconds allowed for the exit functions of an actor without handles
_HANDED_OVER = 30.0  # seconds allowed for the callers of a process that ends to take its results
_STAYING = bytes((0x92, _objects.STAYS))  # how an answer begins, encoded, that may stay with this process
_EXIT_TOLD = 2.0  # seconds allowed for reporting an actor's exit to the control service
_EXIT_DELAY = 0.1  # seconds until an async actor exits that called exit_actor outside a call


class Slot:
    """A placeholder in the arguments for a reference that is resolved before the call runs."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[object, ...]:
        return Slot, (self.index,)


class ActorExit(SystemExit):
    """Ends the actor after the call that raised it."""


class Call(_context.Task):
    """An incoming call: [id, name of the function or method, frame of (args, kwargs), dependencies, number of results,
    extra]. The last three may be absent. A call with plain positional arguments alone is [id, name of the method, None,
    *args]. The code that the call runs sees it as its task."""

    deps: list[Any] = _serialize.NONE
    returns = 1
    extra: dict[str, Any] = NO_EXTRA
    kept: Sequence[Any] = ()  # the references and handles in the frame, until the call is over
    report: _generators.Report | None = None  # of a generator, while it runs
    frame: Any  # of the arguments, or, if they are plain, a tuple of them

    def __init__(self, id: str, function: str, frame: Frame | None, *options: Any) -> None:
        self.id, self.function, self.frame = id, function, frame
        if frame is None:
            self.frame = options
            return
        if type(frame) is list:
            self.kept = _serialize.held(frame)
        if options:
            self.deps, self.returns, self.extra = options
            if "lease" in self.extra:
                self.lease, self.devices = self.extra["lease"], self.extra.get("devices") or {}
                self.assigned, self.placement = self.extra.get("demand") or {}, self.extra.get("placement")

    def over(self) -> None:
        """Drops the arguments: contexts that were copied while the call ran may refer to it for longer."""
        self.frame = _serialize.NONE
        if self.kept or self.deps or self.extra:
            self.kept, self.deps, self.extra = (), _serialize.NONE, NO_EXTRA

    def entries(self) -> list[_objects.Entry]:
        """Returns the entries of the dependencies and starts to fetch those that are not local."""
        found = []
        for kind, value in self.deps:
            if kind == _objects.PENDING:
                entry = _objects.ref_of_wire(value)._entry
                _objects.start_fetch(entry)
            elif kind in (_objects.SHARED, _objects.LENT):
                entry = _state.require().store.argument(*value, kind == _objects.LENT)
                _objects.start_fetch(entry)
            else:
                entry = _objects.Entry("", "")
                entry.set(kind, value)
            found.append(entry)
        for entry in found:
            entry.start_pull()
        return found

    def arguments(self, entries: list[_objects.Entry]) -> tuple[list[object], dict[str, object]]:
        args, kwargs = _serialize.loads(self.frame)
        if entries:
            args = [_filled(a, entries) for a in args]
            kwargs = {k: _filled(v, entries) for k, v in kwargs.items()}
        return args, kwargs


class DependencyError(Exception):
    """Raised when a dependency failed; the dependency's error frame becomes the call's result."""

    def __init__(self, frame: Frame) -> None:
        super().__init__("a dependency failed")
        self.frame = frame


def _filled(value: object, entries: list[_objects.Entry]) -> object:
    if type(value) is not Slot:
        return value
    entry = entries[value.index]
    try:
        entry.load()
    except exceptions.RayError as err:
        raise DependencyError(_objects._dump_error(err)) from None
    if entry.kind == _objects.ERROR:
        raise DependencyError(entry.error_frame())
    return _serialize.loads(entry.body)


class Service:
    """The methods of this process that other processes can call."""

    def __init__(self, host: RayHost, fields: dict[str, Any]) -> None:
        self.host, self.fields = host, fields
        self.kind: str = fields["kind"]  # "task", "sync", "threaded" or "async"
        self.instance: Any = None
        self.class_name: str = fields.get("class_name", "")
        self.running: dict[str, Call] = {}
        self.cancelled: set[str] = set()
        self.async_tasks: dict[str, tuple[Any, Any]] = {}
        self.functions: dict[bytes, Any] = {}
        self.executors: dict[str, Any] = {}
        self.bound: dict[str, Any] = {}  # cached bound methods of the actor instance
        self.titles: dict[str, str] = {}  # their titles
        self.turns: dict[tuple[str, str], int] = {}  # next sequence number, by caller and concurrency group
        self.early: dict[Any, tuple[int, list[Any]]] = {}  # calls that arrived before their turn
        self.making = "no"  # whether the actor instance exists: no, running, yes
        self.main = threading.get_ident()
        self.current = ""  # id of the call running on the main thread
        self.titled = ""  # name in the title of this process; "": the actor is idle
        self.exiting = False  # whether exit_actor has been called
        # of calls, for the timeline and the table of tasks: metadata, function and id; and the ids of those that failed
        self.recent: deque[tuple[bytes, str, str]] = deque(maxlen=_RECENT)
        self.failures: deque[str] = deque(maxlen=_RECENT)
        if self.kind != "task":
            self.state_title = f"ray::{self.class_name}"
        else:
            self.state_title = "ray::IDLE"

    def groups(self) -> dict[str, int]:
        return self.fields["groups"] or {}

    def start_executors(self) -> None:
        if self.kind == "async":
            for group in self.groups():
                self.executors[group] = _EventLoop(f"ray-{group or 'default'}")
        else:
            for group, limit in self.groups().items():
                self.executors[group] = concurrent.futures.ThreadPoolExecutor(
                    limit, thread_name_prefix=f"ray-{group or 'default'}"
                )

    # Lifecycle.

    def construct(self, pickled: bytes, module: str, frame: Frame, deps: Sequence[object]) -> object:
        """Creates the actor instance, whose class gets this module, and returns ["ok", pid] or ["error", frame]. For an
        async actor, returns a future of that."""
        self.making = "running"
        self.recent.append((_call.current.get()[2], "__init__", ""))  # type: ignore[index]
        self.start_executors()
        call = Call("", "__init__", frame, deps, 1, {})
        if self.kind != "async":
            return self._construct(pickled, module, call, call.entries())
        loop = self.executors[""]

        async def make() -> object:
            entries = call.entries()
            for entry in entries:
                await _ready(entry)
            return self._construct(pickled, module, call, entries)

        return asyncio.run_coroutine_threadsafe(make(), loop.loop)

    def _construct(self, pickled: bytes, module: str, call: Call, entries: list[_objects.Entry]) -> Any:
        made = ["error", None]
        try:
            made = self._made(pickled, module, call, entries)
        finally:
            self.making = "yes" if made[0] == "ok" else "no"
        return made

    def constructed(self) -> list[object]:
        """Returns whether the actor instance exists ("no", "running" or "yes") and the pid, for a new control service
        that does not know."""
        return [self.making, os.getpid()]

    def _made(self, pickled: bytes, module: str, call: Call, entries: list[_objects.Entry]) -> Any:
        task = _context.Task(os.urandom(24).hex(), f"{self.class_name}.__init__", "__init__")
        mark = _context.current.set(task)
        try:
            cls = pickle.loads(pickled)
            if cls.__module__ != module:
                cls = _in_module(cls, module)
            _wait(entries)
            args, kwargs = call.arguments(entries)
            instance = cls.__new__(cls)
            self.instance = self.host.instance = instance
            instance.__init__(*args, **kwargs)
            if self.exiting:
                end_process()
        except DependencyError as err:
            return ["error", _objects._dump_error(exceptions.ActorDiedError(_serialize.loads(err.frame)))]
        except (ActorExit, exceptions.AsyncioActorExit):
            end_process()
        except SystemExit as err:
            self._system_exit(err)
        except BaseException as err:
            error = _task_error.wrap(f"{self.class_name}.__init__", err, self.host.state)
            return ["error", _objects._dump_error(exceptions.ActorDiedError(error, None, self.fields.get("actor_id")))]
        finally:
            _context.current.reset(mark)
        return ["ok", os.getpid()]

    def exit(self, gentle: bool) -> object:
        """Ends the process, when the callers have the results that it keeps. gentle: another thread runs the exit
        functions first, while this one keeps reading completions for them."""
        with self.host.core.beside():
            Asked(self.host.core, self.host.handing_over()).add_done_callback(lambda _: self._exit(gentle))
        return concurrent.futures.Future()  # never completes: the call ends with the process

    def _exit(self, gentle: bool) -> None:
        if not gentle:
            _exit_now()
        threading.Thread(target=end_process, args=(False,), daemon=True).start()
        limit = threading.Timer(_GRACE, _exit_now)
        limit.daemon = True
        limit.start()

    # Objects.

    def fetch(self, id: str, again: bool) -> object:
        return fetch(self.host.state.store, id, again)

    def borrow(self, id: str, process: str) -> None:
        self.host.state.store.borrow(id, process)

    def give_back(self, id: str, process: str) -> None:
        self.host.state.store.give_back(id, process)

    def owns(self) -> bool:
        """Returns whether other processes borrow objects of this one, or are about to."""
        return bool(self.host.state.store.is_needed())

    def receive_values(self, id: str, first: int, values: Sequence[tuple[int, object]]) -> object:
        return receive_values(self.host.state.store, id, first, values)

    def cancel_object(self, id: str, force: bool, recursive: bool) -> None:
        """Cancels a call made by this process, at the request of a borrower of its result."""
        cancel_object(self.host.state.store, id, force, recursive)

    # Compiled graphs.

    def start_graph(self, *fields: Any) -> object:
        return _graphs.start(self.host, *fields)

    def end_graph(self, name: str) -> None:
        _graphs.end(name)

    def graph_values(self, *fields: Any) -> object:
        return _graphs.deliver(*fields)

    # Calls.

    def call(self, *fields: Any) -> Any:
        """Runs a call on the main thread."""
        call = Call(*fields)
        self.recent.append((_call.current.get()[2], call.function, call.id))  # type: ignore[index]
        self.current = call.id
        try:
            return self.run(call)
        except KeyboardInterrupt:  # from a cancellation that arrived outside the handlers of run
            return self.failed(call, exceptions.TaskCancelledError(call.id))
        finally:
            self.current = ""

    def run(self, call: Call) -> Any:
        """Runs a call and returns [kind, frame], [PLAIN, value], or [SEVERAL, frames] for several results."""
        args: Any
        if self.cancelled and call.id in self.cancelled:
            self.cancelled.discard(call.id)
            return self.failed(call, exceptions.TaskCancelledError(call.id))
        self.running[call.id] = call
        call.name = (call.extra and call.extra.get("name")) or self.titles.get(call.function) or self.title_of(call)
        mark = _context.current.set(call)
        undo = None
        if self.kind == "task":
            undo = self._enter_task(call)
        elif self.titled != call.name and self.current == call.id:
            self.titled = call.name
            _process_title.set_title("ray::" + call.name)  # reset when the process is idle
        try:
            function = self.method_of(call.function) if self.kind != "task" else self.function_of(call)
            if type(call.frame) is tuple:
                args, kwargs = call.frame, NO_EXTRA
            elif call.deps:
                entries = call.entries()
                _wait(entries)
                args, kwargs = call.arguments(entries)
            else:
                args, kwargs = _serialize.loads(call.frame)
            value = function(*args, **kwargs)
            if call.returns < 0:
                del args, kwargs
                return self._stream(call, value)
            if type(value) in _serialize.PLAIN_TYPES:
                if call.returns == 1 and _serialize.needs_no_pickle(value) and not call.cancelled and not self.exiting:
                    return [_objects.PLAIN, value]
            elif inspect.iscoroutine(value):
                value = asyncio.run(value)
            if self.exiting:
                end_process()
            del args, kwargs
            return self.succeeded(call, value)
        except DependencyError as err:
            return [_objects.ERROR, err.frame]
        except ActorExit:
            end_process()
        except KeyboardInterrupt:
            return self.failed(call, exceptions.TaskCancelledError(call.id))
        except SystemExit as err:
            self._system_exit(err)
        except asyncio.CancelledError:
            raise
        except BaseException as err:
            if self.exiting:
                end_process()
            return self.failed(call, err)
        finally:
            self.running.pop(call.id, None)
            _context.current.reset(mark)
            if undo is not None:
                undo()
            call.over()

    def _stream(self, call: Call, value: object) -> object:
        """Runs the generator that a function returned."""
        _check_generator(call, value)
        store = self.host.state.store
        if inspect.isasyncgen(value):
            return asyncio.run(_generators.arun(call, value, store))
        return _generators.run(call, value, store)

    def _enter_task(self, task: _context.Task) -> Callable[[], None]:
        """Sets the process title, the visible devices and the thread count for a task. Returns a function that undoes
        it."""
        _process_title.set_title(f"ray::{task.name}")
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" not in os.environ
        gpus = task.devices.get("GPU")
        if gpus and own:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        threads = set_threads(task.assigned)

        def undo() -> None:
            _process_title.set_title("ray::IDLE")
            if threads:
                os.environ.pop("OMP_NUM_THREADS", None)
            if gpus and own:
                if before is None:
                    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                else:
                    os.environ["CUDA_VISIBLE_DEVICES"] = before

        return undo

    def _system_exit(self, err: SystemExit) -> object:
        if err.code == 0:
            tell_exit("the exit code is 0")
        _hand_over()
        _worker.end_process(err)

    def function_of(self, call: Call) -> Any:
        """Returns the function of a task."""
        digest = call.extra["digest"]
        function = self.functions.get(digest)
        if function is None:
            function = pickle.loads(call.extra["function"])
            if len(self.functions) >= _FUNCTIONS:
                self.functions.clear()
            self.functions[digest] = function
        return function

    def method_of(self, name: str) -> Any:
        function = getattr(
            type(self.instance), name, None
        )  # looked up on the class, since an instance attribute may have the same name
        bound = self.bound.get(name)
        if bound is not None and bound.__func__ is function:
            return bound
        if name == "__ray_ready__":
            return lambda: True
        if name == "__ray_terminate__":
            return exit_actor
        if name == "__ray_call__":
            return lambda function, *args, **kwargs: function(self.instance, *args, **kwargs)
        if isinstance(function, types.FunctionType) and not self._is_static(name):
            bound = self.bound[name] = types.MethodType(function, self.instance)
            self.titles[name] = f"{self.class_name}.{name}"
            return bound
        return getattr(self.instance, name)

    def _is_static(self, name: str) -> bool:
        return isinstance(inspect.getattr_static(type(self.instance), name), staticmethod)

    def succeeded(self, call: Call, value: object) -> list[object]:
        if call.cancelled and self.kind in ("sync", "threaded"):
            return self.failed(call, exceptions.TaskCancelledError(call.id))
        try:
            if not call.returns or (call.returns == 1 and not inspect.isgenerator(value)):
                frame, contents = _serialize.dumps(value if call.returns else None)
                if contents.refs or contents.handles:
                    self.host.state.store.linger(contents)
                elif _serialize.size(frame) >= _objects.SHARED_SIZE:
                    return [_objects.STAYS, frame]
                return [_objects.VALUE, frame]
            values = list(value) if hasattr(value, "__iter__") else [value]
            if len(values) != call.returns:
                raise ValueError(f"Task returned {len(values)} objects, but num_returns={call.returns}.")
            frames = []
            for one in values:
                frame, contents = _serialize.dumps(one)
                self.host.state.store.linger(contents)
                frames.append(frame)
            return [_objects.SEVERAL, frames]
        except Exception as err:
            return self.failed(call, err)

    def failed(self, call: Call, err: BaseException) -> list[object]:
        self.failures.append(call.id)
        error = (
            err
            if isinstance(err, exceptions.TaskCancelledError)
            else _task_error.wrap(self.title_of(call), err, self.host.state)
        )
        return [_objects.ERROR, _objects._dump_error(error)]

    def title_of(self, call: Call) -> str:
        return f"{self.class_name}.{call.function}" if self.kind != "task" else call.function

    def function_title(self, function: str) -> str:
        """Returns the qualified name of a task's function or an actor's method, with its module."""
        if self.kind == "task":
            outside, local, name = function.rpartition("<locals>.")
            return f"{outside.partition('.<locals>')[0].rstrip('.').rpartition('.')[0]}.{name}" if local else function
        cls = type(self.instance)
        if self.kind == "async":
            qualified = getattr(getattr(cls, function, None), "__qualname__", f"{cls.__qualname__}.{function}")
            return f"{cls.__module__}.{qualified}"
        return f"{cls.__module__}.{cls.__name__}.{function}"

    # Calls outside the main thread.

    def begin(self, token: int, group: str, fields: list[Any]) -> None:
        """Starts a call of a threaded or async actor once its turn has come. Called by the thread that reads the side
        queue, in order of arrival."""
        caller = (fields[-1]["from"], group)
        number = fields[-1]["number"]
        if isinstance(number, list):  # one number per rank of a group call
            number = number[self.host.rank]
        self.early[caller, number] = (token, fields)
        while (found := self.early.pop((caller, self.turns.get(caller, 0)), None)) is not None:
            self.turns[caller] = self.turns.get(caller, 0) + 1
            self._begin(found[0], group, Call(*found[1]))

    def _begin(self, token: int, group: str, call: Call) -> None:
        executor = self.executors[group]
        if self.kind != "async":
            executor.submit(self._run_and_answer, token, call)
        else:
            executor.loop.call_soon_threadsafe(self._begin_async, token, call, executor)

    def _run_and_answer(self, token: int, call: Call) -> None:
        try:
            value = self.run(call)
        except BaseException as err:
            value = self.failed(call, err)
        self.host.reply(token, value)

    def _begin_async(self, token: int, call: Call, executor: Any) -> None:
        task = executor.loop.create_task(self._run_async(call))
        self.async_tasks[call.id] = (executor.loop, task)

        def finish(done: concurrent.futures.Future[object]) -> None:
            self.async_tasks.pop(call.id, None)
            try:
                value = done.result()
            except asyncio.CancelledError:
                value = self.failed(call, exceptions.TaskCancelledError(call.id))
            except BaseException as err:
                value = self.failed(call, err)
            self.host.reply(token, value)

        task.add_done_callback(finish)

    async def _run_async(self, call: Call) -> Any:
        self.running[call.id] = call  # before the check: cancel_call looks in the other order
        if call.id in self.cancelled:
            self.cancelled.discard(call.id)
            del self.running[call.id]
            return self.failed(call, exceptions.TaskCancelledError(call.id))
        call.name = call.extra.get("name") or self.titles.get(call.function) or self.title_of(call)
        _context.current.set(call)
        try:
            entries = call.entries()
            for entry in entries:
                await _ready(entry)
            args, kwargs = call.arguments(entries)
            value = self.method_of(call.function)(*args, **kwargs)
            if call.returns < 0:
                _check_generator(call, value)
                del args, kwargs
                return await _generators.arun(call, value, self.host.state.store)
            if hasattr(value, "__await__"):
                value = await value
            if self.exiting:
                end_process()
            del args, kwargs
            return self.succeeded(call, value)
        except DependencyError as err:
            return [_objects.ERROR, err.frame]
        except (ActorExit, exceptions.AsyncioActorExit):
            end_process()
        except SystemExit as err:
            self._system_exit(err)
        except asyncio.CancelledError:
            raise
        except BaseException as err:
            if self.exiting:
                end_process()
            return self.failed(call, err)
        finally:
            self.running.pop(call.id, None)
            call.over()

    def describe(self, with_objects: bool) -> dict[str, Any]:
        """Returns what tables show of this process. Its calls so far are: the caller's session, the number there, the
        name of the task or method, its id, and whether it failed."""
        prefix = f"{self.class_name}." if self.kind != "task" else ""
        failures = set(self.failures)
        calls = [[*_call.id_of(meta), prefix + f, id, id in failures] for meta, f, id in list(self.recent)]
        return {**_objects.describe_process(self.host.state, with_objects), "calls": calls}

    def cancel_call(self, id: str, force: bool, recursive: bool) -> str:
        """Cancels a call. Returns "running" if the call has been signalled, "queued" if it will not start, "no" if it
        cannot be interrupted. recursive: also cancels the calls it made."""
        task = self.running.get(id)
        if task is not None:
            task.cancelled = True
            if task.report is not None:
                task.report.cancel()
            for entry in list(task.children) if recursive else ():
                cancel_entry(entry, force, recursive)
        self.cancelled.add(id)
        if id not in self.running:  # its event loop may be busy with another call
            return "queued"
        self.cancelled.discard(id)
        found = self.async_tasks.get(id)
        if found is not None:
            loop, task = found
            loop.call_soon_threadsafe(task.cancel)
            return "running"
        if self.kind != "task":
            return "no"
        if force:
            _flush()
            os._exit(1)
        self.host.cancelling = id
        signal.pthread_kill(self.main, signal.SIGINT)
        return "running"


class _EventLoop:
    """An event loop with its own thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


async def _ready(entry: _objects.Entry) -> None:
    from .. import _core

    if not entry._done:
        await _core.wait_in_loop(_core.get(), entry)
    try:
        await entry.aload()
    except exceptions.RayError as err:
        raise DependencyError(_objects._dump_error(err)) from None


def _wait(entries: list[_objects.Entry]) -> None:
    for entry in entries:
        if not entry._done:
            from .. import _core

            _core.get().wait(entry, None)


def _found(entry: _objects.Entry) -> list[object]:
    ref, kept = entry.lend()
    if ref is None:
        entry.handled()
        return [entry.kind, entry.body]
    return [_objects.SHARED if kept else _objects.LENT, ref]


def fetch(store: _objects.Store, id: str, again: bool) -> object:
    """Returns an owned object for another process: [kind, frame] or a future of it. again: the other process could not
    read the value at the worker that holds it."""
    entry = store.entries.get(id)
    if entry is None:
        return [_objects.ERROR, _objects._dump_error(exceptions.ReferenceCountingAssertionError(id))]
    if entry._done and not again:
        return _found(entry)
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    answer = functools.partial(_answer_fetch, entry, future)
    if again:
        entry.fetch_copy(answer)
    else:
        entry.on_done(answer)
    return future


def _answer_fetch(entry: _objects.Entry, future: concurrent.futures.Future[object]) -> None:
    future.set_result(_found(entry))


def receive_values(
    store: _objects.Store, id: str, first: int, values: Sequence[tuple[int, object]]
) -> int | concurrent.futures.Future[int]:
    """Takes values of a generator that this process called: see _generators.Stream.receive."""
    stream = store.entries.get(id)
    return stream.receive(first, values) if isinstance(stream, _generators.Stream) else _generators.DROPPED


def _check_generator(call: Call, value: object) -> None:
    if not (inspect.isgenerator(value) or inspect.isasyncgen(value)):
        raise ValueError(
            "num_returns='streaming' can only be used with generators, and "
            f"{call.function} returned a {type(value).__name__}."
        )


def _in_module(cls: type, module: str) -> type:
    """Returns a subclass of the main program's class that belongs to another module. The class itself stays as the main
    program knows it: instances of it may be sent back."""
    return types.new_class(
        cls.__name__,
        (cls,),
        {},
        lambda body: body.update(__module__=module, __qualname__=cls.__qualname__, __doc__=cls.__doc__),
    )


def cancel_entry(entry: _objects.Entry, force: bool, recursive: bool) -> None:
    """Cancels a call made by this process; force applies only to tasks, not to actor calls."""
    call = entry.call
    if call is None or entry._done:
        return
    try:
        call.cancel(force, recursive)
    except ValueError:
        call.cancel(False, recursive)


def cancel_object(store: _objects.Store, id: str, force: bool, recursive: bool) -> None:
    entry = store.entries.get(id)
    if entry is not None:
        cancel_entry(entry, force, recursive)


_warm_torch: Any = None  # torch, if it was imported before this process was forked and so has not seen OMP_NUM_THREADS


def set_threads(assigned: Mapping[str, float]) -> bool:
    """Sets OMP_NUM_THREADS to the CPUs of a task or actor, unless it is already set. Returns whether it was set
    here."""
    if "OMP_NUM_THREADS" in os.environ:
        return False
    threads = max(int(assigned.get("CPU", 1)), 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    global _warm_torch
    if _warm_torch is not None:
        _warm_torch.set_num_threads(threads)
        _warm_torch = None  # later tasks keep what the first one set, as they would without a preloaded torch
    return True


def exit_actor() -> None:
    """Ends the actor after the current call, even if that call catches the exception. An async actor may also call it
    from a background task."""
    state = _state.current()
    assert state is not None
    service = state.host.service
    service.exiting = True
    if service.kind == "async":
        threading.Timer(_EXIT_DELAY, end_process).start()
        raise exceptions.AsyncioActorExit
    raise ActorExit(0)


def tell_exit(why: str) -> None:
    """Tells the control service that the actor exits intentionally."""
    state = _state.current()
    if state is None or not state.actor_id:
        return
    try:
        _state.control_call("actor_exits", state.actor_id, f"Worker exits because {why}.", timeout=_EXIT_TOLD)
    except Exception:
        pass  # the session has ended


_ending = threading.Lock()


def end_process(tell: bool = True) -> None:
    """Runs the exit functions and ends the process. Later callers block until it has ended. tell: reports the exit to
    the control service first."""
    import atexit

    _ending.acquire()
    if tell:
        tell_exit("exit_actor() is called: the user requested to exit the actor")
        _hand_over()
    state = _state.current()
    shutdown = (
        getattr(state.host.instance, "__ray_shutdown__", None) if state is not None and state.host is not None else None
    )
    if shutdown is not None:
        try:
            shutdown()
        except BaseException:
            traceback.print_exc()
    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    _flush()
    os._exit(_EXIT)


def _hand_over() -> None:
    """Gives the results that this process keeps to their callers."""
    state = _state.current()
    if state is None or state.host is None:
        return
    try:
        state.host.core.ask(state.host.handing_over()).get()
    except Exception:
        pass  # the session has ended


def _exit_now() -> None:
    _flush()
    os._exit(_EXIT)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


class RayHost(_worker.Host):
    """A Troupe worker that serves the methods of Service."""

    def __init__(self, assignment: str) -> None:
        super().__init__(assignment)
        shared = self.config["ray"]
        fields = {**shared, **shared["ranks"][self.rank]}
        # the name by which other processes reach this one
        self.process = self.role if self.world == 1 else f"{self.role}@{self.rank}"
        self.instance: Any = None
        self.cancelling = ""
        if fields["troupe_ray"]:  # Troupe's variables are not passed on in a role's environment
            os.environ["TROUPE_RAY"] = fields["troupe_ray"]
            if "," in fields["troupe_ray"]:
                from ..adapters import _install

                _install.install_named(fields["troupe_ray"])
        self.state = self._state(fields)
        self.service = Service(self, fields)
        self.codec = self.session.codec(False)
        _process_title.set_title(self.service.state_title)
        if self.service.kind != "task":
            set_threads(self.state.assigned)

    def _state(self, fields: dict[str, Any]) -> _state.State:
        control = _control.Control(self.process, fields["job_id"])
        state = _state.State(
            mode=_state.WORKER_MODE,
            job_id=fields["job_id"],
            namespace=fields.get("namespace") or fields["job_namespace"],
            node_id=fields["node_id"],
            address=fields["address"],
            control=control,
            process=self.process,
        )
        state.namespace = fields["job_namespace"]
        state.node_ip = fields["node_ip"]
        state.actor_id, state.actor_name = fields.get("actor_id", ""), fields.get("actor_name", "")
        state.actor_namespace = fields.get("namespace", "")
        state.worker_id = fields.get("worker_id") or fields.get("actor_id", "")
        state.placement_group = fields.get("placement")
        state.runtime_env = fields["env"]
        state.accelerators = fields["devices"]
        state.assigned = fields.get("demand") or {}
        state.restarted = fields.get("restarted", 0)
        state.store = _objects.Store(self.process)
        state.host = self
        _state.set_current(state)
        return state

    def make(self, name: str, body: object) -> object:
        """Declares the methods of this process. The actor instance is not created here but by construct."""
        service = self.service
        work, objects = {"name": "work", "limit": 1}, {"name": "concurrent-objects", "limit": _OBJECT_REQUESTS}
        methods: list[dict[str, Any]] = [{"name": "construct", "mode": "", "lane": work}]
        if service.kind in ("task", "sync"):
            methods.append({"name": "call", "mode": "", "lane": work})
        for i, (group, limit) in enumerate(service.groups().items()):
            methods.append(
                {"name": method_of_group(group), "mode": "", "lane": {"name": f"concurrent-{i}", "limit": limit}}
            )
        for method in (
            "fetch",
            "borrow",
            "give_back",
            "receive_values",
            "describe",
            "cancel_call",
            "cancel_object",
            "constructed",
            "start_graph",
            "end_graph",
            "graph_values",
            "owns",
            "exit",
        ):
            methods.append({"name": method, "mode": "", "lane": objects})
        lanes = {m["name"]: m["lane"]["name"] for m in methods if m["lane"]["name"] != "work"}
        self.objects[name] = Object(service, False, lanes, {})
        self.direct = service.call
        self.start_thread()
        _objects.start_reader(self.core)
        return {"methods": methods, "open": False, "cancels": False, "side": "beside"}

    def method(self, owner_name: str, name: str) -> Any:
        """Returns the called method. Calls of actors and tasks, which are the most, take a short cut."""
        return self.direct if name == "call" else super().method(owner_name, name)

    def when_quiet(self) -> None:
        """Shows in the title of this process that its actor is idle."""
        if self.service.titled:
            self.service.titled = ""
            _process_title.set_title(self.service.state_title)

    def arrived_beside(self, kind: int, token: int, meta: bytes, body: object) -> None:
        if kind == CANCEL:
            return
        call = IncomingCall(self.core, token, meta)
        if not call.method.startswith("call-"):
            self.beside_thread().serve(token, meta, body)
            return
        args, _ = read_args(self.codec, body)
        self.service.recent.append((meta, args[1], args[0]))
        self.service.begin(token, bytes.fromhex(call.method[5:]).decode(), args)

    def handing_over(self) -> _seam.Request:
        """Returns the request to give the results that this process keeps to their callers."""
        return _seam.hand_over(runtime=self.session.id, timeout=_HANDED_OVER)

    def answer(self, token: int, answer: bytes | _codec.Walk, how: int = 0) -> None:
        """Answers a call with a large value, which its caller gets at once unless it may stay."""
        head = answer if isinstance(answer, bytes) else answer.pieces()[0]
        may_stay = bytes(head[:2]) == _STAYING
        super().answer(token, answer, how if may_stay else how | _seam.ANSWER_SENDS)

    def reply(self, token: int, value: object) -> None:
        """Answers a call; any thread except the main one may call it."""
        answer = self.codec.encode(value)
        if _codec._encoded:
            self.name_references(token)
        self.beside_thread().answer(token, answer)

    def stop_on(self, *signals: int) -> None:
        super().stop_on(*signals)
        stop = signal.getsignal(signal.SIGINT)

        def interrupted(number: int, frame: types.FrameType | None) -> None:
            if not self.cancelling:
                stop(number, frame)  # type: ignore[operator, misc]
                return
            wanted, self.cancelling = self.cancelling, ""
            if self.service.current == wanted:
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupted)


def method_of_group(group: str) -> str:
    """Returns the name of the Troupe method that carries the calls of a concurrency group."""
    return "call-" + group.encode().hex()


def main() -> int:
    global _warm_torch
    _warm_torch = sys.modules.get("torch")
    _worker.Host = RayHost  # type: ignore[misc]
    return _worker.main()
