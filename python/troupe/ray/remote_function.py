"""Remote functions: tasks that run on leased workers."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from .. import _errors
from . import _context, _generators, _infeasible, _objects, _options, _peers, _serialize, _state, exceptions
from ._objects import ERROR, LENT, Entry, ObjectRef
from ._serialize import Frame
from .actor import check_arguments, dependencies, module_of, split_arguments
from .util.placement_group import check_fits

_MOST_REQUESTS = 64  # lease requests of one shape that a process has pending at once
_AGAIN = 1 << 20  # bytes of arguments up to which a task can be run again when its result is lost
_RETRIES = 3  # default number of retries of a task whose worker died


class RemoteFunction:
    """A decorated function; .remote(…) runs it on a worker."""

    __name__: str

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        _options.check_task(options)
        _check_streams(function, options)
        if inspect.iscoroutinefunction(function):
            raise ValueError(
                "'async def' should not be used for remote tasks. You can wrap the async function with "
                "`asyncio.run(f())`."
            )
        self._function = function
        self._default_options = dict(options)
        qualified = getattr(function, "__qualname__", getattr(function, "__name__", "function"))
        self._descriptor = f"{module_of(function)}.{qualified}"
        self._function_name = f"{getattr(function, '__module__', '')}.{qualified}"
        self._pickled: tuple[bytes, bytes] | None = None
        try:
            self._signature: Any = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"Remote functions cannot be called directly. Instead of running '{self._function_name}()', try "
            f"'{self._function_name}.remote()'."
        )

    def remote(self, *args: object, **kwargs: object) -> Any:
        return self._remote(args, kwargs)

    def options(self, **options: object) -> RemoteFunction:
        """Returns this function with some options overridden."""
        _options.check_task(options)
        _check_streams(self._function, options)
        changed = RemoteFunction(self._function, {**self._default_options, **options})
        changed._pickled = self._pickled
        changed._origin = getattr(self, "_origin", self)  # type: ignore[attr-defined]
        return changed

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the node of a call in a graph."""
        from .dag._nodes import FunctionNode

        return FunctionNode(self, args, kwargs)

    def _remote(
        self, args: Sequence[object] | None = None, kwargs: Mapping[str, object] | None = None, **options: object
    ) -> object:
        args, kwargs = tuple(args or ()), kwargs or {}
        given = {**self._default_options, **options}
        state = _state.require()
        check_arguments(self._signature, self._function_name, args, kwargs)
        digest, pickled = self._code()
        frame, contents, refs = split_arguments(self._descriptor, args, kwargs)
        count = _options.returns_of(given.get("num_returns"), self._function)
        task_id = os.urandom(24).hex()
        limit = max(given.get("_generator_backpressure_num_objects") or 0, 0)
        entries = (
            [state.store.new(task_id, i + 1) for i in range(max(count, 1))]
            if count >= 0
            else [_generators.Stream(state.store, task_id, limit)]
        )
        parent_task = _context.current.get()
        parent = parent_task.placement if parent_task is not None and parent_task.placement else state.placement_group
        strategy = _options.strategy(given, parent)
        check_fits(strategy, _options.demand(given, 1.0), self.__name__)
        task = Task(
            task_id,
            self._descriptor,
            given.get("name") or self.__name__,
            digest,
            pickled,
            frame,
            contents,
            refs,
            entries,
            count,
        )
        task.limit = limit
        task.demand = _options.demand(given, 1.0)
        task.strategy = strategy
        task.env = _options.merged(state.runtime_env, _options.environment(given.get("runtime_env")))
        task.captures = _options.membership(strategy)
        retries = given.get("max_retries")
        task.retries = _RETRIES if retries is None else (1 << 30 if retries < 0 else retries)
        task.once = given["max_calls"] == 1 if given.get("max_calls") is not None else task.demand.get("GPU", 0) > 0
        task.retried = _options.exceptions_to_wire(given.get("retry_exceptions"))
        if parent_task is not None:
            parent_task.children.add(entries[0])
        found = [ObjectRef(e) for e in entries]
        for entry in entries:
            entry.call = task
        submitter_of(state).submit(task)
        if isinstance(entries[0], _generators.Stream):
            return _generators.result_of(entries[0], count)
        if count == 0:
            return None
        return found[0] if count == 1 else found

    def _code(self) -> tuple[bytes, bytes]:
        origin = getattr(self, "_origin", self)
        if origin._pickled is None:
            try:
                pickled = cloudpickle.dumps(self._function, protocol=5)
            except TypeError:
                from .util.check_serialize import could_not_serialize

                raise could_not_serialize(f"the function {self._descriptor}", self._function) from None
            origin._pickled = (hashlib.sha256(pickled).digest(), pickled)
        return origin._pickled

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteFunction, (self._function, self._default_options)


def _check_streams(function: object, options: Mapping[str, object]) -> None:
    if options.get("num_returns") == "streaming" and not _options.is_generator(function):
        raise ValueError(
            "num_returns='streaming' can only be used with generator functions (functions that use 'yield'). "
            "The decorated function is not a generator function."
        )


class Task:
    """A task that is waiting or running."""

    def __init__(
        self,
        id: str,
        function: str,
        name: str,
        digest: bytes,
        pickled: bytes,
        frame: Frame,
        contents: object,
        refs: list[ObjectRef],
        entries: list[Entry],
        returns: int,
    ) -> None:
        self.id = id
        self.function, self.name, self.digest, self.pickled = function, name, digest, pickled
        self.frame, self.contents, self.refs, self.entries, self.returns = frame, contents, refs, entries, returns
        self.limit = 0  # objects that a generator is ahead of its consumer; 0: any number
        self.demand: dict[str, float] = {}
        self.strategy: Any = None
        self.env: dict[str, Any] = {}
        self.captures: Any = None
        self.retries = 0
        self.retried: Any = None  # the exceptions that are retried
        self.once = False  # whether the worker process ends after this task, which frees its devices
        self.cancelled = False
        self.worker: Any = None  # the Troupe handle of the worker that runs the task
        self.shape = ""

    def fail(self, frame: Frame) -> None:
        _objects.fail(self.entries, frame)

    def fail_with(self, error: BaseException) -> None:
        self.fail(_objects._dump_error(error))

    def can_run_again(self) -> bool:
        """Returns whether the task may run again if its result is lost. Large arguments are not kept for that."""
        return self.retries > 0 and not self.cancelled and _serialize.size(self.frame) < _AGAIN

    def run_again(self, entry: Entry) -> bool:
        """Computes a lost result again. Returns False if the session has ended."""
        state = _state.current()
        if state is None:
            return False
        self.retries -= 1
        self.entries = [entry]
        entry.call = self
        submitter_of(state).submit(self)
        return True

    def cancel(self, force: bool, recursive: bool) -> None:
        self.cancelled = True
        state = _state.current()
        if state is not None and submitter_of(state).withdraw(self):
            self.fail_with(exceptions.TaskCancelledError(self.id))
            return
        worker = self.worker
        if worker is not None:
            try:
                worker["cancel_call"].remote(self.id, force, recursive)
            except _errors.Error:
                pass


class Submitter:
    """The tasks of this process. Each waits for its dependencies, then for a leased worker of its shape."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self._lock = threading.RLock()
        self._ready: dict[str, deque[Task]] = {}  # tasks without missing dependencies, by shape
        self._requests: dict[str, dict[str, None]] = {}  # pending lease requests, by shape
        self._blocked: set[Task] = set()  # tasks that wait for dependencies

    def submit(self, task: Task) -> None:
        task.shape = json.dumps([task.demand, task.strategy, task.env, task.captures], sort_keys=True)
        with self._lock:
            self._blocked.add(task)
        self._when_ready(task)

    def _when_ready(self, task: Task) -> None:
        for ref in task.refs:
            entry = ref._entry
            _objects.start_fetch(entry)
            if not entry._done:
                entry.on_done(lambda: self._when_ready(task))
                return
            if entry.kind == ERROR:
                with self._lock:
                    self._blocked.discard(task)
                task.fail(entry.error_frame())
                return
        with self._lock:
            if task not in self._blocked:
                return
            self._blocked.discard(task)
            self._ready.setdefault(task.shape, deque()).append(task)
        self._request(task)

    def _request(self, task: Task) -> None:
        """Requests another lease if there are more ready tasks than pending requests."""
        with self._lock:
            requests = self._requests.setdefault(task.shape, {})
            if len(requests) >= min(len(self._ready.get(task.shape, ())), _MOST_REQUESTS):
                return
            lease = os.urandom(14).hex()
            requests[lease] = None
        _infeasible.note(self.state)
        self.state.control.ask(
            "lease",
            (lease, self.state.job_id, task.demand, task.strategy, task.env),
            lambda found, error: self._leased(task, lease, found, error),
        )

    def withdraw(self, task: Task) -> bool:
        """Removes a task that has not been sent. Returns whether it was found."""
        with self._lock:
            if task in self._blocked:
                self._blocked.discard(task)
                return True
            queue = self._ready.get(task.shape)
            if queue is None or task not in queue:
                return False
            queue.remove(task)
            requests = self._requests.get(task.shape, {})
            surplus = list(requests)[len(queue) :]
        for lease in surplus:
            self.state.control.notify("cancel_lease", lease)
        return True

    def _leased(self, sample: Task, lease: str, found: Any, error: BaseException | None) -> None:
        with self._lock:
            self._requests.get(sample.shape, {}).pop(lease, None)
        if error is not None or "error" in found or "cancelled" in found:
            if found is not None and found.get("cancelled"):
                self._retry_requests(sample)
                return
            task = self._next(sample.shape)
            if task is not None:
                text = str(error) if error is not None else found["error"]
                if error is None and "unschedulable" in found:
                    task.fail(_objects.cause_frame({"kind": found["unschedulable"], "text": found["error"]}))
                elif task.retries > 0 and _state.current() is self.state:  # the node may have died
                    task.retries -= 1
                    with self._lock:
                        self._ready.setdefault(task.shape, deque()).appendleft(task)
                    self._request(task)
                else:
                    task.fail_with(exceptions.WorkerCrashedError(f"The task could not be started: {text}"))
            return
        _peers.peer(found["role"]).with_handle(
            lambda handle, error: self._run_next(sample, lease, found, handle, error)
        )

    def _retry_requests(self, sample: Task) -> None:
        with self._lock:
            waiting = bool(self._ready.get(sample.shape))
        if waiting:
            self._request(sample)

    def _next(self, shape: str) -> Task | None:
        with self._lock:
            queue = self._ready.get(shape)
            return queue.popleft() if queue else None

    def _run_next(
        self, sample: Task, lease: str, found: dict[str, Any], handle: Any, error: BaseException | None
    ) -> None:
        """Sends the next task to a leased worker, or ends the lease if there is no task."""
        if error is not None:
            self.state.control.notify("end_lease", lease)
            self._retry_requests(sample)
            return
        task = self._next(sample.shape)
        if task is None:
            self.state.control.notify("end_lease", lease)
            return
        extra = {
            "digest": task.digest,
            "function": task.pickled,
            "lease": lease,
            "devices": found["devices"],
            "name": task.name,
            "demand": task.demand,
            "placement": task.captures,
        }
        if task.returns < 0:
            extra["stream"] = [self.state.process, task.limit]
        task.worker = handle
        try:
            future = handle["call"].remote(
                task.id, task.function, task.frame, dependencies(task.refs), task.returns, extra
            )
        except _errors.Error as err:
            self._lost(task, lease, err)
            return
        _objects.when_answered(future, lambda read: self._answered(task, lease, found, handle, read))
        _objects.sent()

    def _answered(
        self,
        task: Task,
        lease: str,
        found: dict[str, Any],
        handle: Any,
        read: Callable[[], tuple[int, Any, Any]],
    ) -> None:
        try:
            kind, answer, ref = read()
        except _errors.Error as err:
            self._lost(task, lease, err)
            return
        task.worker = None
        if kind == ERROR and task.retries > 0 and not task.cancelled and _options.is_retried(answer, task.retried):
            task.retries -= 1
            with self._lock:
                self._ready.setdefault(task.shape, deque()).appendleft(task)
            self._run_next(task, lease, found, handle, None)
            return
        if kind == ERROR:
            task.fail(answer)
        else:
            _objects.set_results(task.entries, kind, answer, ref)
        if kind == LENT and task.can_run_again():
            task.entries.pop().producer = task
        else:
            self.state.store.linger(task.contents)
            task.contents, task.refs, task.frame = None, [], []
        if task.once:
            self.state.control.notify("end_lease", lease, True)
            self._retry_requests(task)
            return
        self._run_next(task, lease, found, handle, None)

    def _lost(self, task: Task, lease: str, err: _errors.Error) -> None:
        """Handles the death of a task's worker: retries the task if retries are left. The control service may not know
        yet that the process is dead, and must not give it to the next task."""
        self.state.control.notify("end_lease", lease, True)
        task.worker = None
        if task.cancelled:
            task.fail_with(exceptions.TaskCancelledError(task.id))
        elif task.retries > 0 and _state.current() is self.state:
            task.retries -= 1
            with self._lock:
                self._ready.setdefault(task.shape, deque()).appendleft(task)
            self._request(task)
        else:
            task.fail_with(
                exceptions.WorkerCrashedError(f"The worker died unexpectedly while executing this task: {err}")
            )


_submitters: dict[int, Submitter] = {}
_lock = threading.Lock()


def submitter_of(state: object) -> Submitter:
    with _lock:
        found = _submitters.get(id(state))
        if found is None or found.state is not state:
            _submitters.clear()
            found = _submitters[id(state)] = Submitter(state)
        return found


def waiting_tasks() -> list[tuple[str, str, str, str]]:
    """Returns the tasks of this process that wait for arguments, or for a worker, as util.state shows them."""
    state = _state.current()
    if state is None:
        return []
    submitter = submitter_of(state)
    with submitter._lock:
        blocked = [(t.id, t.function, "PENDING_ARGS_AVAIL", "") for t in submitter._blocked]
        return blocked + [
            (t.id, t.function, "PENDING_NODE_ASSIGNMENT", "") for queue in submitter._ready.values() for t in queue
        ]
