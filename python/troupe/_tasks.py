"""Counterparts of Ray's API: remote functions on a pool of workers, actors by name, nodes and resources."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import _actor, _check, _errors, _result_stream, _router, _seam, _serve, _session, _source
from ._cluster import Cluster, WorkerHandle
from ._config import WorkerConfig
from ._future import ElementFuture

_MOST_WAITING = 1 << 20  # calls that may wait for a worker of the pool
_MOST_KEPT = 256  # unpickled functions that a worker caches


class TaskWorker:
    """A worker of the pool. It runs the functions that it is sent."""

    def __init__(self) -> None:
        self._functions: OrderedDict[bytes, Any] = OrderedDict()  # by digest

    def run(self, digest: bytes, pickled: bytes, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        function = self._functions.get(digest)
        if function is None:
            import pickle

            function = self._functions[digest] = pickle.loads(pickled)
            if len(self._functions) > _MOST_KEPT:
                self._functions.popitem(last=False)
        return function(*args, **kwargs)

    def stream(
        self, digest: bytes, pickled: bytes, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Iterator[Any]:
        values = self.run(digest, pickled, args, kwargs)
        yield from _result_stream.blocking(values) if hasattr(values, "__anext__") else values


_lock = threading.Lock()  # held while a session's pool is created


class Pool:
    """The workers of a session that run its functions: one for each CPU of this machine, at most 32."""

    def __init__(self) -> None:
        count = min(os.cpu_count() or 1, 32)
        cluster = Cluster(
            f"tasks-{_actor._unique()}",
            TaskWorker,
            worker_config=WorkerConfig(world_size=count, policy="restart_rank", restarts=1000),
        )
        self.router = _router.Router(cluster, method="run", credits=1, waiting=_MOST_WAITING)
        self._streams = itertools.cycle(cluster.workers)  # the worker of the next generator

    def stream(self, *arguments: object) -> Any:
        """Starts a generator function. Its worker runs other functions between its values."""
        return next(self._streams).stream.remote(*arguments)


def _pool(session: _session.Session) -> Pool:
    """Returns the session's pool, and creates it on first use."""
    with _lock:
        pool: Pool | None = session.pool
        if pool is None:
            pool = session.pool = Pool()
        return pool


class RemoteFunction:
    """A function that runs on a worker of the session's pool. f.remote(…) returns a future."""

    def __init__(self, function: Callable[..., Any], num_returns: int | None = None) -> None:
        self._function = function
        self._num_returns = num_returns
        self._pickled: tuple[bytes, bytes] | None = None  # digest, pickle
        self.__name__ = getattr(function, "__name__", "function")
        self.__doc__ = function.__doc__

    def remote(self, /, *args: object, **kwargs: object) -> Any:
        """Runs the function on a worker of the pool. Returns a future; with num_returns, a list of futures. The future
        of a generator function gives its values one by one: `for x in f.remote(…)`, `async for`."""
        session = _session.current()
        if self._pickled is None:
            import hashlib

            pickled = _source.dump(session.codec(True), self._function)
            self._pickled = hashlib.sha256(pickled).digest(), pickled
        if self._num_returns is None and _serve.is_generator_function(self._function):
            return _pool(session).stream(*self._pickled, list(args), kwargs)
        future = _pool(session).router.call(*self._pickled, list(args), kwargs, blocking=False)
        if self._num_returns is None:
            return future
        return [ElementFuture(future, i, self._num_returns) for i in range(self._num_returns)]

    def options(self, *, num_returns: int | None = None) -> RemoteFunction:
        """Returns the function with other settings."""
        changed = RemoteFunction(
            self._function, None if num_returns is None else _check.integer("num_returns", num_returns, 1)
        )
        changed._pickled = self._pickled
        return changed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _errors.InvalidError(f"a remote function is called with {self.__name__}.remote(…)")

    def __repr__(self) -> str:
        return f"<remote function {self.__name__}>"


class RemoteClass:
    """A class whose .remote(…) creates an actor. .options(name=…, …) takes the settings of troupe.actor."""

    def __init__(self, cls: type, settings: dict[str, Any]) -> None:
        self._cls = cls
        self._settings = settings
        self.__name__, self.__doc__ = cls.__name__, cls.__doc__

    def remote(self, /, *args: object, **kwargs: object) -> WorkerHandle:
        """Creates an actor with these constructor arguments."""
        return _actor.create(self._cls, args, kwargs, **self._settings)

    def options(self, **settings: object) -> RemoteClass:
        return RemoteClass(self._cls, {**self._settings, **settings})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _errors.InvalidError(f"an actor is created with {self.__name__}.remote(…)")


def remote(target: Any = None, /, **settings: Any) -> Any:
    """Makes a function or a class run in another process: `@troupe.remote`, `@troupe.remote(num_returns=2)`.

    A function runs on a pool of workers that the session creates at the first call; each worker runs one call at a
    time. f.remote(…) returns a future. A class becomes an actor: A.remote(…) is troupe.actor(A, …), and takes the same
    settings.
    """
    if target is None:
        return lambda target: remote(target, **settings)
    if isinstance(target, type):
        return RemoteClass(target, settings)
    if not callable(target):
        raise _errors.InvalidError(f"remote takes a function or a class, not a {type(target).__name__}")
    unknown = [s for s in settings if s != "num_returns"]
    if unknown:
        raise _errors.InvalidError(
            f"a remote function has no setting {unknown[0]!r}: the workers of the pool hold no resources; for devices "
            "or CPUs make an actor, troupe.actor(cls, num_gpus=…)"
        )
    return RemoteFunction(target).options(**settings) if settings else RemoteFunction(target)


def kill(target: WorkerHandle | Cluster) -> None:
    """Kills an actor, or all workers of a cluster, with SIGKILL. Running calls fail with WorkerLostError. On return,
    the name and the devices are free."""
    if isinstance(target, Cluster):
        target._end(_seam.kill)
    elif isinstance(target, WorkerHandle):
        if target.cluster.world_size > 1:
            raise _errors.InvalidError(
                f"{target!r} is one of {target.cluster.world_size} workers, which end together: kill(handle.cluster) "
                "ends them all"
            )
        target.cluster._end(_seam.kill)
    else:
        raise _errors.InvalidError(f"kill takes the handle of an actor or a cluster, not a {type(target).__name__}")


def get_actor(name: str) -> WorkerHandle:
    """Returns the actor of that name in this namespace. Raises NotFoundError if there is none."""
    cluster = Cluster.attach(_check.text("name", name))
    if cluster.world_size != 1:
        raise _errors.InvalidError(
            f"{name} is a role of {cluster.world_size} workers: Cluster.attach({name!r}) gives it"
        )
    return cluster.workers[0]


def nodes() -> list[dict[str, Any]]:
    """Returns the nodes: name, alive, state, labels, devices, and total and available resources."""
    session = _session.current()
    return [_node(n) for n in session.core.ask(_seam.nodes(runtime=session.id)).get()]


def _node(n: dict[str, Any]) -> dict[str, object]:
    devices = n["devices"] or []
    return {
        "name": n["node"],
        "alive": n["rank"] >= 0,
        "state": n["state"] or "ready",
        "labels": n["labels"] or {},
        "devices": [{"index": d["index"], "uuid": d["uuid"], "model": d["model"]} for d in devices],
        "resources": {
            "CPU": float(n["cpus"]),
            "GPU": float(len(devices)),
            "memory": float(n["memory"]),
            **_declared(n["resources"]),
        },
        "available": {
            "CPU": n["free_cpus"] / 1000,
            "GPU": n["free_devices"] / 1000,
            "memory": float(n["free_memory"]),
            **_declared(n["free_resources"]),
        },
    }


def _declared(amounts: dict[str, int] | None) -> dict[str, float]:
    return {name: amount / 1000 for name, amount in (amounts or {}).items()}


def _sum(kind: str) -> dict[str, float]:
    total: dict[str, float] = {"CPU": 0.0, "GPU": 0.0, "memory": 0.0}
    for node in nodes():
        for name, amount in node[kind].items() if node["alive"] else ():
            total[name] = total.get(name, 0.0) + amount
    return total


def cluster_resources() -> dict[str, float]:
    """Returns the total CPUs, GPUs, bytes of memory and declared resources of all nodes."""
    return _sum("resources")


def available_resources() -> dict[str, float]:
    """Returns the resources of all nodes that are not reserved."""
    return _sum("available")
