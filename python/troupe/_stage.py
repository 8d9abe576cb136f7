"""Declarations of streams and stages in code, and stages that are plain functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from . import _call, _errors
from ._cluster import Cluster
from ._future import Waitable
from ._item import Item
from ._register import register


class Stream(dict[str, Any]):
    """Declares a durable, bounded stream of a pipeline, with the fields of a pipeline file. Omitted fields have their
    defaults.

    - items, bytes, age: bounds of the unfinished items. Items older than age (seconds) are dropped.
    - full: what a put does when the stream is full.
    - priorities: number of priorities; the largest is served first.
    - sink: the stream is read from outside, with take.
    """

    def __init__(
        self,
        *,
        items: int | None = None,
        bytes: int | str | None = None,
        age: float | str | None = None,
        full: Literal["block", "refuse", "drop_oldest"] | None = None,
        priorities: int | None = None,
        sink: bool | None = None,
    ) -> None:
        super().__init__(_given(items=items, bytes=bytes, age=age, full=full, priorities=priorities, sink=sink))


class Stage(dict[str, Any]):
    """Declares a stage of a pipeline: its workers, inputs and outputs.

    work is a cluster, or its name, with the method that takes the items; or a plain function, which runs in this
    process, `workers` items at once, each on a thread. An async function runs on an event loop of the pipeline. The
    other fields are those of a pipeline file (docs/pipelines.md): group={"first": 6, "every": 30}, stale={"bound": 1.5,
    "then": "drop"}. Times are in seconds.
    """

    def __init__(
        self,
        work: Cluster | str | Callable[..., Any],
        method: str | None = None,
        *,
        in_: str | Sequence[str],
        out: str | Sequence[str] = (),
        style: Literal["body", "item"] | None = None,
        workers: int | None = None,
        in_flight: int | None = None,
        timeout: float | str | None = None,
        order: Literal["key", "none"] | None = None,
        sticky: bool | None = None,
        group: Mapping[str, object] | None = None,
        stale: Mapping[str, object] | None = None,
        stamp: bool | None = None,
        advance: float | None = None,
        failures: int | None = None,
        losses: int | None = None,
        backoff: float | str | None = None,
        rounds: int | None = None,
        abort: str | None = None,
    ) -> None:
        by = {"role": work} if isinstance(work, (Cluster, str)) else {"function": work}
        if isinstance(work, Cluster):
            for name in (method, abort):
                work._check_method("Stage", name)
        super().__init__(
            **{"in": in_},
            **_given(
                **by,
                method=method,
                out=out or None,
                style=style,
                workers=workers,
                in_flight=in_flight,
                timeout=timeout,
                order=order,
                sticky=sticky,
                group=group,
                stale=stale,
                stamp=stamp,
                advance=advance,
                failures=failures,
                losses=losses,
                backoff=backoff,
                rounds=rounds,
                abort=abort,
            ),
        )


def _given(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


# How a function is called. A role that runs a function has methods with these names.
ITEM, VALUE, LAST = "call_item", "call", "call_last"


def manner(fields: Mapping[str, object]) -> str:
    """Returns how a stage with these fields calls its function."""
    if fields.get("style") == "item":
        return ITEM
    return VALUE if fields.get("out") else LAST


def argument(manner: str, given: Any) -> object:
    """Returns the argument of a function for an item or a list of items."""
    if manner == ITEM:
        return given
    return [item.value for item in given] if isinstance(given, list) else given.value


def result(manner: str, value: object) -> object:
    """Converts a function's result to that of a method with style="item"."""
    if manner == ITEM or isinstance(value, Item):
        return value
    return None if manner == LAST or value is None else Item(value)


def is_async(work: Callable[..., object]) -> bool:
    import inspect

    return inspect.iscoroutinefunction(work) or inspect.iscoroutinefunction(type(work).__call__)


def _token() -> int:
    call = _call.current.get()
    assert call is not None  # a method of a worker is running
    return call[1]


def _ids(given: Any) -> Iterable[str]:
    return [item.id for item in given] if isinstance(given, list) else [given.id]


class Function:
    """A worker that runs a function, in a role declared by a file."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self._running: dict[str, int] = {}  # by item id, the token of the call that processes it

    def call(self, given: object) -> object:
        return self._run(VALUE, given)

    def call_item(self, given: object) -> object:
        return self._run(ITEM, given)

    def call_last(self, given: object) -> object:
        return self._run(LAST, given)

    def _run(self, manner: str, given: object) -> object:
        token = _token()
        self._running.update(dict.fromkeys(_ids(given), token))
        try:
            value = self._work(argument(manner, given))
            return result(manner, value.result() if isinstance(value, Waitable) else value)
        finally:
            for id in _ids(given):
                self._running.pop(id, None)
            _call.aborted.discard(token)

    @register(lane="control")
    def abort(self, id: str) -> None:
        """Marks the call of an item as cancelled. The function may return a partial result."""
        token = self._running.get(id)
        if token is None:
            raise _errors.NotFoundError(f"item {id} is not in hand here")
        _call.aborted.add(token)


class AsyncFunction:
    """A worker that runs an async function. Aborting an item cancels its task, which may return a partial result."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self._running: dict[str, Any] = {}

    async def call(self, given: object) -> object:
        return await self._run(VALUE, given)

    async def call_item(self, given: object) -> object:
        return await self._run(ITEM, given)

    async def call_last(self, given: object) -> object:
        return await self._run(LAST, given)

    async def _run(self, manner: str, given: object) -> object:
        import asyncio

        task = asyncio.ensure_future(self._work(argument(manner, given)))
        self._running.update(dict.fromkeys(_ids(given), task))
        try:
            return result(manner, await task)
        finally:
            for id in _ids(given):
                self._running.pop(id, None)

    @register(lane="control")
    async def abort(self, id: str) -> None:
        task = self._running.get(id)
        if task is None:
            raise _errors.NotFoundError(f"item {id} is not in hand here")
        task.get_loop().call_soon(
            task.cancel
        )  # after its first step: a task that has not started could not return a partial result


def host(work: object) -> Function | AsyncFunction:
    """Returns the worker object for a function."""
    if isinstance(work, type) or not callable(work):
        raise _errors.RefusedError(
            f"{work!r} is no function; a role of a class is declared with python: package.module.Class"
        )
    return AsyncFunction(work) if is_async(work) else Function(work)
