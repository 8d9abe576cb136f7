"""Single workers: actor, and Queue, which is built on one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from . import _check, _codec, _core, _errors, _introspection
from ._cluster import Cluster, W, WorkerHandle
from ._config import WorkerConfig
from ._resources import BundleOf, Reservation


def actor(
    cls: type[W] | str,
    *args: object,
    name: str | None = None,
    get_if_exists: bool = False,
    replace: bool = False,
    max_concurrency: int = 1000,
    node: str = "",
    env: dict[str, str] | None = None,
    detached: bool = False,
    num_gpus: float = 0,
    num_cpus: float = 0,
    memory: int | str = 0,
    resources: Mapping[str, float] | None = None,
    reservation: Reservation | None = None,
    bundle: int | None = None,
    policy: str = "",
    restarts: int = 0,
    background: bool = False,
    output: str = "",
    own_variables: bool = False,
    **kwargs: object,
) -> WorkerHandle[W]:
    """Starts one worker and returns its handle. Arguments that are not settings go to the class's constructor.

    - name: makes the actor unique in the namespace. With get_if_exists, an existing actor of that name is returned;
      with replace, it ends first.
    - num_gpus, num_cpus, memory, resources: what the worker reserves; by default nothing. num_gpus=0.5 is a share of a
      device.
    - reservation, bundle: take the resources from a bundle of a reservation; all of the bundle if nothing is requested.
      Without bundle, any bundle with room is used.
    - node: the node to run on.
    - max_concurrency: calls that an async actor runs at once.
    - env: environment variables.
    - detached: the actor outlives its driver.
    - policy, restarts, own_variables: as in WorkerConfig.
    - background: return before the process has started. Calls wait for the start, and raise the error if the
      constructor failed.
    - output: which output of the worker this process shows, as in init.
    """
    return create(
        cls,
        args,
        kwargs,
        name=name,
        get_if_exists=get_if_exists,
        replace=replace,
        max_concurrency=max_concurrency,
        node=node,
        env=env,
        detached=detached,
        num_gpus=num_gpus,
        num_cpus=num_cpus,
        memory=memory,
        resources=resources,
        reservation=reservation,
        bundle=bundle,
        policy=policy,
        restarts=restarts,
        background=background,
        output=output,
        own_variables=own_variables,
    )


def create(
    cls: type[W] | str,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    *,
    name: str | None = None,
    get_if_exists: bool = False,
    max_concurrency: int = 1000,
    node: str = "",
    env: dict[str, str] | None = None,
    detached: bool = False,
    num_gpus: float = 0,
    num_cpus: float = 0,
    memory: int | str = 0,
    resources: Mapping[str, float] | None = None,
    reservation: Reservation | None = None,
    bundle: int | None = None,
    policy: str = "",
    restarts: int = 0,
    background: bool = False,
    output: str = "",
    own_variables: bool = False,
    replace: bool = False,
) -> WorkerHandle[W]:
    """Starts an actor as `actor` does, with the constructor's arguments passed separately, so that none can be mistaken
    for a setting."""
    if get_if_exists and replace:
        raise _errors.InvalidError(
            "get_if_exists=True keeps an actor of that name, and replace=True ends it: give one of them"
        )
    if name is not None and get_if_exists:
        found = _existing(name)
        if found is not None:
            return found
    config = WorkerConfig(
        name=name or "",
        world_size=1,
        max_concurrency=max_concurrency,
        env=env,
        detached=detached,
        num_gpus_per_worker=num_gpus,
        num_cpus_per_worker=num_cpus,
        memory_per_worker=memory,
        resources_per_worker=resources,
        policy=policy,
        restarts=restarts,
        output=output,
        own_variables=own_variables,
    )
    if bundle is not None and reservation is None:
        raise _errors.InvalidError(f"bundle={bundle!r} is the index of a bundle of a reservation, and none is given")
    manager = None if reservation is None else BundleOf(reservation, bundle)
    role = name or f"actor-{_unique()}"
    try:
        cluster = Cluster(
            role,
            cls,
            manager,
            config,
            worker_args=args,
            worker_kwargs=kwargs,
            node=node,
            background=background,
            replace=replace,
        )
    except _errors.ExistsError:
        if not get_if_exists:
            raise
        found = _existing(role, patience=30.0)  # another process was faster
        if found is None:
            raise
        return found
    return cluster.workers[0]


def _existing(name: str, patience: float = 0.0) -> WorkerHandle | None:
    """Returns the actor of that name, or None. Waits up to `patience` seconds if another process is starting it."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return Cluster.attach(name).workers[0]
        except _errors.NotFoundError:
            return None
        except _errors.RefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _unique() -> str:
    return os.urandom(6).hex()


class _QueueWorker:
    """The worker behind a Queue. It is async, so that a waiting get does not block a put."""

    def __init__(self, maxsize: int) -> None:
        import asyncio

        self._items: asyncio.Queue[Any] = asyncio.Queue(maxsize)
        self._closed = asyncio.Event()

    async def put(self, item: object, timeout: float | None) -> bool:
        return await self._or_closed(self._items.put(item), timeout) is not _MISSED

    async def get(self, timeout: float | None) -> tuple[bool, object]:
        item = await self._or_closed(self._items.get(), timeout, self._items)
        return (item is not _MISSED, None if item is _MISSED else item)

    async def qsize(self) -> int:
        return self._items.qsize()

    async def shut(self) -> None:
        self._closed.set()

    async def _or_closed(self, doing: Any, timeout: float | None, items: Any = None) -> object:
        """Runs an operation unless the queue is closed first. Items in a closed queue can still be taken."""
        import asyncio

        if self._closed.is_set() and (items is None or items.empty()):
            doing.close()
            raise _errors.ClosedError("the queue is closed")
        task, closed = asyncio.ensure_future(doing), asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait([task, closed], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if closed.done():
                raise _errors.ClosedError("the queue is closed")
            return _MISSED
        finally:
            closed.cancel()
            if not task.done():
                task.cancel()


_MISSED = object()


class Queue(_introspection.PublicNames, _codec.Walked):
    """A bounded queue shared by drivers and workers. It can be passed as an argument of calls. maxsize=0 means no
    bound."""

    def __init__(self, maxsize: int = 0, *, name: str | None = None) -> None:
        self._actor = actor(_QueueWorker, maxsize, name=name)

    @classmethod
    def _of(cls, handle: WorkerHandle) -> Queue:
        queue = cls.__new__(cls)
        queue._actor = handle
        return queue

    def put(self, item: object, timeout: float | None = None) -> None:
        """Puts an item into the queue, and waits while the queue is full. Raises TimedOutError after timeout
        seconds."""
        _check.seconds("timeout", timeout, zero=True)
        _core.warn_in_serving_loop("`await queue.aput(…)`")
        if not self._actor.put(item, timeout):
            raise _errors.TimedOutError(f"the queue was full for {timeout} s")

    def get(self, timeout: float | None = None) -> object:
        """Takes an item out of the queue, and waits while the queue is empty. Raises TimedOutError after timeout
        seconds."""
        _check.seconds("timeout", timeout, zero=True)
        _core.warn_in_serving_loop("`await queue.aget(…)`")
        there, item = self._actor.get(timeout)
        if not there:
            raise _errors.TimedOutError(f"the queue was empty for {timeout} s")
        return item

    async def aput(self, item: object, timeout: float | None = None) -> None:
        """Puts an item into the queue as put does, in an event loop."""
        if not await self._actor.put.remote(item, timeout):
            raise _errors.TimedOutError(f"the queue was full for {timeout} s")

    async def aget(self, timeout: float | None = None) -> object:
        """Takes an item out of the queue as get does, in an event loop."""
        there, item = await self._actor.get.remote(timeout)
        if not there:
            raise _errors.TimedOutError(f"the queue was empty for {timeout} s")
        return item

    def qsize(self) -> int:
        return int(self._actor.qsize())

    def empty(self) -> bool:
        return self.qsize() == 0

    def close(self) -> None:
        """Rejects new items; items in the queue can still be taken. Callers that wait for more get ClosedError."""
        self._actor.shut()

    def shutdown(self) -> None:
        """Ends the queue's worker and discards its items."""
        self._actor.cluster.shutdown()

    def wire(self) -> tuple[int, object]:
        return _codec.QUEUE, [self._actor]


def _decode_queue(codec: _codec.Codec, value: Any) -> Queue:
    return Queue._of(value[0])


_codec.set_decoder(_codec.QUEUE, _decode_queue)
