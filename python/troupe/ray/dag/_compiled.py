"""The driver of a compiled graph."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from ... import _core
from .. import _graphs, _objects, _peers, _serialize, _state, exceptions
from .._objects import ERROR, Entry
from .._refused import refuse
from ..experimental.compiled_dag_ref import CompiledDAGFuture, CompiledDAGRef
from ._context import DAGContext
from ._nodes import DAGNode
from ._plan import DRIVER, Plan, plan_of

_START = 300.0  # seconds for the actors of a graph to be created


class _Result:
    """The results of one execution. It is done when all have arrived, or one of them is an error."""

    def __init__(self, count: int) -> None:
        self._done = False
        self._waiters: list[Any] = []
        self.values: dict[int, Entry] = {}  # by position
        self.left = set(range(count))  # those that have neither been taken nor dropped
        self.missing = count

    def error(self) -> Entry | None:
        return next((e for e in self.values.values() if e.kind == ERROR), None)

    def put(self, position: int, entry: Entry) -> None:
        if position not in self.values:
            self.values[position] = entry
            self.missing -= 1
        if not self._done and (not self.missing or entry.kind == ERROR):
            self._done = True
            for wake in list(self._waiters):
                wake()


class CompiledDAG:
    """A graph whose actors wait for the values of its executions. teardown ends it; so does the end of an actor."""

    def __init__(
        self,
        root: DAGNode,
        *,
        enable_asyncio: bool = False,
        _submit_timeout: float | None = None,
        _max_inflight_executions: int | None = None,
        _max_buffered_results: int | None = None,
        _overlap_gpu_communication: bool | None = None,
        _default_communicator: object = None,
        _buffer_size_bytes: int | None = None,
    ) -> None:
        if isinstance(_default_communicator, str) and _default_communicator != "create":
            raise ValueError("_default_communicator is 'create' or an object")
        context = DAGContext.get_current()
        state = _state.require()
        self._id = uuid.uuid4().hex
        self._is_async = enable_asyncio
        self._submit_timeout = context.submit_timeout if _submit_timeout is None else _submit_timeout
        self._get_timeout = context.get_timeout
        self._most_inflight = _max_inflight_executions or context.max_inflight_executions
        self._most_buffered = _max_buffered_results or context.max_buffered_results
        self._plan = plan_of(root)
        self._lock = threading.RLock()  # guards the fields below
        self._execution_index = -1
        self._results: dict[int, _Result] = {}  # by execution: those with results that are not taken
        self._got = -1  # the last execution of which a result was taken
        self._arriving = 0  # executions whose results have not all arrived
        self._ended: BaseException | None = None  # why it takes no more executions
        self._processes = self._start(self._plan, state)
        self._inputs = self._inputs_of(self._plan)
        end = functools.partial(_end, self._id, list(self._processes.values()))
        weakref.finalize(self, _objects.later, end, state.store).atexit = False

    def get_id(self) -> str:
        return self._id

    @property
    def actor_refs(self) -> list[Any]:
        return list(self._plan.handles.values())

    def visualize(self, *args: object, **kwargs: object) -> str:
        raise refuse("visualize of a compiled graph", "the steps of `troupe timeline`")

    # The actors.

    def _start(self, plan: Plan, state: _state.State) -> dict[str, str]:
        """Starts the parts of the actors, once they are created. Returns their processes, by actor."""
        from .._waiting import get

        found = get([h.__ray_call__.remote(_process_here) for h in plan.handles.values()], timeout=_START)
        processes = dict(zip(plan.handles, found, strict=True))
        me = weakref.ref(self)
        for actor, steps in plan.steps.items():
            keys = [key for step in steps for key in step.outputs()]
            readers = {k: [processes[r] for r in plan.readers.get(k, ()) if r not in (actor, DRIVER)] for k in keys}
            results = [key for key in keys if key in plan.outputs]
            sent = [[s.method, s.outputs(), _serialize.dumps((s.args, s.kwargs))[0], s.slots] for s in steps]
            _peers.peer(processes[actor]).ask(
                "start_graph", (self._id, state.process, sent, readers, results), _watch(me, actor)
            )
        return processes

    def _inputs_of(self, plan: Plan) -> dict[str, tuple[list[str], bool]]:
        """Returns, by process, the keys of the input that it takes, and whether it makes results."""
        found = {}
        for actor, process in self._processes.items():
            keys = [k for k, readers in plan.readers.items() if k.partition(".")[0] == "in" and actor in readers]
            makes = any(key in plan.outputs for step in plan.steps[actor] for key in step.outputs())
            if keys or makes:
                found[process] = keys, makes
        return found

    def _lost(self, actor: str, error: BaseException | None) -> None:
        """Fails the executions under way after the end of an actor."""
        if self._ended is not None:
            return
        self._end(
            exceptions.ActorDiedError(
                f"{exceptions.ActorDiedError.BASE_ERROR_MSG} The compiled graph has ended: {error}", None, actor
            )
        )
        _end(self._id, list(self._processes.values()))

    def _end(self, why: BaseException) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = why
            waiting = [r for r in self._results.values() if not r._done]
        entry = _graphs.failed(why)
        for result in waiting:
            result.put(min(set(range(len(self._plan.outputs))) - set(result.values)), entry)

    def teardown(self, kill_actors: bool = False) -> None:
        """Ends the graph; its actors go on. A step that runs is completed."""
        self._end(exceptions.RayChannelError("Channel closed."))
        _end(self._id, list(self._processes.values()))
        if kill_actors:
            from ..actor import kill

            for handle in self._plan.handles.values():
                kill(handle)

    # Executions.

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Starts an execution. Returns a reference to its result, or a list of them."""
        if self._is_async:
            raise ValueError("Use execute_async if enable_asyncio=True")
        result = self._begin(args, kwargs)
        if result is not None and not _core.get().wait(result, time.monotonic() + self._submit_timeout):
            raise self._submit_timed_out()
        return self._submit(args, kwargs, CompiledDAGRef)

    async def execute_async(self, *args: Any, **kwargs: Any) -> Any:
        """Does what execute does, with results for await."""
        if not self._is_async:
            raise ValueError("Use execute if enable_asyncio=False")
        result = self._begin(args, kwargs)
        if result is not None:
            try:
                await asyncio.wait_for(_core.wait_in_loop(_core.get(), result), self._submit_timeout)
            except asyncio.TimeoutError:
                raise self._submit_timed_out() from None
        return self._submit(args, kwargs, CompiledDAGFuture)

    def _submit_timed_out(self) -> BaseException:
        return exceptions.RayChannelTimeoutError(
            f"An execution of the compiled graph could not start within {self._submit_timeout} s, because "
            f"{self._most_inflight} others are not over. RAY_CGRAPH_submit_timeout sets another time."
        )

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result | None:
        """Checks that an execution may start. Returns a result to wait for, if too many executions are not over whose
        references were dropped."""
        self._check_arguments(args, kwargs)
        with self._lock:
            if self._ended is not None:
                raise self._ended
            waiting = [r for n, r in self._results.items() if r.left and n > self._got]
            if len(waiting) >= self._most_inflight:
                raise exceptions.RayCgraphCapacityExceeded(
                    f"The compiled graph can't have more than {self._most_inflight} in-flight executions, and you "
                    f"currently have {len(waiting)} in-flight executions. Retrieve an output using ray.get before "
                    "submitting more requests or increase `_max_inflight_executions`. "
                )
            running = [r for r in self._results.values() if not r._done]
            return running[0] if len(running) >= self._most_inflight else None

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        start = "dag.execute() or dag.execute_async() must be called with"
        if len(args) != self._plan.positional:
            raise ValueError(f"{start} {self._plan.positional} positional args, got {len(args)}")
        for name in self._plan.keywords:
            if name not in kwargs:
                raise ValueError(f"{start} kwarg `{name}`")

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[CompiledDAGRef]) -> Any:
        values = {"in": args[0] if args else None} if "in" in self._plan.readers else {}
        values |= {f"in.{i}": a for i, a in enumerate(args)} | {f"in.{k}": v for k, v in kwargs.items()}
        readers = self._plan.readers
        made = {k: _graphs.made(value, len(readers[k]) > 1) for k, value in values.items() if k in readers}
        with self._lock:
            self._execution_index += 1
            execution = self._execution_index
            self._results[execution] = _Result(len(self._plan.outputs))
        for process, (keys, makes) in self._inputs.items():
            done = _taker(weakref.ref(self), execution) if makes else _graphs._ignore
            _graphs.send(process, self._id, execution, {k: made[k] for k in keys}, makes, done)
        if not self._plan.has_several:
            return kind(self, execution)
        return [kind(self, execution, i) for i in range(len(self._plan.outputs))]

    def _arrived(self, execution: int, items: list[_graphs.Item]) -> None:
        values = {key: _graphs.arrived(kind, body) for key, kind, body in items}
        with self._lock:
            result = self._results.get(execution)
        if result is None:
            return
        for position, key in enumerate(self._plan.outputs):
            if key in values:
                result.put(position, values[key])
        with self._lock:
            self._forget(execution, result)

    def _forget(self, execution: int, result: _Result) -> None:
        """Drops an execution that is over and whose results were taken or dropped; the caller holds the lock."""
        if result._done and not result.left:
            self._results.pop(execution, None)

    # Results.

    def _get(self, execution: int, channel: int | None, timeout: float | None, take: Callable[[], None]) -> Any:
        """Waits for a result, and takes it."""
        result = self._checked(execution)
        seconds = self._get_timeout if timeout is None else timeout
        deadline = None if seconds == -1 else time.monotonic() + seconds
        if not result._done:
            with _state.require().blocked():
                if not _core.get().wait(result, deadline):
                    raise exceptions.RayChannelTimeoutError(
                        "The result of a compiled graph did not arrive within "
                        f"{seconds} s. RAY_CGRAPH_get_timeout sets another time."
                    )
        take()
        return self._value(execution, channel, result)

    async def _aget(self, execution: int, channel: int | None, take: Callable[[], None]) -> Any:
        result = self._checked(execution)
        if not result._done:
            await _core.wait_in_loop(_core.get(), result)
        for entry in list(result.values.values()):
            await entry.aload()
        take()
        return self._value(execution, channel, result)

    def _checked(self, execution: int) -> _Result:
        with self._lock:
            result = self._results[execution]
            buffered = [n for n, r in self._results.items() if n < execution and r.left]
            if execution > self._got and len(buffered) >= self._most_buffered:
                raise exceptions.RayCgraphCapacityExceeded(
                    f"The compiled graph can't have more than {self._most_buffered} buffered results, and you "
                    f"currently have {len(buffered)} buffered results. Call `ray.get()` on CompiledDAGRef's (or await "
                    "on CompiledDAGFuture's) to retrieve results, or increase `_max_buffered_results` if buffering is "
                    "desired, note that this will increase driver memory usage."
                )
            return result

    def _value(self, execution: int, channel: int | None, result: _Result) -> Any:
        self._dropped(execution, channel)
        with self._lock:
            self._got = max(self._got, execution)
        error = result.error()
        if error is not None:
            raise _objects.as_raised(_serialize.loads(error.body))
        found = result.values[channel or 0]
        found.load()
        return _serialize.loads(found.body)

    def _dropped(self, execution: int, channel: int | None) -> None:
        """Forgets a result that was taken, or whose reference was dropped."""
        with self._lock:
            result = self._results.get(execution)
            if result is not None:
                result.left.discard(channel or 0)
                self._forget(execution, result)


def _taker(graph: weakref.ref[CompiledDAG], execution: int) -> Callable[[Any, BaseException | None], None]:
    """Returns what takes the results of an actor. The end of an actor is told by the answer of its part."""

    def done(items: Any, error: BaseException | None) -> None:
        found = graph()
        if found is not None and error is None:
            found._arrived(execution, items)

    return done


def _watch(graph: weakref.ref[CompiledDAG], actor: str) -> Callable[[Any, BaseException | None], None]:
    """Returns what takes the end of an actor's part."""

    def done(_: object, error: BaseException | None) -> None:
        found = graph()
        if found is not None:
            found._lost(actor, error)

    return done


def _end(name: str, processes: list[str]) -> None:
    for process in processes:
        _peers.peer(process).notify("end_graph", name)


def _process_here(_: object) -> str:
    return _state.require().process
