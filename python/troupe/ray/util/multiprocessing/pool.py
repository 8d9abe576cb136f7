"""A pool of the standard library whose tasks run in actors. Each thread of the pool has an actor, and calls it."""

from __future__ import annotations

import multiprocessing.pool
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ... import exceptions
from ..._session import init, is_initialized


class _Worker:
    """The actor of a thread."""

    def __init__(self, initializer: Callable[..., object] | None, initargs: Sequence[object]) -> None:
        if initializer is not None:
            initializer(*initargs)

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return function(*args, **kwargs)


class Pool(multiprocessing.pool.ThreadPool):
    """multiprocessing.Pool on a cluster. processes is by default the number of its CPUs; ray_remote_args are options of
    the actors. A pool without a session joins the one that ray_address or init finds, or starts one."""

    _state = "not started"  # until the constructor of the base class

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[object] | None = None,
        maxtasksperchild: int | None = None,
        context: object = None,
        ray_address: str | None = None,
        ray_remote_args: dict[str, Any] | None = None,
    ) -> None:
        from ... import cluster_resources, get, remote

        if not is_initialized():
            _join_or_start(ray_address, processes)
        options = {"num_cpus": 1, **(ray_remote_args or {})}
        cpus = int(cluster_resources().get("CPU", 0))
        processes = processes or cpus
        if processes <= 0:
            raise ValueError("Processes in the pool must be >0.")
        if processes * options["num_cpus"] > cpus:
            raise ValueError(f"Tried to start a pool with {processes} processes on an existing ray cluster, but there "
                             f"are only {cpus} CPUs in the ray cluster.")  # fmt: skip
        self._class = remote(**options)(_Worker)
        self._arguments = (initializer, tuple(initargs or ()))
        self._limit = maxtasksperchild
        self._actors: dict[int, Any] = {}  # by thread
        self._used: dict[int, int] = {}  # by thread: the tasks that its actor has run
        self._free = [self._new_actor() for _ in range(processes)]
        get([actor.__ray_ready__.remote() for actor in self._free])
        super().__init__(processes)

    def _new_actor(self) -> Any:
        return self._class.remote(*self._arguments)

    def _run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a task in the actor of this thread."""
        from ... import get

        thread = threading.get_ident()
        if thread not in self._actors:
            self._actors[thread] = self._free.pop()
        elif self._limit and self._used.get(thread, 0) >= self._limit:
            self._actors[thread] = self._new_actor()
            self._used[thread] = 0
        self._used[thread] = self._used.get(thread, 0) + 1
        return get(self._actors[thread].run.remote(function, tuple(args), dict(kwargs)))

    # The standard library's pool calls functions through one of these two.

    def apply_async(
        self, func: Any, args: Any = (), kwds: Any = None, callback: Any = None, error_callback: Any = None
    ) -> Any:
        return super().apply_async(self._run, (func, tuple(args), kwds or {}), {}, callback, error_callback)

    def _map_async(
        self, func: Any, iterable: Any, mapper: Any, chunksize: Any = None, callback: Any = None,
        error_callback: Any = None,
    ) -> Any:  # fmt: skip
        return super()._map_async(  # type: ignore[misc]
            func, iterable, _Mapped(self, mapper), chunksize, callback, error_callback
        )

    def imap(self, func: Any, iterable: Iterable[Any], chunksize: int | None = 1) -> Any:
        """Returns an iterator of the results. That of a call that failed is its exception."""
        return _Results(self, super().imap, func, iterable, chunksize)

    def imap_unordered(self, func: Any, iterable: Iterable[Any], chunksize: int | None = 1) -> Any:
        return _Results(self, super().imap_unordered, func, iterable, chunksize)

    def terminate(self) -> None:
        """Ends the actors at once; calls under way fail."""
        from ... import kill

        for actor in [*self._actors.values(), *self._free]:
            kill(actor)
        self.close()

    def join(self) -> None:
        super().join()
        self._actors.clear()
        self._free.clear()


class _Mapped:
    """Maps a chunk in the actor of a thread."""

    def __init__(self, pool: Pool, mapper: Callable[..., Any]) -> None:
        self._pool, self._mapper = pool, mapper

    def __call__(self, chunk: Any) -> Any:
        return self._pool._run(self._mapper, (chunk,), {})


class _Caught:
    """A function that returns its exception."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, chunk: Sequence[Any]) -> list[Any]:
        found = []
        for value in chunk:
            try:
                found.append(self._function(value))
            except Exception as err:
                found.append(err)
        return found


class _Results:
    """The results of imap. Chunks go to the actors as they are taken from the iterable."""

    def __init__(self, pool: Pool, start: Any, func: Any, iterable: Iterable[Any], chunksize: int | None) -> None:
        chunks = multiprocessing.pool.Pool._get_tasks(func, iter(iterable), chunksize or 1)  # type: ignore[attr-defined]
        self._chunks = start(lambda task: self._chunk(pool, *task), chunks)
        self._ready: list[Any] = []

    @staticmethod
    def _chunk(pool: Pool, func: Any, chunk: Sequence[Any]) -> list[Any]:
        try:
            found: list[Any] = pool._run(_Caught(func), (chunk,), {})
            return found
        except exceptions.RayError as err:
            return [err] * len(chunk)

    def __iter__(self) -> Iterator[Any]:
        return self

    def next(self, timeout: float | None = None) -> Any:
        if not self._ready:
            self._ready = list(self._chunks.next(timeout))
        return self._ready.pop(0)

    __next__ = next


def _join_or_start(address: str | None, processes: int | None) -> None:
    try:
        init(address or "auto")
    except ConnectionError:
        if address is not None:
            raise
        init(num_cpus=processes)
