"""Single workers: actor, and a queue that is one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from . import _check, _codec, _core, _errors
from ._cluster import Cluster, WorkerHandle
from ._config import WorkerConfig
from ._resources import BundleOf, Reservation


def actor(
    cls: type | str,
    *args: Any,
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
    **kwargs: Any,
) -> WorkerHandle:
    """One worker, without devices unless num_gpus says so (0.5 is a share of one). With a name it is a singleton of the namespace;
    get_if_exists gives the one there is. reservation: it takes what it asks for from a bundle of that, and all of the bundle if it asks
    for nothing; bundle: which one, None: any with room. background: it is returned before its process is up; calls wait for it, and raise what its
    constructor raised. output: what it prints and this process shows, as in init. own_variables: as in WorkerConfig. Other keyword arguments are the constructor's."""
    return create(
        cls, args, kwargs, name=name, get_if_exists=get_if_exists, max_concurrency=max_concurrency, node=node, env=env, detached=detached,
        num_gpus=num_gpus, num_cpus=num_cpus, memory=memory, resources=resources, reservation=reservation, bundle=bundle,
        policy=policy, restarts=restarts, background=background, output=output,
        own_variables=own_variables,
    )  # fmt: skip


def create(
    cls: type | str, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str | None = None, get_if_exists: bool = False,
    max_concurrency: int = 1000, node: str = "", env: dict[str, str] | None = None, detached: bool = False, num_gpus: float = 0,
    num_cpus: float = 0, memory: int | str = 0, resources: Mapping[str, float] | None = None, reservation: Reservation | None = None,
    bundle: int | None = None, policy: str = "", restarts: int = 0, background: bool = False, output: str = "",
    own_variables: bool = False,
) -> WorkerHandle:  # fmt: skip
    """actor with the constructor's arguments apart, so that none can be taken for a setting."""
    if name is not None and get_if_exists:
        found = _existing(name)
        if found is not None:
            return found
    config = WorkerConfig(
        name=name or "", world_size=1, max_concurrency=max_concurrency, env=env, detached=detached,
        num_gpus_per_worker=num_gpus, num_cpus_per_worker=num_cpus, memory_per_worker=memory, resources_per_worker=resources, policy=policy, restarts=restarts, output=output,
        own_variables=own_variables,
    )  # fmt: skip
    if bundle is not None and reservation is None:
        raise _errors.InvalidError(f"bundle={bundle!r} is the index of a bundle of a reservation, and none is given")
    manager = None if reservation is None else BundleOf(reservation, bundle)
    role = name or f"actor-{_unique()}"
    try:
        cluster = Cluster(role, cls, manager, config, worker_args=args, worker_kwargs=kwargs, node=node, background=background)
    except _errors.ExistsError:
        if not get_if_exists:
            raise
        found = _existing(role, patience=30.0)  # another process was faster
        if found is None:
            raise
        return found
    return cluster.workers[0]


def _existing(name: str, patience: float = 0.0) -> WorkerHandle | None:
    """The actor of that name. If another process is starting it, this waits for it."""
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
    """The worker behind a Queue: async, so that a get that waits does not hold up a put."""

    def __init__(self, maxsize: int) -> None:
        import asyncio

        self._items: asyncio.Queue[Any] = asyncio.Queue(maxsize)
        self._closed = asyncio.Event()

    async def put(self, item: Any, timeout: float | None) -> bool:
        return await self._or_closed(self._items.put(item), timeout) is not _MISSED

    async def get(self, timeout: float | None) -> tuple[bool, Any]:
        item = await self._or_closed(self._items.get(), timeout, self._items)
        return (item is not _MISSED, None if item is _MISSED else item)

    async def qsize(self) -> int:
        return self._items.qsize()

    async def shut(self) -> None:
        self._closed.set()

    async def _or_closed(self, doing: Any, timeout: float | None, items: Any = None) -> Any:
        """Does it, unless the queue is closed first; what is in a closed queue can still be had."""
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


class Queue(_codec.Walked):
    """A bounded queue between drivers and workers; it can be an argument of calls."""

    def __init__(self, maxsize: int = 0, *, name: str | None = None) -> None:
        self._actor = actor(_QueueWorker, maxsize, name=name)

    @classmethod
    def _of(cls, handle: WorkerHandle) -> Queue:
        queue = cls.__new__(cls)
        queue._actor = handle
        return queue

    def put(self, item: Any, timeout: float | None = None) -> None:
        """Puts an item in; waits while the queue is full. TimedOutError after the timeout."""
        _check.seconds("timeout", timeout, zero=True)
        _core.warn_in_serving_loop("`await queue.aput(…)`")
        if not self._actor.put(item, timeout):
            raise _errors.TimedOutError(f"the queue was full for {timeout} s")

    def get(self, timeout: float | None = None) -> Any:
        """Takes an item out; waits while there is none. TimedOutError after the timeout."""
        _check.seconds("timeout", timeout, zero=True)
        _core.warn_in_serving_loop("`await queue.aget(…)`")
        there, item = self._actor.get(timeout)
        if not there:
            raise _errors.TimedOutError(f"the queue was empty for {timeout} s")
        return item

    async def aput(self, item: Any, timeout: float | None = None) -> None:
        """put for event loops."""
        if not await self._actor.put.remote(item, timeout):
            raise _errors.TimedOutError(f"the queue was full for {timeout} s")

    async def aget(self, timeout: float | None = None) -> Any:
        """get for event loops."""
        there, item = await self._actor.get.remote(timeout)
        if not there:
            raise _errors.TimedOutError(f"the queue was empty for {timeout} s")
        return item

    def qsize(self) -> int:
        return int(self._actor.qsize())

    def empty(self) -> bool:
        return self.qsize() == 0

    def close(self) -> None:
        """Refuses new items; items in the queue can still be taken. Callers that wait for more get ClosedError."""
        self._actor.shut()

    def shutdown(self) -> None:
        """Ends the queue's worker, with what is in it."""
        self._actor.cluster.shutdown()

    def wire(self) -> tuple[int, Any]:
        return _codec.QUEUE, [self._actor]


def _decode_queue(codec: _codec.Codec, value: Any) -> Queue:
    return Queue._of(value[0])


_codec.set_decoder(_codec.QUEUE, _decode_queue)
