"""Deaths of workers, as events: callbacks and futures."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from . import _core, _errors, _seam
from ._future import Asked


class Role(Protocol):
    """What is watched: the Cluster of a role."""

    _core: _core.Core
    _id: int  # of the opened cluster in the core

    @property
    def name(self) -> str: ...

    def _open(self) -> Role: ...


class Death:
    """The death of a worker, or the end of a role."""

    __slots__ = ("error", "generation", "rank", "role")

    def __init__(self, role: str, rank: int | None, generation: int, error: _errors.Error | None) -> None:
        self.role = role
        self.rank = rank  # None: the whole role has ended
        self.generation = generation  # how often the worker's rank had been restarted
        self.error = error  # the cause, which calls raise

    def __repr__(self) -> str:
        return f"<Death of {self.role}{'' if self.rank is None else f'[{self.rank}]'}: {self.error}>"


def _deaths(role: str, told: Mapping[str, Any]) -> list[Death]:
    return [
        Death(role, None if d["rank"] < 0 else d["rank"], d["gen"], _errors.from_wire(d["error"]))
        for d in told["deaths"] or []
    ]


def next_death(cluster: Role) -> Asked:
    """Returns a future of the next death."""

    def read(told: dict[str, Any]) -> Death:
        return next(
            iter(_deaths(cluster.name, told)),
            Death(cluster.name, None, 0, _errors.ClosedError(f"cluster {cluster.name} is closed")),
        )

    return Asked(cluster._core, _seam.deaths(cluster=cluster._open()._id, seen=-1), read=read)


async def since(cluster: Role, seen: int) -> tuple[list[Death], int, bool]:
    """Waits for a death after the first `seen`. Returns the new deaths, the total number, and whether the role has
    ended."""
    told = await Asked(cluster._core, _seam.deaths(cluster=cluster._open()._id, seen=seen))
    return _deaths(cluster.name, told), told["seen"], told["ended"]


class Watch:
    """Calls callbacks for the deaths of one cluster's workers, on a dedicated thread. The core reports deaths through
    the side queue, so that threads that make calls are not woken."""

    def __init__(self, cluster: Role) -> None:
        import queue

        self._cluster = cluster._open()
        self._callbacks: list[Callable[[Death], None]] = []
        self._told: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        cluster._core.share_side()
        self._ask(0)
        threading.Thread(target=self._run, daemon=True, name=f"troupe-deaths-{cluster.name}").start()

    def add(self, callback: Callable[[Death], None]) -> Callable[[], None]:
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    def _ask(self, seen: int) -> None:
        asked = Asked(self._cluster._core, _seam.deaths(cluster=self._cluster._id, seen=seen, side=True))
        asked.add_done_callback(self._arrived)

    def _arrived(self, asked: Asked) -> None:
        self._told.put(None if asked._error is not None else asked._value)

    def _run(self) -> None:
        while (told := self._told.get()) is not None:
            for death in _deaths(self._cluster.name, told):
                for callback in list(self._callbacks):
                    self._call(callback, death)
            if told["ended"]:
                return
            self._ask(told["seen"])

    def _call(self, callback: Callable[[Death], None], death: Death) -> None:
        try:
            callback(death)
        except Exception as err:
            warnings.warn(
                f"a callback for deaths of {self._cluster.name} raised {type(err).__name__}: {_errors.text_of(err)}",
                RuntimeWarning,
                stacklevel=2,
            )
