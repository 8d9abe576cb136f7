"""The steps of compiled graphs in the process of an actor, and the values that go from process to process.

Each actor of a graph has a Part: a thread that runs its steps, one execution after the other. A value is sent once to
each process that takes it, straight from the one that made it. The driver's message with the input of an execution also
asks for the results that the process makes, and its answer has them. The driver bounds how many executions are under
way, and so the values that wait in all processes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _context, _objects, _peers, _serialize, _state, _task_error, exceptions
from ._objects import ERROR, SHARED, VALUE, Entry

_DRIVER_CHECK = 10.0  # seconds without values after which an actor asks whether the driver is alive

Item = Sequence[Any]  # a value in a message: its key, and the kind and the body of its entry


class Closed(Exception):
    """The graph has ended."""


def failed(error: BaseException) -> Entry:
    entry = Entry("", "")
    entry.set(ERROR, _objects._dump_error(error), ())
    return entry


def made(value: object, is_shared: bool) -> Entry:
    """Returns a value as it is sent. is_shared: several processes take it, so that it is stored once if it is large."""
    entry: Entry = _state.require().store.new()
    frame, contents = _serialize.dumps(value, keeps_tensors=True)
    entry.set(VALUE, frame, contents)
    if is_shared:
        entry.share()
    return entry


def items_of(values: Mapping[str, Entry]) -> list[Item]:
    """Returns values as a message has them."""
    return [
        [key, e.kind, e.body] if e.value_ref is None else [key, SHARED, [e.id, e.owner, e.value_ref]]
        for key, e in values.items()
    ]


def arrived(kind: int, body: Any) -> Entry:
    """Returns the entry of a value from a message."""
    if kind == SHARED:
        found: Entry = _state.require().store.argument(*body, False)
        return found
    entry = Entry("", "")
    entry.set(kind, body)
    return entry


def send(
    process: str, name: str, execution: int, values: Mapping[str, Entry], asks: bool, done: Callable[..., None]
) -> None:
    """Sends values to a process; done(results, error) follows. asks: for the results that the process makes."""

    def answered(items: object, error: BaseException | None) -> None:
        values.items()  # they are kept until the receiver has them
        done(items, error)

    _peers.peer(process).ask("graph_values", (name, execution, items_of(values), asks), answered, beside=not asks)
    if asks:
        _objects.sent()


class _Step:
    """A step as an actor's process has it: the constant arguments are loaded once."""

    def __init__(self, method: str, outputs: list[str], frame: Any, slots: Mapping[int, str]) -> None:
        self.method, self.outputs, self.slots = method, outputs, slots
        self.args, self.kwargs = _serialize.loads(frame)


class _Answer:
    """The answer to the driver's message of an execution: the results that this process makes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.missing, self.values = set(keys), dict[str, Entry]()
        self.answer: concurrent.futures.Future[list[Item]] = concurrent.futures.Future()
        self.is_asked = False  # whether the message has come

    def add(self, key: str, entry: Entry) -> None:
        """Adds a result. The answer follows the last one, or an error at once."""
        self.values[key] = entry
        self.missing.discard(key)
        if not self.answer.done() and (not self.missing or entry.kind == ERROR):
            self.answer.set_result(items_of(self.values))


class Part:
    """The steps of this process in a graph."""

    def __init__(
        self,
        host: Any,
        name: str,
        driver: str,
        steps: Sequence[Any],
        readers: Mapping[str, list[str]],
        results: Sequence[str],
    ) -> None:
        self._host, self._name, self._driver = host, name, driver
        self._steps = [_Step(*fields) for fields in steps]
        self._readers = readers  # by key: the other actors' processes that take the value
        self._results = results  # the keys that the driver takes
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._changed = threading.Condition()  # guards the fields below
        self._values: dict[int, dict[str, Entry]] = {}  # by execution: those that arrived
        self._answers: dict[int, _Answer] = {}
        self._over = -1  # the last execution that is over
        self._closed = False
        threading.Thread(target=self._run, daemon=True, name=f"ray-graph-{name[:8]}").start()

    def deliver(self, execution: int, items: Sequence[Item], asks: bool) -> object:
        """Takes values. asks: returns a future of the results."""
        with self._changed:
            if self._closed:
                raise exceptions.RayChannelError("Channel closed.")
            if items:
                self._values.setdefault(execution, {}).update((key, arrived(kind, body)) for key, kind, body in items)
                self._changed.notify_all()
            if not asks:
                return None
            answer = self._answer(execution)
            answer.is_asked = True
            self._forget(execution)
            return answer.answer

    def _answer(self, execution: int) -> _Answer:
        return self._answers.setdefault(execution, _Answer(self._results))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            answers, self._answers = self._answers, {}
            self._changed.notify_all()
        for answer in answers.values():
            if not answer.answer.done():
                answer.answer.set_exception(exceptions.RayChannelError("Channel closed."))

    def _run(self) -> None:
        try:
            for execution in itertools.count():
                self._execute(execution)
        except Closed:
            self.ended.set_result(None)
        except BaseException as err:
            self.ended.set_exception(err)

    def _execute(self, execution: int) -> None:
        values: dict[str, Any] = {}  # by key: those taken or made, as objects, or the Entry of an error
        for step in self._steps:
            for key in step.slots.values():
                if key not in values:
                    values[key] = _loaded(self._take(execution, key))
            outputs = self._outputs(step, values)
            values.update(zip(step.outputs, outputs, strict=True))
            self._give(execution, step, outputs)
        with self._changed:
            self._over = execution
            self._forget(execution)

    def _forget(self, execution: int) -> None:
        """Drops what is left of an execution, if it is over; the caller holds the lock."""
        if execution > self._over:
            return
        self._values.pop(execution, None)
        if execution in self._answers and self._answers[execution].is_asked:
            del self._answers[execution]

    def _take(self, execution: int, key: str) -> Entry:
        """Waits for a value."""
        checked = time.monotonic()
        with self._changed:
            while key not in self._values.get(execution, ()):
                if self._closed:
                    raise Closed
                if not self._changed.wait(_DRIVER_CHECK) and time.monotonic() - checked >= _DRIVER_CHECK:
                    checked = time.monotonic()
                    _peers.peer(self._driver).ask("owns", (), self._driver_answered)
            return self._values[execution][key]

    def _driver_answered(self, _: object, error: BaseException | None) -> None:
        if error is not None:
            self.close()

    def _outputs(self, step: _Step, values: Mapping[str, Any]) -> list[Any]:
        """Runs a step. The error of an argument, or of the step, is that of all its outputs."""
        error = next((v for k in step.slots.values() if isinstance(v := values[k], Entry)), None)
        if error is not None:
            return [error] * len(step.outputs)
        service = self._host.service
        title = f"{service.class_name}.{step.method}"
        args = [values[step.slots[i]] if i in step.slots else a for i, a in enumerate(step.args)]
        mark = _context.current.set(_context.Task(_state.require().store.task_id(), title, step.method))
        try:
            value = service.method_of(step.method)(*args, **step.kwargs)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            if len(step.outputs) == 1:
                return [value]
            if len(value) != len(step.outputs):
                raise ValueError(f"Expected {len(step.outputs)} outputs, but got {len(value)} outputs")
            return list(value)
        except Exception as err:
            return [failed(_task_error.wrap(title, err, self._host.state))] * len(step.outputs)
        finally:
            _context.current.reset(mark)

    def _give(self, execution: int, step: _Step, outputs: Sequence[Any]) -> None:
        """Sends the outputs of a step to the actors that take them, and answers the driver."""
        outgoing: dict[str, dict[str, Entry]] = {}  # by process
        for key, value in zip(step.outputs, outputs, strict=True):
            readers, is_result = self._readers.get(key, ()), key in self._results
            if not readers and not is_result:
                continue
            entry = value if isinstance(value, Entry) else self._made_of(step, value, len(readers) + is_result > 1)
            for process in readers:
                outgoing.setdefault(process, {})[key] = entry
            if is_result:
                with self._changed:
                    answer = self._answer(execution)
                answer.add(key, entry)
        for process, values in outgoing.items():
            send(process, self._name, execution, values, False, _ignore)

    def _made_of(self, step: _Step, value: object, is_shared: bool) -> Entry:
        try:
            return made(value, is_shared)
        except Exception as err:  # it cannot be pickled
            return failed(_task_error.wrap(step.method, err, self._host.state))


def _ignore(_: object, error: BaseException | None) -> None:
    """Ignores that an actor which takes values is gone: the driver hears of its end by itself, and ends the graph."""


def _loaded(entry: Entry) -> Any:
    entry.load()
    return entry if entry.kind == ERROR else _serialize.loads(entry.body)


_parts: dict[str, Part] = {}  # by the graph's name


def start(host: Any, name: str, *fields: Any) -> object:
    """Starts the part of this process in a graph; the answer comes when it ends."""
    part = _parts[name] = Part(host, name, *fields)
    return part.ended


def deliver(name: str, execution: int, items: Sequence[Item], asks: bool) -> object:
    """Takes values of an execution. asks: answers with the results, once they are made."""
    part = _parts.get(name)
    if part is None:
        raise exceptions.RayChannelError("Channel closed.")
    return part.deliver(execution, items, asks)


def end(name: str) -> None:
    part = _parts.pop(name, None)
    if part is not None:
        part.close()
